"""A rule file whose script changes: the right verdict for each change, no alarm without one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import automesh
from automesh.hardware import Target
from automesh.mesh.rules.file import read_rules
from automesh.report.check.nouns import RulesChecked
from automesh.tuner.check.compiling import Workers
from automesh.tuner.workers import one_worker, surroundings_of
from automesh.worker.pool import Pool

SCRIPT = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

ROWS = 2048


def build(mesh, remat=False):
    def loss(w, x):
        hidden = jnp.tanh(x @ w["up"])
        return jnp.mean((hidden @ w["down"] - x) ** 2)

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((256, 512), "fsdp", None), "down": struct((512, 256), None, "fsdp")}
    x = struct((ROWS, 256), ("dp", "fsdp"))
    return jax.jit(step, donate_argnums=0), (w, x)
"""
RULES = """
schema = 1
axes = ["dp", "fsdp"]
batch_axes = ["dp", "fsdp"]

[[rule]]
match = "cpu-4"
ici = { dp = 2, fsdp = 2 }
knobs = { remat = false }
"""
HIDDEN = 'hidden = jnp.tanh(x @ w["up"])'
CHANGES = {
    # A constraint that wants the hidden units of all rows on every device.
    "stray all-gather": (
        HIDDEN,
        f"{HIDDEN}\n        hidden = jax.lax.with_sharding_constraint("
        "hidden, NamedSharding(mesh, P()))",
        1,
        "all-gather",
    ),
    "lost donation": (", donate_argnums=0", "", 1, "memory, outputs beside donated memory"),
    "another knob": ("remat=False", "recompute=False", 1, "no knob `remat`"),
    "does not load": ("import jax\n", "import jax_of_nobody\n", 2, "jax_of_nobody"),
    "doubled activation": (
        HIDDEN,
        f"x = jnp.concatenate([x, x])\n        {HIDDEN}",
        1,
        "memory",
    ),
    "another batch": ("ROWS = 2048", "ROWS = 4096", 1, "FLOPs"),
    "half the batch": ("ROWS = 2048", "ROWS = 1024", 1, "FLOPs"),
    "only reformatted": ("\n\n\ndef build", "\n# A comment.\n\n\ndef build", 0, ""),
    "another axis": ('"dp", "fsdp")', '"data", "fsdp")', 1, "data"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    """One process for all checks: under test is the verdict, and a process takes seconds."""
    pools: dict[Any, Pool] = {}
    before = Workers.on

    with pytest.MonkeyPatch.context() as patch:
        stack: list[Any] = []

        def on(self: Workers, target: Target) -> Pool:
            surroundings = surroundings_of(target)
            if surroundings not in pools:
                stack.append(one_worker(surroundings))
                pools[surroundings] = stack[-1].__enter__()
            return pools[surroundings]

        patch.setattr(Workers, "on", on)
        yield
        for one in stack:
            one.__exit__(None, None, None)
    assert Workers.on is before


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory, shared: None) -> str:
    """The rules file after `--update`."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mesh_rules.toml").write_text(RULES)
    first = automesh.check(folder / "train.py", update=True)
    assert first.exit_code == 2 and "--update" in first.rules[0].reason
    program = read_rules(folder / "mesh_rules.toml").rules[0].evidence.program
    assert program.flops > 0 and program.peak_bytes > 0 and len(program.collectives) >= 2
    return (folder / "mesh_rules.toml").read_text()


def checked(folder: Path, script: str, rules: str) -> RulesChecked:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    (folder / "mesh_rules.toml").write_text(rules)
    return automesh.check(folder / "train.py")


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_gets_its_verdict(name: str, rules: str, tmp_path: Path) -> None:
    old, new, code, said = CHANGES[name]
    assert old in SCRIPT
    found = checked(tmp_path / "changed", SCRIPT.replace(old, new), rules)
    (rule,) = found.rules
    assert found.exit_code == code, rule
    assert said in rule.reason
    if name == "only reformatted":
        assert rule.told == ()


@pytest.mark.long
def test_ten_unchanged_runs_give_no_alarm(rules: str, tmp_path: Path) -> None:
    for number in range(10):
        found = checked(tmp_path / str(number), SCRIPT, rules)
        assert found.exit_code == 0, found.rules
        assert found.rules[0].told == ()


@contextmanager
def repository(folder: Path) -> Iterator[None]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mesh_rules.toml").write_text(RULES)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    yield


def test_two_versions_of_a_script_are_compared_without_evidence(
    shared: None, tmp_path: Path
) -> None:
    folder = tmp_path / "repository"
    with repository(folder):
        (folder / "train.py").write_text(SCRIPT.replace(", donate_argnums=0", ""))
        found = automesh.check(folder / "train.py", against="HEAD")
        assert found.exit_code == 1 and "memory" in found.rules[0].reason
        with pytest.raises(automesh.UsageError, match="failed"):
            automesh.check(folder / "train.py", against="nothing")
        with pytest.raises(automesh.UsageError):
            automesh.check(folder / "train.py", against="--output=x")


def test_a_rule_for_no_devices_in_particular_is_not_checked(tmp_path: Path) -> None:
    found = checked(tmp_path / "x", SCRIPT, RULES.replace("cpu-4", "tpu-.*"))
    assert found.exit_code == 2 and "names no devices in particular" in found.rules[0].reason
    found = checked(tmp_path / "y", SCRIPT, RULES.replace("cpu-4", "tpu-v99-4"))
    assert found.exit_code == 2 and "tpu-v99-4" in found.rules[0].reason
