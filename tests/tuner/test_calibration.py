"""Calibrations: of real virtual devices, and what becomes of them when things go wrong."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automesh.collectives import MEASURED
from automesh.errors import Interrupted, UsageError
from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.hardware.calibration.points import (
    STREAM_FORMS,
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Probe,
    StreamProbe,
)
from automesh.hardware.calibration.probes import Lot, plan_lots
from automesh.hardware.calibration.profile_files import find_profile, host_of, read_profile
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.outcomes import Failed, TimedOut
from automesh.program.execute import calibrate
from automesh.program.execute.calibrate import work_of
from automesh.program.execute.team import Alone
from automesh.program.nouns import Attachment, Device, ProbeTimes
from automesh.report.progress import PlainProgress, Silent
from automesh.tuner import calibration, workers
from automesh.tuner.calibration import CalibrationRequest, run_calibration
from automesh.worker.messages import CalibrateJob, Job
from tests.hardware.calibration.test_profile import point
from tests.support.cases import bad_inputs_run


def few_lots(fabric: Fabric, layouts: Layouts) -> tuple[Lot, ...]:
    """Of what a calibration takes, a little of each kind."""
    kept = {
        KernelProbe: lambda one: True,
        StreamProbe: lambda one: one.form == "copy" and one.bytes <= 2**18,
        MatmulProbe: lambda one: one.m == one.n == one.k and one.m <= 64 and one.batch == 1,
        CollectiveProbe: lambda one: (
            one.collective in ("all-reduce", "all-to-all")
            and one.payload_bytes < 2**18
            and one.stride == 1
        ),
    }
    lots = (
        Lot(name=lot.name, probes=tuple(one for one in lot.probes if kept[type(one)](one)))
        for lot in plan_lots(fabric, layouts)
    )
    return tuple(lot for lot in lots if lot.probes)


@pytest.mark.slow
def test_virtual_devices_are_measured_and_found_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOMESH_PROFILES", str(tmp_path))
    monkeypatch.setattr(calibration, "ROUNDS", 3)
    monkeypatch.setattr(calibration, "SAMPLE_S", 0.004)
    said = io.StringIO()
    request = CalibrationRequest(target="cpu:4", out=None, budget_s=600.0)
    result = run_calibration(request, PlainProgress(said), plan=few_lots)

    assert (result.skipped, result.interrupted) == ((), False)
    total = sum(len(lot.probes) for lot in few_lots(_FABRIC, _NOWHERE))
    # On a very busy machine single points may drown in noise.
    assert total - 5 <= result.measured == len(result.profile.points) <= total
    profile = find_profile("cpu", "cpu", 4, environ=os.environ)
    assert profile == result.profile == read_profile(Path(result.path))
    assert (profile.num_devices, profile.host) == (4, host_of("cpu"))
    assert {"jax", "jaxlib"} <= set(dict(profile.versions))
    assert {fit.dtype for fit in profile.matmuls} == {"f32", "bf16"}
    laws = {(fit.collective, fit.group_size) for fit in profile.collectives}
    assert laws <= {(kind, size) for kind in ("all-reduce", "all-to-all") for size in (2, 4)}
    assert {kind for kind, _ in laws} == {"all-reduce", "all-to-all"}
    assert all(one.samples == 3 and one.seconds > 0 for one in profile.points)

    speeds = find_speeds(
        Fabric(kind="shared", chip=_chip(), num_granules=1, granule_devices=4),
        platform="cpu",
        device_kind="cpu",
        environ=os.environ,
    )
    assert speeds.origin.startswith("calibration of 4 x cpu on")
    size = np.array([64.0])
    # Between a hundred MFLOP/s and ten TFLOP/s: it is the time of this multiplication.
    assert 5e-8 < speeds.matmul_s("f32", np.array([1.0]), size, size, size)[0] < 5e-3
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("... ")]
    assert lines[0] == f"calibrate 0/{total}"
    assert said.getvalue().splitlines()[-1] == f"calibrate {total}/{total}"

    table = result.table(width=80, colour=False)
    assert max(map(len, table.splitlines())) <= 80
    for words in ("all-reduce over", "f32 matmul", "FLOP/s", "error", result.path):
        assert words in re.sub(r"\n {10}", "", table)
    assert json.loads(json.dumps(result.to_json()))["profile"]["num_devices"] == 4


@pytest.mark.slow
def test_processes_measure_what_crosses_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOMESH_PROFILES", str(tmp_path))
    monkeypatch.setattr(calibration, "ROUNDS", 3)
    monkeypatch.setattr(calibration, "SAMPLE_S", 0.004)
    request = CalibrationRequest(target="cpu:2*2", out=None, budget_s=600.0)
    result = run_calibration(request, Silent(), plan=lots_of_groups)

    assert (result.skipped, result.interrupted) == ((), False)
    measured = {
        (one.probe.collective, one.probe.group_size, one.probe.granules)
        for one in result.profile.points
        if isinstance(one.probe, CollectiveProbe)
    }
    kinds = ("all-reduce", "all-gather")
    wanted = {(kind, *group) for kind in kinds for group in ((2, 1), (1, 2), (2, 2))}
    # On a very busy machine single points may drown in noise.
    assert measured <= wanted
    assert len(measured) >= 4
    about = {"platform": "cpu", "device_kind": "cpu", "environ": os.environ}
    fabric = replace(_FABRIC, num_granules=2, granule_devices=2)
    speeds = find_speeds(fabric, **about)
    assert speeds.origin.startswith("calibration of 4 x cpu in 2 granules on")
    # Four devices of one process are others.
    assert find_speeds(_FABRIC, **about).origin != speeds.origin
    table = result.table(width=80, colour=False)
    assert "over 2 in each of 2 granules" in re.sub(r"\s+", " ", table)


def lots_of_groups(fabric: Fabric, layouts: Layouts) -> tuple[Lot, ...]:
    """Two sizes of two kinds of collectives, inside the processes and between them."""
    probes = [
        one
        for lot in plan_lots(fabric, layouts)
        for one in lot.probes
        if isinstance(one, CollectiveProbe)
        and one.collective in ("all-reduce", "all-gather")
        and 4096 < one.payload_bytes < 2**20
    ]
    assert {one.granules for one in probes} == {1, 2}
    return (Lot(name="collectives", probes=tuple(probes)),)


def _chip():
    from automesh.hardware.chips import chip_for

    return chip_for("cpu", "cpu")


_FABRIC = Fabric(kind="shared", chip=_chip(), num_granules=1, granule_devices=4)
_NOWHERE = Layouts(shapes=(), spans=())


# What the programs do: on the first of the test process's own devices.

_OPCODES = {
    **{kind: rf"\b{kind}(-start)?\(" for kind in MEASURED},
    "matmul": r"/dot_general\"",  # a fusion of a library's, on some versions
    "stream": r"\bfusion\(",
}


def probes_of_every_kind() -> list[Probe]:
    return [
        *(
            CollectiveProbe(
                collective=kind, group_size=4, stride=2, payload_bytes=4096, link_s=1e-6
            )
            for kind in MEASURED
        ),
        MatmulProbe(dtype="f32", batch=2, m=24, n=16, k=8),
        *(StreamProbe(form=form, bytes=2**16) for form in STREAM_FORMS),
    ]


@pytest.mark.parametrize("probe", probes_of_every_kind(), ids=str)
def test_the_loop_does_what_the_probe_says(probe: Probe) -> None:
    text = calibrate.compile_work(work_of(probe), Alone()).compiled.as_text()
    body = _body_of_the_loop(text)
    name = probe.collective if isinstance(probe, CollectiveProbe) else probe.kind
    assert re.search(_OPCODES[name], body), body
    if isinstance(probe, CollectiveProbe):
        groups = re.search(r"replica_groups=(\S+)|source_target_pairs=(\S+)", body)
        assert groups is not None


def test_a_chain_of_tiny_kernels_is_not_fused() -> None:
    work = work_of(KernelProbe())
    body = _body_of_the_loop(calibrate.compile_work(work, Alone()).compiled.as_text())
    links = calibrate._LONG_CHAIN
    # One or two more: the last sum, and the count of the loop.
    assert links <= len(re.findall(r"= .*\b(fusion|reduce)\(", body)) <= links + 2


def _body_of_the_loop(text: str) -> str:
    name = re.search(r"body=%?([\w.\-]+)", text)
    assert name is not None
    (body,) = re.findall(rf"^%?{re.escape(name[1])} .*?^}}", text, re.MULTILINE | re.DOTALL)
    return body


@pytest.mark.parametrize("form", STREAM_FORMS)
def test_no_turn_copies_the_whole_array_back(form: str) -> None:
    # A GPU spent half of its time on that, and looked half as fast.
    work = work_of(StreamProbe(form=form, bytes=2**16))
    body = _body_of_the_loop(calibrate.compile_work(work, Alone()).compiled.as_text())
    rows = work.arrays[0][0][0]
    assert not re.search(rf"= f32\[[\d,]*{rows}[\d,]*\]\S* copy\(", body), body


def test_values_look_random() -> None:
    program = calibrate.compile_work(
        work_of(MatmulProbe(dtype="f32", batch=1, m=64, n=64, k=64)), Alone()
    )
    left, right, _ = (np.asarray(array)[0].ravel() for array in program.state)
    for values in (left, right):
        assert len(np.unique(values)) > 0.99 * values.size
        assert -0.75 <= values.min() < -0.7 and 0.7 < values.max() <= 0.75
        for lag in (1, 2, 21, 64, 89, 233, 1024):
            assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.1


_TURN_S, _GRAPH_TURN_S, _LINK_S = 20e-6, 3e-6, 2e-6


def _pretend(runs: list[int], *, is_disturbed: bool = False) -> Callable[..., calibrate.ProbeTrial]:
    """Loops whose turns cost something by themselves, as a GPU's do: less where the body has so
    many kernels that it is a graph."""
    chains = iter((1, calibrate._CHAIN, calibrate._LONG_CHAIN))

    def ready(work: calibrate.Work, *_: object) -> calibrate.ProbeTrial:
        size = 2 * 4 * math.prod(work.arrays[0][0])
        turn_s, spent_s = _TURN_S, size * 1e-9
        if size < 1024:
            links = next(chains)
            turn_s, spent_s = _TURN_S if links == 1 else _GRAPH_TURN_S, links * _LINK_S

        def run(loops: int) -> float:
            runs.append(size)
            # The third round is disturbed: the middle of the rounds is not.
            slow = 100.0 if is_disturbed and loops and len(runs) > 24 else 1.0
            return 0.5 + slow * loops * (turn_s + spent_s)

        return calibrate.ProbeTrial(run=run, loops=10)

    return ready


def test_what_a_turn_costs_by_itself_is_taken_off(monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "_ready", _pretend([]))
    probes = [KernelProbe(), StreamProbe(form="copy", bytes=2048)]
    points = calibrate.calibrate(probes, rounds=3, sample_s=0.01, done=lambda _: None, team=Alone())
    assert [one.probe for one in points] == probes
    assert [one.seconds for one in points] == pytest.approx([_LINK_S, 2048e-9])


def test_samples_are_shuffled_and_their_middle_is_told(monkeypatch) -> None:
    probes = [StreamProbe(form="copy", bytes=size) for size in (1024, 2048, 4096)]
    runs: list[int] = []
    monkeypatch.setattr(calibrate, "_ready", _pretend(runs, is_disturbed=True))
    parts: list[int] = []
    points = calibrate.calibrate(probes, rounds=3, sample_s=0.01, done=parts.append, team=Alone())
    assert [one.probe for one in points] == probes
    assert [one.seconds for one in points] == pytest.approx([1024e-9, 2048e-9, 4096e-9])
    assert all(one.spread > 0 for one in points)
    assert parts == [1, 2, 3, 4, 5, 6]
    rounds = [runs[start : start + 12 : 2] for start in (0, 12, 24)]
    assert all(sorted(one)[3:] == [1024, 2048, 4096] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


# When things go wrong, in a pool that only pretends.


class Pretender:
    """A pool of one worker that answers at once with what `results` says, lot by lot."""

    results: tuple[object, ...] = ()
    taken: int = 0

    def __init__(self, **_: object) -> None:
        type(self).taken = 0

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, job: Job, _: float, on_event: Any, **__: object) -> object:
        if isinstance(job, CalibrateJob):
            on_event({"event": "stage", "stage": "calibrate"})
            on_event({"event": "calibrated", "parts": 1, "of": 5})
            return self._measured(job)
        one = {"platform": "cpu", "kind": "cpu", "process_index": 0, "slice_index": 0}
        return Attachment(
            devices=tuple(Device(id=place, coords=(), **one) for place in range(4)),
            process_count=1,
            device_memory_bytes=0,
            versions=(("jax", "0.10.2"),),
            environment=(),
        )

    def _measured(self, job: CalibrateJob) -> object:
        result = self.results[min(self.taken, len(self.results) - 1)]
        type(self).taken += 1
        if isinstance(result, BaseException):
            raise result
        if result is None:
            return ProbeTimes(points=tuple(point(probe, 1e-6) for probe in job.probes))
        return result


def pretend(monkeypatch, tmp_path: Path, *results: object, budget_s: float = 100.0, **more):
    monkeypatch.setattr(workers, "Pool", type("_", (Pretender,), {"results": results}))
    request = CalibrationRequest(target="cpu:4", out=tmp_path / "p.json", budget_s=budget_s)
    return run_calibration(request, Silent(), **more)


def test_a_lot_that_fails_is_named_and_the_others_go_on(monkeypatch, tmp_path) -> None:
    failures = (Failed(stage="calibrate", reason="it broke"), TimedOut(stage="run", limit_s=1.0))
    result = pretend(monkeypatch, tmp_path, None, *failures, None)
    assert result.failed == (
        "f32 multiplications: it broke",
        "collectives over 2 devices: no answer in time",
    )
    assert result.profile.streams and not [f for f in result.profile.matmuls if f.dtype == "f32"]
    assert {fit.group_size for fit in result.profile.collectives} == {4}
    assert "it broke" in result.table(width=80, colour=False)


def test_the_budget_leaves_out_what_would_not_end_in_time(monkeypatch, tmp_path) -> None:
    now = iter(range(10_000))
    result = pretend(monkeypatch, tmp_path, None, budget_s=4.0, clock=lambda: next(now) * 1.0)
    assert result.measured > 0
    assert result.skipped
    assert "the budget was spent" in re.sub(r"\s+", " ", result.table(width=80, colour=False))


def test_ctrl_c_keeps_what_is_measured(monkeypatch, tmp_path) -> None:
    result = pretend(monkeypatch, tmp_path, None, KeyboardInterrupt())
    assert result.interrupted
    assert read_profile(tmp_path / "p.json") == result.profile
    assert result.profile.kernel_s == 1e-6
    with pytest.raises(Interrupted):
        pretend(monkeypatch, tmp_path / "other", KeyboardInterrupt())


def test_nothing_measured_is_an_error_with_its_reason(monkeypatch, tmp_path) -> None:
    with pytest.raises(UsageError, match="it broke") as caught:
        pretend(monkeypatch, tmp_path, Failed(stage="calibrate", reason="it broke"))
    assert "automesh doctor" in caught.value.hint
    assert not (tmp_path / "p.json").exists()


def test_points_that_drown_in_noise_are_no_points(monkeypatch, tmp_path) -> None:
    drowned = ProbeTimes(points=(point(KernelProbe(), 0.0), point(_COPY, 1e-6)))
    result = pretend(monkeypatch, tmp_path, drowned, None)
    assert KernelProbe() not in {one.probe for one in result.profile.points}
    assert result.failed == ("kernels and copies: 1 of 2 drowned in noise",)


_COPY = StreamProbe(form="copy", bytes=16384)


def test_the_command_prints_the_table_or_the_profile(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(workers, "Pool", type("_", (Pretender,), {"results": (None,)}))
    ran = bad_inputs_run.run("calibrate --target cpu:4 --out p.json", tmp_path)
    assert (ran.code, ran.stderr.splitlines()[-1]) == (0, "calibrate 93/93")
    assert "all-gather over 4" in ran.stdout
    again = bad_inputs_run.run("calibrate --target cpu:4 --out p.json --json", tmp_path)
    assert json.loads(again.stdout)["measured"] == 93
    stopped = type("_", (Pretender,), {"results": (None, KeyboardInterrupt())})
    monkeypatch.setattr(workers, "Pool", stopped)
    ran = bad_inputs_run.run("calibrate --target cpu:4 --out p.json", tmp_path)
    assert ran.code == 130
    assert "Measured speeds" in ran.stdout
    assert "what is measured is kept" in ran.stderr
