"""A script whose own mesh does not divide its arrays, and of which other meshes are legal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh(SHAPE, ("data", "fsdp"), axis_types=auto)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
w = put(np.ones((60, 60), np.float32), "fsdp")
@jax.jit
def train_step(w, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * g, loss
for _ in range(4):
    w, loss = train_step(w, put(np.ones((32, 60), np.float32), ("data", "fsdp")))
"""
WHY = "dimension 0 of an array (60, 60) is 60, no multiple of 8 (56 or 64 would do)"


def dry_run(shape: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.replace("SHAPE", shape))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:8", "--dry-run"],
        cwd=folder,
        env=environment | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_a_mesh_of_fewer_devices_shows_the_step_and_all_others_are_ranked(tmp_path: Path) -> None:
    """Before, it was run on 3,600 devices, and the error was about those."""
    done = dry_run("(1, jax.device_count())", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("data:")]
    assert sorted(rows) == ["data:2,fsdp:4", "data:4,fsdp:2", "data:8"]
    assert f"of all devices does not divide its arrays ({WHY}): it was run on 4" in done.stdout


@pytest.mark.slow
def test_where_fewer_devices_do_not_do_the_first_error_is_said(tmp_path: Path) -> None:
    done = dry_run("(1, 8)", tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"error: train.py fails at train.py:6 before its step: IndivisibleError: {WHY}" in (
        done.stderr
    )
    assert "hint: on 4 devices" in done.stderr
