"""What workers are told of the step that they lower on virtual devices."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.targets import parse_target
from automesh.program.nouns import Device, Entry, StepRef
from automesh.tuner.estimate.terms_cache import TERMS
from automesh.tuner.session import _beside, _step, _step_on_virtual_devices
from automesh.tuner.study.identity import BUNDLE

STEP = StepRef(entry=Entry(kind="script", location="train.py", function="build"))
SAYS = (("compute_capability", "9.0"),)


def prepared(kind: str, platform: str, *, step: StepRef = STEP, **where: Any) -> Any:
    first = Device(
        id=0,
        platform=platform,
        kind=kind,
        process_index=0,
        slice_index=0,
        says=SAYS,
        **{"coords": (), **where},
    )
    return SimpleNamespace(
        step=step,
        inspection=SimpleNamespace(devices=(first,), seen=()),
        aim=SimpleNamespace(platform=platform, device_kind=kind, memory_bytes=7),
    )


def told(target: str, preparation: Any) -> AbsentDevices | None:
    parsed = parse_target(target, os.environ)
    step = _step_on_virtual_devices(preparation, parsed)
    assert _step(preparation, parsed, SimpleNamespace(names=("dp",))).step == step  # pyright: ignore
    return step.absent


def test_of_attached_accelerators_they_are_told() -> None:
    """Before, only those of a target that is not here were told of."""
    found = told("local", prepared("NVIDIA H200", "gpu"))
    assert found is not None and found.is_attached
    assert (found.platform, found.device_kind, found.num_devices) == ("gpu", "NVIDIA H200", 1)
    assert (found.gpu, found.says, found.memory_bytes) == ("h200", SAYS, 7)
    found = told("local", prepared("TPU v5 lite", "tpu", coords=(0, 0, 0)))
    assert found is not None and (found.platform, found.torus) == ("tpu", (1, 1))


def test_virtual_devices_are_what_they_are_and_absent_ones_as_before() -> None:
    assert told("cpu:8", prepared("cpu", "cpu")) is None
    absent = AbsentDevices(
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        num_devices=16,
        num_granules=2,
        num_hosts=2,
        topology="2x1x8",
    )
    step = StepRef(entry=STEP.entry, absent=absent)
    assert told("gpu-h100-16", prepared("", "gpu", step=step)) is absent


def test_devices_that_do_not_say_where_they_are_are_not_told_of() -> None:
    """Nothing is estimated of them either, and the estimates say so."""
    assert told("local", prepared("TPU v5 lite", "tpu")) is None


def test_terms_of_the_same_script_are_looked_for_in_the_studies_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["train-cpu-4-aa", "train-tpu-v5p-64-ab", "train-tpu-v5p-64-ab-2", "other-cpu-4-aa"]
    for age, name in enumerate(names):
        (tmp_path / name / TERMS).mkdir(parents=True)
        os.utime(tmp_path / name / TERMS, (1e9 - age, 1e9 - age))
    (tmp_path / "train-gpu-h100-8-ac").mkdir()
    (tmp_path / "train-x").write_text("a file")
    mine = tmp_path / names[1]
    found = [one.parent.name for one in _beside(mine, "train")]
    assert found == ["train-cpu-4-aa", "train-tpu-v5p-64-ab-2"]
    assert _beside(tmp_path / "none" / "train-cpu-4-aa", "train") == []
    # What anybody may write into is not believed.
    (tmp_path / names[0] / TERMS).chmod(0o777)
    assert [one.parent.name for one in _beside(mine, "train")] == found[1:]
    tmp_path.chmod(0o777)
    assert _beside(mine, "train") == []
    tmp_path.chmod(0o700)
    monkeypatch.setenv(BUNDLE, "7:/somewhere")
    assert _beside(mine, "train") == []
