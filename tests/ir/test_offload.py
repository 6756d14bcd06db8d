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


def moments_terms(*, offload: bool, platform: str, devices: int = 8) -> Terms:
    """Of a step whose two moments lie on the host, and are fetched for the update."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, P(None, "fsdp", None))
    there = here.with_memory_kind("pinned_host") if offload else here

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        p, m, v = state
        g = jax.grad(loss)(p, x)
        if offload:
            m, v = jax.device_put((m, v), here)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)
        return (p, *(jax.device_put((m, v), there) if offload else (m, v)))

    p, m = (
        jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32, sharding=one) for one in (here, there)
    )
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(here, there, there))
    lowered = jitted.trace((p, m, m), x).lower(lowering_platforms=(platform,))
    graph = read_graph(shardy.partitioned(shardy.plain(lowered.compiler_ir("stablehlo"))))
    return collect(graph, active=("fsdp",), platform=platform)


def whole_peak(terms: Terms) -> float:
    sizes = {"fsdp": 8}
    lasting = value_of(terms.argument_bytes, sizes) + value_of(terms.output_bytes, sizes)
    points = [value_of(point.bytes, sizes) for point in terms.points]
    return lasting - value_of(terms.alias_bytes, sizes) + max(points)


def test_what_is_fetched_from_the_host_lies_on_the_device_while_it_is_used() -> None:
    one = 8 * 1024 * 1024 * 4 / 8  # bytes of one array on one device
    terms = moments_terms(offload=True, platform="tpu")
    # The parameters, both moments as they were and as they become: 5 arrays. Of a program four
    # times as large the compiler for v5e:2x4 says 91 MiB, which is 5.7 of them.
    assert 4.9 * one < whole_peak(terms) < 6 * one
    assert value_of(terms.alias_bytes, {"fsdp": 8}) == one
    moved = [value_of(copy.bytes, {"fsdp": 8}) for copy in terms.host_transfers]
    assert moved == [one] * 4


def test_on_a_cpu_both_memories_are_one() -> None:
    both = [whole_peak(moments_terms(offload=o, platform="cpu")) for o in (False, True)]
    assert both[0] == pytest.approx(both[1], rel=0.01)
