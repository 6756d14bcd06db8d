"""A script that leaves the types of axes to `jax.make_mesh`, and fails on Explicit ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from automesh.errors import UsageError
from automesh.program.absent import unsaid_axes
from automesh.program.capture.world import told
from automesh.worker.handlers.auto_axes import with_its_axes

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
table = put(np.linspace(0, 1, 32 * 16, dtype=np.float32).reshape(32, 16), None, "model")
@jax.jit
def train_step(table, tokens):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((w[tokens] - 1) ** 2))(table)
    return table - 0.1 * g, loss
for n in range(4):
    table, loss = train_step(table, put(np.arange(n, n + 8) % 32, "data"))
"""
# Without a gather, the step works on Explicit axes.
EXPLICIT = SCRIPT.replace("w[tokens] - 1", "w * tokens.sum() - 1")
BOTH = SCRIPT.replace("return table", "assert table.shape == ()\n    return table")


def captured(text: str, folder: Path, meshes: str) -> dict[str, Any]:
    (folder / "train.py").write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.jobs.captured_script"),
            *(meshes, "", "", str(folder / "train.py")),
        ],
        env=environment | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_script_that_explicit_axes_refuse_is_run_with_auto_ones(tmp_path: Path) -> None:
    found = captured(SCRIPT, tmp_path, "data:4/data:2,model:2/model:4")
    assert found["axis_types"] == ["auto", "auto"]
    assert found["step"] == "train_step"
    (first, *others) = [losses for runs in found["losses"].values() for losses in runs]
    assert len(first) == 3
    assert all(one == pytest.approx(first) for one in others)


@pytest.mark.slow
def test_a_script_that_works_on_explicit_axes_keeps_them(tmp_path: Path) -> None:
    assert captured(EXPLICIT, tmp_path, "")["axis_types"] == ["explicit", "explicit"]


@pytest.mark.slow
def test_where_auto_axes_do_not_help_both_errors_are_said(tmp_path: Path) -> None:
    found = captured(BOTH, tmp_path, "")
    assert "before its step: ShardingTypeError: " in found["error"]
    assert "; with Auto axes, train.py fails at train.py:10 before its step: " in found["error"]
    # On a busy machine the 20 s in which the script runs by itself may end before that line.
    same, late = "fails by itself, too", "had not reached that line"
    assert same in found["hint"] or late in found["hint"]


@pytest.mark.slow
def test_a_search_says_where_the_types_would_be_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:4", "--dry-run"],
        cwd=tmp_path,
        env=environment | {"COLUMNS": "900"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "is not told the types (train.py:4); with the Explicit axes that jax" in done.stdout
    assert "train.py fails at train.py:9 before its step: ShardingTypeError: " in done.stdout


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("with_sharding_constraint acts as an assert when all axes are of type `Explicit`", True),
        ("P('data') does not match the specs of the input: P(None) for arg: int32[16]", True),
        ("the input carry has type float32[8@data] but the output has float32[8]", True),
        ("Use `.at[...].get(out_sharding=)` to provide output PartitionSpec", True),
        ("No such file: data/train.bin", False),
        ("add got incompatible shapes for broadcasting: (8,), (4,): float32[8], mail@x.org", False),
        ("layer[@x is no parameter; seed[3@], cfg[seed@3]", False),
    ],
)
def test_which_errors_are_about_explicit_axes(text: str, refuses: bool) -> None:
    def step(x: Any) -> Any:
        raise ValueError(text)

    with pytest.raises(ValueError) as raised:
        jax.make_jaxpr(step)(1.0)
    error = raised.value
    unsaid_axes.forget_place()
    assert not unsaid_axes.refuses_explicit(error)
    unsaid_axes.types_for(("data",), "train.py:1")
    assert unsaid_axes.refuses_explicit(error) == refuses
    assert not unsaid_axes.refuses_explicit(ValueError(text)), "jax has not raised it"
    with unsaid_axes.unsaid_axes(are_auto=True):
        assert not unsaid_axes.refuses_explicit(error)
    unsaid_axes.forget_place()


def test_an_error_that_stays_the_same_is_said_once() -> None:
    def fails() -> Any:
        raise UsageError("train.py fails at train.py:3")

    with mock.patch.object(told, "refuses_axes", lambda: True), pytest.raises(UsageError) as raised:
        with_its_axes(fails, lambda _: None)
    assert raised.value.message == "train.py fails at train.py:3"
