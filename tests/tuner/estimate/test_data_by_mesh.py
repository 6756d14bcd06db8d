"""A step that takes another amount of data on each mesh: its step times do not compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import automesh
from automesh.mesh.axes import MeshAxis, Plan, parse_mesh
from automesh.program.lower.lowering import trace_here
from automesh.program.nouns import SizedArray
from automesh.program.script.build import build_on
from automesh.program.script.data_arguments import data_arguments
from automesh.program.script.workload import Workload
from automesh.report import words
from automesh.tuner.estimate.data_by_mesh import data_by_mesh
from tests.support.samples import results_samples

AXES = ("dp", "tp")
SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh):
    rows = 64 * mesh.shape["dp"]
    w = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=NamedSharding(mesh, P("dp")))

    @jax.jit
    def step(w, x):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * slope, loss

    return step, (w, x)
"""
ROWS = "the step takes 512 rows on dp:8 and 64 rows on tp:8: time per row decides"


def plan(mesh: str, **knobs: int) -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), knobs=tuple(knobs.items()))


def rows(*shape: int, name: str = "args[1]") -> tuple[SizedArray, ...]:
    return (SizedArray(name=name, dtype="float32", shape=shape),)


def test_the_rows_of_each_mesh_are_said() -> None:
    data = {
        plan("tp:8"): rows(64, 16),
        plan("dp:2,tp:4"): rows(128, 16),
        plan("dp:8"): rows(512, 16),
    }
    found = data_by_mesh(data, {})
    assert found is not None
    assert found.clause == ROWS
    assert found.notice == (
        "`args[1]` depends on the mesh: float32[512, 16] on dp:8, and [64, 16] on tp:8, so the "
        "step works on 8 times as much data on dp:8 as on tp:8; plans are ranked by the time of a "
        "step, which does not compare them: divide it by the rows, or give `build` the same batch "
        "on all meshes"
    )


def test_the_least_time_per_row_is_named() -> None:
    outcome = results_samples.estimated_candidate("dp:8").outcome
    data = {plan("tp:8"): rows(64, 16), plan("dp:8"): rows(512, 16)}
    dp, tp = plan("dcn.dp:2,dp:4"), plan("tp:8")
    estimates = {dp: replace(outcome, step_s=4e-3), tp: replace(outcome, step_s=1e-3)}
    found = data_by_mesh(data, estimates)
    assert found is not None
    assert "dcn.dp:2,dp:4 takes the least time per row of those" in found.notice


@pytest.mark.parametrize(
    "data",
    [
        {plan("tp:8"): rows(64, 16), plan("dp:8"): rows(64, 16)},
        # The same rows, divided otherwise among micro-batches.
        {plan("tp:8"): rows(2, 32, 16), plan("dp:8"): rows(4, 16, 16)},
        # A knob may be the number of rows.
        {plan("tp:8", rows=64): rows(64, 16), plan("tp:8", rows=128): rows(128, 16)},
        {plan("tp:8"): rows(64, 16)},
        {plan("tp:8"): (), plan("dp:8"): ()},
    ],
)
def test_the_same_amount_of_data_is_nothing_to_say(
    data: dict[Plan, tuple[SizedArray, ...]],
) -> None:
    assert data_by_mesh(data, {}) is None


def test_state_and_keys_are_no_data() -> None:
    def build(mesh: jax.sharding.Mesh) -> Workload:
        struct = jax.ShapeDtypeStruct
        state = {"w": struct((8, 4), jnp.float32), "count": struct((), jnp.int32)}
        keys = struct((mesh.size, 2), jnp.uint32)

        def step(state, keys, x, scale):
            loss = jnp.mean(x @ state["w"]) * scale + keys.sum()
            return {"w": state["w"] - loss, "count": state["count"] + 1}, loss

        return Workload(step=step, args=(state, keys, struct((6, 8), np.float32), 1.0))

    built = build_on(build, (MeshAxis(name="dp", ici=2),))
    (only,) = data_arguments(trace_here(built))
    assert (only.name, only.shape) == ("args[2]", (6, 8))


def test_it_stands_next_to_the_answer() -> None:
    result = results_samples.measured_search()
    searched = replace(result.facts.searched, data_by_mesh=ROWS)
    said = words.best_sentence(replace(result, facts=replace(result.facts, searched=searched)))
    assert said == f"{words.best_sentence(result)}; {ROWS}"


@pytest.mark.slow
def test_a_build_that_makes_its_batch_for_its_mesh(tmp_path: Path) -> None:
    script = tmp_path / "per_device.py"
    script.write_text(SCRIPT)
    space = tmp_path / "space.toml"
    space.write_text("[axes]\ndp = {}\ntp = {}\n")
    result = automesh.search(
        f"{script}:build", target="cpu:8", space=space, results=tmp_path / "results", dry_run=True
    )
    said = " ".join(result.found.notices)
    assert "`args[1]` depends on the mesh: float32[512, 64] on dp:8, and [64, 64] on tp:8" in said
    assert "dp:8 takes the least time per row" in said
    assert result.found.facts.searched.data_by_mesh == ROWS
