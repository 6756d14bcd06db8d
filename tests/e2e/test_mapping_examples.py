"""Training scripts of frameworks, none of which knows automesh: found, searched and trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Measured
from automesh.program.nouns import StepRef
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.worker.handlers import jobs
from automesh.worker.messages import InspectJob, VisitJob
from tests.support.paths import EXAMPLES
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]

NAMES = {"haliax_lm": "haliax_lm", "flax_nnx_lm": "flax_lm", "flax_linen_lm": "flax_lm"}
LOGICAL = {"batch", "embed", "mlp", "heads", "vocab"}
_LOSS = re.compile(r"step +\d+  loss (\d+\.\d+)")


def needs(name: str) -> None:
    pytest.importorskip(
        name.split("_")[0],
        reason="needs `pip install 'jax-automesh[examples]'`",
        exc_type=ImportError,
    )


# Haliax's own.
@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.long) if one == "haliax_lm" else one for one in NAMES],
)
def test_the_arrays_of_a_framework_tell_their_logical_axes(name, own_process):
    needs(name)
    space = read_space(str(EXAMPLES / f"{NAMES[name]}.toml"))
    seen = jobs.handle(
        InspectJob(
            step=StepRef(entry=script(EXAMPLES / f"{name}.py")),
            axis_names=("dp", "fsdp", "tp"),
            platform="cpu",
            mapping=tuple((axis.name, axis.choices[0]) for axis in space.mapping),
        ),
        lambda event: {"go": True},
    )
    assert not seen.mapping.unseen
    assert seen.mapping.logical == LOGICAL
    sizes = {
        (part.names[0].removeprefix("mapping."), part.size)
        for array in seen.mapping.arrays
        for part in array.split
    }
    assert {("embed", 48), ("mlp", 192), ("vocab", 256), ("batch", 16)} <= sizes
    facts = StepFacts(facts=seen.facts, used_axes=seen.used_axes, mapping=seen.mapping)
    found = find_legal(space, facts, num_devices=8, platform="cpu")
    rules = {one.rule for one in found.rejections}
    # There are 4 heads, though each weight has 48 columns for them.
    assert {"fsdp twice on an array", "tp divides heads of 4"} <= rules
    plans = {str(plan) for plan in found.legal}
    assert "dp:2,fsdp:2,tp:2 batch:dp+fsdp embed:fsdp mlp:tp heads:tp vocab:tp" in plans
    assert "dp:2,fsdp:2,tp:2 batch:dp embed:none mlp:tp+fsdp heads:tp vocab:tp" in plans
    assert not any("batch:dp+fsdp" in plan and "mlp:tp+fsdp" in plan for plan in plans)


@pytest.mark.slow
def test_a_state_that_holds_its_optimizer_starts_from_its_own_values(own_process):
    needs("flax")
    plan = Plan(axes=parse_mesh("dp:2", ("dp", "fsdp", "tp")))
    seen = jobs.handle(
        VisitJob(
            step=StepRef(
                entry=script(EXAMPLES / "flax_linen_lm.py"), facts=(("batch", 16), ("seq", 32))
            ),
            plan=plan,
            cache_dir=str(own_process / "cache"),
            steps=0,
            samples=0,
            loss_steps=1,
        ),
        lambda event: {"go": True},
    )
    assert seen.values == "user"
    assert 5.0 < seen.losses[0] < 7.0  # Of 256 bytes, before any training.


def run(path: Path, *arguments: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return [float(match[1]) for match in _LOSS.finditer(done.stdout)]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_unmodified_step_is_searched_and_trained_on_the_winner(name, tmp_path):
    needs(name)
    space = tmp_path / "space.toml"
    # One mesh with every axis, eight mappings, three of which are legal and use it whole.
    space.write_text(
        "[axes]\ndp = { size = 2 }\nfsdp = { size = 2 }\ntp = { size = 2 }\n"
        '[mapping]\nbatch = [["dp", "fsdp"], "dp"]\n'
        'embed = ["fsdp", "none"]\nmlp = ["tp", ["tp", "fsdp"]]\n'
    )
    rules = tmp_path / "mesh_rules.toml"
    # On a loaded machine a budget may end before two plans were run: the same search then goes on.
    for _ in range(6):
        result = api.search(
            EXAMPLES / f"{name}.py",
            target="cpu:8",
            space=space,
            budget="60s",
            top=3,
            rules=rules,
            results=tmp_path / "results",
        )
        measured = [one for one in result.found.candidates if isinstance(one.outcome, Measured)]
        mappings = {one.plan.mapping for one in measured}
        if len(mappings) >= 2:
            break
    assert len(mappings) >= 2
    assert all(one.outcome.numerics in ("agree", "reference") for one in measured)
    assert all(one.outcome.values == "user" for one in measured)
    assert dict(result.found.funnel.ruled_out)["fsdp twice on an array"] == 3
    config = automesh.load(rules).select("cpu-8")
    assert set(config.mapping) == LOGICAL
    assert dict(config.mapping)["heads"] == "tp"

    losses = run(EXAMPLES / f"{name}.py", "--devices", "8", "--rules", str(rules), "--steps", "20")
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
