"""What lies in host memory takes none of the device's, and is copied over the host's link."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Terms, value_of
from automesh.ir.graph import Graph
from automesh.ir.passes.offload import mark_host_values
from automesh.ir.terms.collect import collect
from automesh.sharding import passes as shardy
from automesh.sharding.mlir.module import read_graph
from tests.support.samples.graphs import SIZES, Program

LAYERS, ROWS, WIDTH, DEVICES = 6, 8192, 128, 4
SAVED = ROWS * WIDTH * 2 // DEVICES  # bytes of one layer's activation on one device
POLICIES = jax.checkpoint_policies
ON_HOST = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
ON_DEVICE = POLICIES.save_only_these_names("hidden")


def train_terms(policy: Any, platform: str = "tpu") -> Terms:
    """Of a step that saves one activation a layer where `policy` says."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",), axis_types=(AxisType.Auto,))

    def put(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(jnp.tanh(x @ w[0]), "hidden")
        return x + jnp.tanh(hidden @ w[1]), None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        last, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)
        return jnp.mean(last.astype(jnp.float32) ** 2)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(loss)(w, x).astype(w.dtype)

    args = put((LAYERS, 2, WIDTH, WIDTH), None, None, "fsdp"), put((ROWS, WIDTH), "fsdp")
    traced = jax.jit(step, donate_argnums=0).trace(*args)
    lowered = traced.lower(lowering_platforms=(platform,))
    graph = read_graph(shardy.partitioned(shardy.plain(lowered.compiler_ir("stablehlo"))))
    return collect(graph, active=("fsdp",), platform=platform)


def peak(terms: Terms) -> float:
    return max(value_of(point.bytes, {"fsdp": DEVICES}) for point in terms.points)


def test_an_activation_saved_on_the_host_is_copied_there_and_back_and_takes_no_memory() -> None:
    away, here = train_terms(ON_HOST), train_terms(ON_DEVICE)
    assert not away.uncounted and not here.host_transfers
    sizes = {"fsdp": DEVICES}
    moved = [
        (one.is_to_host, value_of(one.count, sizes), value_of(one.bytes, sizes))
        for one in away.host_transfers
    ]
    assert moved == [(True, LAYERS, SAVED), (False, LAYERS, SAVED)]
    # What is left of them are one or two that are on their way.
    assert peak(here) - peak(away) >= (LAYERS - 2) * SAVED
    assert all("loop" in away.regions[one.regions[0]].name for one in away.host_transfers)


def test_on_cpus_both_memories_are_one() -> None:
    terms = train_terms(ON_HOST, "cpu")
    assert not terms.host_transfers and not terms.uncounted


def moved(program: Program, value: Any, placement: str) -> Any:
    return program("custom_call", value, target="annotate", placement=placement)


def terms_of(program: Program, *returned: Any, **places: tuple[int, ...]) -> Terms:
    graph = program.graph(*returned)
    graph = Graph(top=graph.top, mesh=graph.mesh, **places)
    return collect(graph, active=tuple(SIZES), platform="tpu")


def test_a_state_that_lives_on_the_host_is_fetched_and_brought_back() -> None:
    program = Program()
    state = program.argument((64, 32), (("fsdp",), ()))
    here = moved(program, state, "device")
    back = moved(program, program("multiply", here, here), "pinned_host")
    terms = terms_of(program, back, host=(0,), host_outputs=(0,))
    ways = [(one.is_to_host, value_of(one.bytes, SIZES)) for one in terms.host_transfers]
    assert ways == [(False, 64 * 32), (True, 64 * 32)]
    assert value_of(terms.argument_bytes, SIZES) == value_of(terms.output_bytes, SIZES) == 0
    (kernel,) = terms.kernels
    assert value_of(kernel.bytes, SIZES) == 2 * 64 * 32


def test_what_lies_there_already_is_not_copied() -> None:
    program = Program()
    state = program.argument((64, 32))
    again = moved(program, moved(program, state, "device"), "device")
    terms = terms_of(program, again)
    assert terms.host_transfers == ()


def test_work_on_values_in_host_memory_is_named() -> None:
    program = Program()
    state = program.argument((64, 32))
    total = program("add", state, state)
    terms = terms_of(program, total, host=(0,))
    assert [one.what for one in terms.uncounted] == ["add of values in host memory"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_of_two_carried_arrays_only_the_one_that_takes_moved_values_is_on_the_host(
    is_shared: bool,
) -> None:
    """Both may begin as the same zeros."""
    program = Program()
    part, at = program.argument((1, 64)), program.argument((), dtype="i32")
    first = program.constant((8, 64))
    second = first if is_shared else program.constant((8, 64))

    def body(inside: Program, there: Any, here: Any, row: Any, place: Any) -> list[Any]:
        away = moved(inside, row, "pinned_host")
        return [
            inside("dynamic_update_slice", there, away, place, place),
            inside("dynamic_update_slice", here, row, place, place),
            row,
            place,
        ]

    there, here, *_ = program.loop(8, [first, second, part, at], body)
    graph = program.graph(there, here)
    mark_host_values(graph)
    assert (there.on_host, here.on_host) == (True, False)
    inside = graph.top.operations[-1].bodies[0]
    assert [one.on_host for one in inside.arguments] == [True, False, False, False]
    assert not any(one.on_host for one in graph.top.arguments)


def test_a_branch_hands_values_on_the_host_on() -> None:
    program = Program()
    state, which = program.argument((8, 64)), program.argument((), dtype="i32")
    branch = Program()
    inner = branch.argument((8, 64))
    branch.block.returned = [branch("reshape", inner)]
    result = program("case", which, state, shape=(8, 64))
    program.block.operations[-1].bodies = [branch.block]
    graph = Graph(top=program.graph(result).top, mesh=tuple(SIZES.items()), host=(0,))
    mark_host_values(graph)
    assert inner.on_host and result.on_host
