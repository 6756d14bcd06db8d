"""Habits of training scripts: each script of `tests/data/scripts/cases` has its right outcome on a
virtual CPU mesh, a TPU slice, two slices and two GPU nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_once import made_once
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "data" / "scripts" / "cases"
# Target -> its devices, and the options of a search.
TARGETS = {
    "cpu:4": (4, ("--budget", "4m")),
    "tpu-v5p-16": (8, ("--dry-run",)),
    "tpu-v5p-16-2": (16, ("--dry-run",)),
    "gpu-h100-16": (16, ("--dry-run",)),
}
# On a machine with much other work; a search that has its rule ends long before.
TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """What is right for a script.

    Attributes:
      step: its name; those of parts have a `+` between them.
      mesh: the script's own, as a format of `n` devices, `half` and `eighth` of them.
      batch: the axes that split the batch.
      starts: at most; 0 for any number: it is run again for each mesh, and `words` say why.
      words: in the output.
      without: not in the output.
      refused: the script ends in this one sentence, and nothing is searched.
      has_mesh: False for a script for one device, whose shardings are inferred.
      targets: on which it is tried.
    """

    step: str = "train_step"
    mesh: str = "data:{half},model:2"
    batch: tuple[str, ...] = ("data",)
    starts: int = 3
    words: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    refused: str = ""
    has_mesh: bool = True
    argv: tuple[str, ...] = ()
    targets: tuple[str, ...] = tuple(TARGETS)


ALL_DEVICES = "data:{n},model:1"
RIGHT = {
    "absl_flags": Right(argv=("--workdir", "w")),
    "callback_in_step": Right(words=("that only show something",)),
    "eval_first": Right(without=("may not be the step",)),
    "filter_jit_names": Right(step="make_step", mesh="dp:{n}", batch=("dp",)),
    "flags_of_a_library": Right(mesh=ALL_DEVICES),
    "hardcoded_mesh": Right(mesh="data:2,model:2"),
    "hybrid": Right(mesh="data:1,fsdp:{half},model:2", batch=("data", "fsdp")),
    "hybrid_slices": Right(mesh="fsdp:", batch=("data", "fsdp")),
    "jit_opt_init": Right(),
    "logging_variant": Right(mesh=ALL_DEVICES, without=("outputs[1] and",)),
    "mesh_left_in_force": Right(mesh=ALL_DEVICES),
    "micro_batches_first": Right(
        mesh="replica:{eighth},data:8",
        batch=("replica", "data"),
        targets=("tpu-v5p-16", "tpu-v5p-16-2", "gpu-h100-16"),
    ),
    "no_loss": Right(mesh="data:2,model:2"),
    "num_cpu_devices": Right(mesh="data:{n}"),
    "optimizer_outside_jit": Right(
        step="loss_and_grads",
        has_mesh=False,
        words=("only loss and gradients are jitted", "jit the update, too"),
    ),
    "orbax_hosts": Right(mesh=ALL_DEVICES),
    "own_virtual_devices": Right(step="step", mesh="rows:{n}", batch=("rows",)),
    "process_local": Right(),
    "ragged_last_batch": Right(has_mesh=False),
    "resumes": Right(mesh=ALL_DEVICES),
    "samples_text_first": Right(mesh="rows:{n}", batch=("rows",)),
    "scan_steps": Right(step="train_epoch"),
    "second_mesh": Right(mesh="data:{n}"),
    "slow_start": Right(mesh="replica:1,data:{n},model:1", batch=("replica", "data")),
    "two_jits": Right(step="loss_fn+apply_fn", batch=("data",)),
    "two_nodes": Right(mesh=ALL_DEVICES),
    "unseeded": Right(mesh="data:2,model:2", without=("numerics differ",)),
    "weak_types": Right(mesh=ALL_DEVICES, without=("another program every time",)),
    "whole_run_in_one_jit": Right(step="train", has_mesh=False),
    "with_mesh": Right(mesh="dp:1,fsdp:{half},mp:2", batch=("dp", "fsdp")),
}


def mesh_of(right: Right, count: int) -> str:
    return right.mesh.format(n=count, half=count // 2, eighth=count // 8)


def searched(
    words: list[str], target: str, folder: Path, *, argv: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    options = ["--verbose", "--results", "results", "--rules", "rules.toml"]
    command = ["search", *words, "--target", target, *TARGETS[target][1], *options]
    if argv:
        command += ["--", *argv]
    return subprocess.run(
        [sys.executable, "-m", "automesh", *command],
        cwd=folder,
        env=environment | {"COLUMNS": "400", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_every_script_has_a_right_outcome() -> None:
    assert set(RIGHT) == {path.stem for path in CASES.glob("*.py")}


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RIGHT)
def test_a_script_has_its_right_outcome(name: str, target: str, tmp_path: Path) -> None:
    right = RIGHT[name]
    if target not in right.targets:
        pytest.skip("its mesh cannot be made there")
    shutil.copy(CASES / f"{name}.py", tmp_path)
    done = searched([f"{name}.py"], target, tmp_path, argv=right.argv)
    check(right, target, done)
    found = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert found <= {f"{name}.py", "results", "rules.toml", ".rules.toml.lock"}, found


@pytest.mark.slow
def test_a_script_that_names_its_devices_is_not_run_for_nothing(tmp_path: Path) -> None:
    """Its first run without data had found how many it names; one with data came after it."""
    shutil.copy(CASES / "hardcoded_mesh.py", tmp_path)
    done = searched(["hardcoded_mesh.py"], "tpu-v5p-16", tmp_path)
    check(RIGHT["hardcoded_mesh"], "tpu-v5p-16", done)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_a_module_of_a_package_has_its_right_outcome(target: str, tmp_path: Path) -> None:
    shutil.copytree(CASES / "pkg", tmp_path / "pkg")
    done = searched(["-m", "mypkg.train"], target, tmp_path / "pkg")
    check(Right(mesh="data:{n}"), target, done)


def check(right: Right, target: str, done: subprocess.CompletedProcess[str]) -> None:
    said = done.stderr + done.stdout
    assert "Traceback" not in said
    for words in right.words:
        assert words in said
    for words in right.without:
        assert words not in said
    if right.refused:
        assert done.returncode == 2, said
        assert right.refused in said
        return
    assert done.returncode == 0, said
    for part in right.step.split("+"):
        assert f"`{part}`" in said, said
    if not right.has_mesh:
        assert "the script makes no mesh" in said, said
    else:
        assert f"its mesh {mesh_of(right, TARGETS[target][0])}" in said or right.mesh.endswith(":")
    starts = re.search(r"the script was started (\d+) times?", said)
    assert starts is not None
    assert not right.starts or int(starts[1]) <= right.starts, said
    if target == "cpu:4":
        assert "measured" in done.stdout


# Discovery alone, all in one process: what takes longer is above.
SLOW = {"slow_start", "absl_flags", "hardcoded_mesh", "no_loss", "unseeded"}
DISCOVERED = sorted(set(RIGHT) - SLOW)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return made_once(tmp_path_factory, "cases", discovered)[1]


def discovered(folder: Path) -> dict[str, dict[str, Any]]:
    for name in DISCOVERED:
        shutil.copy(CASES / f"{name}.py", folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.discovered_scripts", str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", DISCOVERED)
def test_the_first_run_finds_the_step_and_the_axes_of_the_batch(
    name: str, found: dict[str, dict[str, Any]]
) -> None:
    right, one = RIGHT[name], found[name]
    if right.refused:
        assert right.refused in one["error"]
        return
    assert one["name"] == right.step
    # Else the step is not measured, or the script is started for it again.
    assert one["has_values"]
    assert set(one["batch_axes"]) == (set(right.batch) if right.has_mesh else set())
    assert not one["doubt"] or right.words
