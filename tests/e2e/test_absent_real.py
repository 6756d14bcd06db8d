"""Whole searches for devices that are not here, with their real compilers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.outcomes import Compiled, OutOfMemory
from tests.support.fakes.absent_search import SPACE
from tests.support.worker_jobs import ROOT

SCRIPT = """\
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh, rows=1024):
    assert jax.default_backend() == "PLATFORM" and len(jax.devices()) == DEVICES

    def step(w, x):
        def loss(w):
            return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]).astype(jnp.float32) ** 2)

        value, slope = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - b.astype(a.dtype), w, slope), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((512, 2048), None, "tp"), "down": struct((2048, 512), "tp", None)}
    return jax.jit(step, donate_argnums=0), (w, struct((rows, 512), "dp"))
"""


def search(folder: Path, platform: str, devices: int, **changes: object) -> automesh.Result:
    script = SCRIPT.replace("PLATFORM", platform).replace("DEVICES", str(devices))
    (folder / "train.py").write_text(script)
    (folder / "space.toml").write_text(SPACE)
    arguments = {
        "space": folder / "space.toml",
        "budget": "3m",
        "results": folder / "results",
        **changes,
    }
    return automesh.search(folder / "train.py", **arguments)  # pyright: ignore


@pytest.mark.tpu
@pytest.mark.slow
def test_a_search_for_a_slice_ends_with_a_compiled_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    found = search(tmp_path, "tpu", 4, target="v5e:2x2")
    compiled = [one.outcome for one in found.found.candidates if isinstance(one.outcome, Compiled)]
    assert len(compiled) == 3  # dp:4, dp:2,tp:2 and tp:4
    for one in compiled:
        assert one.replay is not None and one.effort == "default" and one.stored
        low, high = one.replay.bracket_s
        assert 0 < low <= one.replay.step_s <= high
        assert sum(seconds for _, seconds in one.replay.causes) == pytest.approx(one.step_s)
        assert one.memory.peak_bytes > 0
    assert found.found.facts.devices.memory_bytes == 63 * 2**30 // 4  # the compiler's own limit
    config = automesh.load(tmp_path / "mesh_rules.toml").select("v5e-2x2")
    assert config.evidence.kind == "compiled"
    assert "libtpu" in dict(config.evidence.versions)
    (study,) = tmp_path.glob("results/train-v5e-2x2-*")
    trace = tmp_path / "trace.json"
    best = str(found.found.candidates[0].plan)
    api.write_trace(study, best, trace)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "replay" in api.explain(study, best).text(width=100)

    # Rows that no device of the slice can hold, on any mesh: the compiler says so itself.
    (tmp_path / "huge.toml").write_text(f"{SPACE}[knobs]\nrows = [33554432]\n")
    huge = search(
        tmp_path,
        "tpu",
        4,
        target="v5e:2x2",
        space=tmp_path / "huge.toml",
        new=True,
        rules=tmp_path / "none.toml",
    )
    refused = [one.outcome for one in huge.found.candidates]
    assert refused and all(isinstance(one, OutOfMemory) for one in refused)
    for one in refused:
        assert isinstance(one, OutOfMemory)
        assert one.needed_bytes > one.limit_bytes == 63 * 2**30 // 4
        assert one.reserve_bytes == 256 * 2**20
    assert not (tmp_path / "none.toml").exists()


def kept(folder: Path) -> dict[str, int]:
    """The compiled programs in the store, and as which file; one that is kept again is another."""
    return {one.name: one.stat().st_ino for one in (folder / "cache").rglob("*.module")}


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.long
def test_a_search_killed_while_it_compiles_for_a_slice_repeats_no_finished_compile(
    tmp_path: Path,
) -> None:
    script = SCRIPT.replace("PLATFORM", "tpu").replace("DEVICES", "8")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "space.toml").write_text(f"{SPACE}[knobs]\nrows = [1024, 2048]\n")
    arguments = "search train.py --target v5e:2x4 --space space.toml --budget 4m --workers 1"
    command = [sys.executable, "-m", "automesh", *arguments.split()]
    variables = {**os.environ, "PYTHONPATH": ROOT, "AUTOMESH_CACHE": str(tmp_path / "cache")}

    def begun(errors: Path) -> subprocess.Popen[bytes]:
        with errors.open("ab") as out:
            return subprocess.Popen(
                command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=out
            )

    first: dict[str, int] = {}
    for turn in range(3):
        process = begun(tmp_path / "stderr")
        end_s = time.monotonic() + 300
        while len(kept(tmp_path)) < len(first) + 2 and process.poll() is None:
            assert time.monotonic() < end_s, "nothing was compiled"
            time.sleep(0.05)
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        time.sleep(0.7 * turn)  # at another moment of the next compile
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        first |= {name: made for name, made in kept(tmp_path).items() if name not in first}
        assert kept(tmp_path) == first
    last = begun(tmp_path / "stderr")
    assert last.wait(240) == 0, (tmp_path / "stderr").read_text()
    done = kept(tmp_path)
    assert {name: done[name] for name in first} == first
    assert len(done) > len(first) >= 6
    rule = automesh.load(tmp_path / "mesh_rules.toml").select("v5e-2x4")
    assert rule.evidence.kind == "compiled"


@pytest.mark.gpu
@pytest.mark.slow
def test_a_search_for_gpus_judges_their_memory_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "cache"))
    found = search(tmp_path, "gpu", 2, target="gpu-h100-2")
    outcomes = {str(one.plan): one.outcome for one in found.found.candidates}
    assert outcomes.keys() == {"dp:2", "tp:2"}
    for one in outcomes.values():
        assert isinstance(one, Compiled) and one.replay is not None and one.effort == "default"
    assert found.found.facts.devices.reserve_bytes == pytest.approx(
        found.found.facts.devices.memory_bytes / 4, abs=1
    )
    config = automesh.load(tmp_path / "mesh_rules.toml").select("gpu-h100-2")
    assert config.evidence.kind == "compiled"
    assert any(name.startswith("jax-cuda") for name, _ in config.evidence.versions)
    (tmp_path / "huge.toml").write_text(f"{SPACE}[knobs]\nrows = [{2**26}]\n")
    huge = search(
        tmp_path,
        "gpu",
        2,
        target="gpu-h100-2",
        space=tmp_path / "huge.toml",
        new=True,
        rules=tmp_path / "none.toml",
    )
    refused = [one.outcome for one in huge.found.candidates]
    assert refused and all(isinstance(one, OutOfMemory) for one in refused)
    for one in refused:
        assert isinstance(one, OutOfMemory) and one.needed_bytes > one.limit_bytes > 2**36
