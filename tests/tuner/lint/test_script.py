"""`automesh lint` on scripts: which meshes, exit codes, files, and scripts without `build`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import automesh
from automesh.errors import UsageError
from automesh.tuner.lint.places import files_by_name

BUILD = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * g, loss

    w, x = struct((1024, 1024), "fsdp"), struct((64, 1024), ("dp", "fsdp"))
    return jax.jit(step{options}), (w, x)
"""
TRAIN = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.device_put(jnp.zeros((256, 256)), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((64, 128, 256)), NamedSharding(mesh, P("dp")))


@jax.jit
def train_step(w, x):
    parts = x.reshape(4, 16, 128, 256)

    def body(total, part):
        return total + jax.grad(lambda w: jnp.mean((part @ w) ** 2))(w), None

    g, _ = jax.lax.scan(body, jnp.zeros_like(w), parts)
    return w - 0.1 * g, jnp.mean(g)


for _ in range(3):
    w, loss = train_step(w, x)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "automesh", "lint", *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def test_a_finding_has_its_line_and_its_cure_in_all_three_forms(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BUILD.replace("{options}", ""))
    done = run(
        tmp_path, "train.py", "fsdp:4", "--target", "cpu:4", "--json", "--sarif", "out/x.sarif"
    )
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    (found,) = data["findings"]
    assert (found["rule"], found["file"], found["line"]) == ("undonated-state", "train.py", 12)
    assert found["tried"]["change"] == "jax.jit(..., donate_argnums=0)"
    before, after = found["tried"]["memory_bytes"]
    assert before - after == found["bytes"] == 1 << 20 and found["tried"]["is_gone"]
    written = json.loads((tmp_path / "out" / "x.sarif").read_text())
    assert written["runs"][0]["results"][0]["ruleId"] == "undonated-state"


@pytest.mark.slow
def test_a_script_that_says_no_mesh_is_looked_at_on_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BUILD.replace("{options}", ""))
    found = automesh.lint(script, target="cpu:2").found
    assert set(found.plans) == {"dp:2", "fsdp:2"} and "as with --all" in found.notices[-1]
    (one,) = found.findings
    assert one.plans == 2
    # It costs most where the state is whole.
    assert one.plan == "dp:2" and one.bytes == 4 << 20


def test_a_mended_script_has_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BUILD.replace("{options}", ", donate_argnums=0"))
    found = automesh.lint(script, "fsdp:2", target="cpu:2")
    assert found.is_clean and "nothing" in found.text(width=80)


@pytest.mark.slow
def test_a_script_that_is_run_as_it_is_is_looked_at_on_its_own_mesh(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    found = automesh.lint(script, target="cpu:4").found
    assert found.plans == ("dp:4",)
    (one,) = [one for one in found.findings if one.rule == "microbatch-reshape"]
    assert (one.line, one.array) == (14, "f32[64,128,256]") and one.tried is not None


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("mesh", "every", "why"),
    [("fsdp:3", False, "fsdp:3"), ("fsdp:2", True, "all of them as well"), ("x:2", False, "`x`")],
)
def test_what_cannot_be_looked_at_is_said(tmp_path: Path, mesh: str, every: bool, why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(BUILD.replace("{options}", ""))
    with pytest.raises(UsageError, match=why):
        automesh.lint(script, mesh, every=every, target="cpu:2")


def test_files_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "train.py",
        "model/layers.py",
        "model/utils.py",
        "data/utils.py",
        ".venv/layers.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = frozenset(("train.py", "layers.py", "utils.py", "gone.py"))
    found = files_by_name(tmp_path / "train.py", names)
    assert found == {"train.py": "train.py", "layers.py": "model/layers.py"}
    assert files_by_name(None, names) == {}
