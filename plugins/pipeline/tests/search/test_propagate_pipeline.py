"""Terms of a pipeline's stages against its compiled programs."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh import pipeline
from automesh.cost.terms import Terms, value_of
from automesh.mesh.axes import MeshAxis
from automesh.program.nouns import Propagation
from automesh.program.script.build import build_on
from automesh.program.script.workload import Workload
from automesh_pipeline.runtime.split.programs import Residuals
from automesh_pipeline.runtime.training import TrainState
from automesh_pipeline.search.lower import pipeline_of
from automesh_pipeline.search.propagate_pipeline import PropagatedStages, propagate_pipeline

NAMES = ("pp", "dp", "tp")
ROWS, WIDE, LAYERS = 32, 64, 4


class Momentum:
    """The smallest optimizer with a state: no library needed."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda old, new: 0.9 * old + new, state, gradients)
        return jax.tree.map(lambda one: -0.1 * one, state), state


def build(
    mesh: Mesh, schedule: str = "1f1b", microbatches: int = 4, residuals: Residuals = "recompute"
) -> Workload:
    """Four equal layers; dp splits the rows, tp each layer's hidden units."""
    inner = pipeline.MpmdMesh(mesh).abstract_mesh

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ weights["up"])
        hidden = jax.lax.with_sharding_constraint(
            hidden, NamedSharding(inner, PartitionSpec("dp", "tp"))
        )
        x = x + hidden @ weights["down"]
        return jax.lax.with_sharding_constraint(x, NamedSharding(inner, PartitionSpec("dp", None)))

    def weight(shape: tuple[int, int], *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(inner, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    one = {"up": weight((WIDE, 4 * WIDE), None, "tp"), "down": weight((4 * WIDE, WIDE), "tp", None)}
    loss = pipeline.chain([layer] * LAYERS, lambda y, batch: jnp.mean((y - batch) ** 2))
    step = pipeline.train_step(
        loss,
        optimizer=Momentum(),
        mesh=mesh,
        schedule=schedule,
        num_microbatches=microbatches,
        residuals=residuals,
    )
    rows = NamedSharding(inner, PartitionSpec("dp", None))
    batch = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32, sharding=rows)
    return Workload(step, (TrainState(params=(one,) * LAYERS, optimizer=()), batch))


@cache
def propagated(**knobs: Any) -> Propagation:
    stages = PropagatedStages(
        build=lambda axes: build_on(build, axes, knobs=tuple(knobs.items())),
        axis="pp",
        ranks=4,
        axis_names=NAMES,
        platform="cpu",
    )
    return propagate_pipeline(
        stages,
        sizes=(("pp", 4), ("dp", 2)),
        probes=[(("pp", 4), ("dp", 4))],
        enter=lambda _: None,
    )


def flops(terms: Terms, sizes: dict[str, int]) -> float:
    return sum(
        value_of(kernel.count, sizes)
        * 2
        * one.batch.at(sizes)
        * one.m.at(sizes)
        * one.n.at(sizes)
        * one.k.at(sizes)
        for kernel in terms.kernels
        for one in kernel.matmuls
    )


def test_equal_stages_share_their_terms() -> None:
    made = propagated().pipeline
    assert made is not None
    assert made.stages == (0, 1, 1, 2)
    assert [[kind for kind, _ in one.programs] for one in made.kinds] == [
        ["F", "B"],
        ["F", "B"],
        ["B"],  # Its forward pass is part of its backward pass.
    ]
    assert made.schedule.schedule() == pipeline.make_schedule(
        "1f1b", num_ranks=4, num_microbatches=4
    )


def test_programs_multiply_what_a_microbatch_of_a_stage_does() -> None:
    made = propagated().pipeline
    assert made is not None
    first, middle, last = (dict(one.programs) for one in made.kinds)
    sizes = {"dp": 2}
    once = 2 * 2 * (ROWS // 4 // 2) * WIDE * 4 * WIDE  # two products of a layer
    assert flops(middle["F"], sizes) == once
    # One product again, for what the second reads, and two for each of both gradients.
    assert flops(middle["B"], sizes) == 2.5 * once
    # Nobody reads the gradient of the batch.
    assert flops(first["B"], sizes) < flops(middle["B"], sizes)
    assert flops(last["B"], sizes) >= flops(middle["F"], sizes) * 2


@pytest.mark.long
@pytest.mark.parametrize("residuals", ["recompute", "save"])
def test_bytes_are_those_of_the_compiled_pipeline(residuals: str) -> None:
    made = propagated(residuals=residuals).pipeline
    assert made is not None
    axes = [MeshAxis(name="pp", ici=4), MeshAxis(name="dp", ici=2), MeshAxis(name="tp")]
    built = build_on(build, axes, knobs=(("residuals", residuals),))
    step, (state, batch) = pipeline_of(built), built.workload.args
    assert step is not None
    compiled = step.compile(state.params, batch)
    sizes = {"dp": 2}
    kinds = [made.kinds[kind] for kind in made.stages]
    kept = tuple(round(value_of((*one.inputs_bytes, *one.saved_bytes), sizes)) for one in kinds)
    assert kept == compiled.activation_bytes
    rows = ROWS // 4 // 2 * WIDE * 4
    assert [value_of(one.outputs_bytes, sizes) for one in kinds] == [rows, rows, rows, 0]
    assert [value_of(one.gradients_bytes, sizes) for one in kinds] == [0, rows, rows, rows]
    weights = 2 * 4 * WIDE * WIDE * 4
    for one in kinds:
        assert value_of(one.params_bytes, sizes) == weights
        assert value_of(one.sums_bytes, sizes) == weights
        assert value_of(one.state_bytes, sizes) == weights
        assert value_of(one.params_bytes, {"dp": 2, "tp": 4}) == weights / 4


def test_the_halves_of_a_backward_pass_are_programs_of_their_own() -> None:
    made = propagated(schedule="zb_h1").pipeline
    assert made is not None
    middle = dict(made.kinds[1].programs)
    assert {"F", "I", "W"} <= set(middle)
    assert flops(middle["I"], {"dp": 2}) > 0
    assert flops(middle["W"], {"dp": 2}) > 0


def test_terms_hold_for_other_sizes_but_not_for_other_numbers_of_ranks() -> None:
    made = propagated()
    assert made.terms.fixed == ("pp",)
    assert not made.failed_probes
    assert made.terms.active == ("pp", "dp")
