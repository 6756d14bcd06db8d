"""FLOPs and collectives of layers, against arithmetic, on every mesh of 8 and 16 devices.

All layers are float32 with pinned shardings: the batch is split over dp and fsdp, weights are
stored split over fsdp and tp and gathered over fsdp where they are used, and activations between
the two matrices of a layer are split over tp (Megatron).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.hlo import count, read_module
from automesh.outcomes import Counts
from tests.support.hlo_oracle import assert_agrees, serialized

AXES = ("dp", "fsdp", "tp")
BATCH = ("dp", "fsdp")
F32 = 4
B, D, F = 64, 128, 256  # Rows, width, hidden width.
S, H, K = 8, 32, 4  # Sequence length, heads, width of a head.

Sizes = tuple[int, int, int]
FACTORIZATIONS: list[Sizes] = [
    sizes
    for devices in (8, 16)
    for sizes in itertools.product((1, 2, 4, 8, 16), repeat=3)
    if sizes[0] * sizes[1] * sizes[2] == devices
]


@dataclasses.dataclass(frozen=True)
class Expected:
    """Totals per device: collectives as {(kind, axes): (count, payload bytes)}."""

    flops: int
    collectives: dict[tuple[str, tuple[str, ...]], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """`inputs` are (shape, sharding) pairs; the gradient is in respect of all but the first."""

    function: Callable[..., jax.Array]
    inputs: tuple[tuple[tuple[int, ...], P], ...]
    output: P
    gradient: bool
    expected: Callable[[int, int, int], Expected]


def pin(value: jax.Array, *spec: Any) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return pin(x @ pin(w, "tp", None), BATCH, None)


def expected_matmul(dp: int, fsdp: int, tp: int) -> Expected:
    rows = B // (dp * fsdp)
    return collect(
        2 * rows * (D // tp) * F,
        gather=("all-gather", {"fsdp": fsdp}, 1, D // tp * F * F32),
        reduce=("all-reduce", {"tp": tp}, 1, rows * F * F32),
    )


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = pin(jnp.tanh(x @ pin(up, None, "tp")), BATCH, "tp")
    return pin(hidden @ pin(down, "tp", None), BATCH, None)


def expected_mlp(dp: int, fsdp: int, tp: int) -> Expected:
    rows = B // (dp * fsdp)
    return collect(
        2 * (2 * rows * D * (F // tp)),
        gather=("all-gather", {"fsdp": fsdp}, 2, 2 * D * (F // tp) * F32),
        reduce=("all-reduce", {"tp": tp}, 1, rows * D * F32),
    )


def expected_mlp_gradient(dp: int, fsdp: int, tp: int) -> Expected:
    rows = B // (dp * fsdp)
    weights = 2 * D * (F // tp) * F32
    return collect(
        # Two products forwards; backwards one per weight, and one that carries on to `hidden`.
        5 * (2 * rows * D * (F // tp)),
        gather=("all-gather", {"fsdp": fsdp}, 2, weights),
        reduce=("all-reduce", {"tp": tp}, 1, rows * D * F32),
        # The constraint on a gathered weight holds for its gradient too: both are summed whole, in
        # one combined all-reduce, before each device takes its part.
        gradients=("all-reduce", {"dp": dp, "fsdp": fsdp}, 1, weights),
    )


def attention(
    x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array
) -> jax.Array:
    def project(w: jax.Array) -> jax.Array:
        heads = jnp.einsum("bsd,dhk->bshk", x, pin(w, None, "tp", None))
        return pin(heads, BATCH, None, "tp", None)

    scores = jnp.einsum("bshk,bthk->bhst", project(wq), project(wk))
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, axis=-1), project(wv))
    mixed = pin(mixed, BATCH, None, "tp", None)
    return pin(jnp.einsum("bshk,hkd->bsd", mixed, pin(wo, "tp", None, None)), BATCH, None, None)


def expected_attention(dp: int, fsdp: int, tp: int) -> Expected:
    rows, heads = B // (dp * fsdp), H // tp
    projection, mixing = 2 * rows * S * D * heads * K, 2 * rows * heads * S * S * K
    return collect(
        4 * projection + 2 * mixing,
        gather=("all-gather", {"fsdp": fsdp}, 4, 4 * D * heads * K * F32),
        reduce=("all-reduce", {"tp": tp}, 1, rows * S * D * F32),
    )


def expected_attention_gradient(dp: int, fsdp: int, tp: int) -> Expected:
    rows, heads = B // (dp * fsdp), H // tp
    projection, mixing = 2 * rows * S * D * heads * K, 2 * rows * heads * S * S * K
    weights = 4 * D * heads * K * F32
    return collect(
        # Forwards 4 and 2; backwards 4 for the weights, 1 through the output projection, and 2 for
        # each of the 2 products of scores.
        9 * projection + 6 * mixing,
        gather=("all-gather", {"fsdp": fsdp}, 4, weights),
        reduce=("all-reduce", {"tp": tp}, 1, rows * S * D * F32),
        gradients=("all-reduce", {"dp": dp, "fsdp": fsdp}, 1, weights),
    )


def collect(flops: int, **collectives: tuple[str, dict[str, int], int, int]) -> Expected:
    """Drops axes of size 1, and collectives that span nothing else; equal kinds and axes add up."""
    found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for kind, sizes, times, payload in collectives.values():
        axes = tuple(name for name, size in sizes.items() if size > 1)
        if axes:
            before = found.get((kind, axes), (0, 0))
            found[kind, axes] = (before[0] + times, before[1] + payload)
    return Expected(flops, found)


X2, X3 = ((B, D), P(BATCH, None)), ((B, S, D), P(BATCH, None, None))
MLP_INPUTS = (X2, ((D, F), P("fsdp", "tp")), ((F, D), P("tp", "fsdp")))
ATTENTION_INPUTS = (
    X3,
    *[((D, H, K), P("fsdp", "tp", None))] * 3,
    ((H, K, D), P("tp", None, "fsdp")),
)
LAYERS = {
    "matmul": Layer(
        matmul,
        (((B, D), P(BATCH, "tp")), ((D, F), P("tp", "fsdp"))),
        P(BATCH, None),
        False,
        expected_matmul,
    ),
    "mlp": Layer(mlp, MLP_INPUTS, P(BATCH, None), False, expected_mlp),
    "mlp gradient": Layer(mlp, MLP_INPUTS, P(), True, expected_mlp_gradient),
    "attention": Layer(attention, ATTENTION_INPUTS, P(BATCH), False, expected_attention),
    "attention gradient": Layer(
        attention, ATTENTION_INPUTS, P(), True, expected_attention_gradient
    ),
}


def compile_layer(layer: Layer, sizes: Sizes) -> jax.stages.Compiled:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    shardings = [NamedSharding(mesh, spec) for _, spec in layer.inputs]
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for (shape, _), sharding in zip(layer.inputs, shardings)
    ]
    function: Callable[..., Any] = layer.function
    outputs: Any = NamedSharding(mesh, layer.output)
    if layer.gradient:
        weights = tuple(range(1, len(arguments)))
        function = jax.grad(lambda *inputs: (layer.function(*inputs) ** 2).sum() / 2, weights)
        outputs = tuple(shardings[1:])
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, in_shardings=shardings, out_shardings=outputs).lower(*arguments)
    return lowered.compile()


def ring_bytes(kind: str, payload: int, devices: int) -> int:
    """(n-1)/n of the array for each of the phases of the ring; all sizes here divide evenly."""
    phases = {"all-gather": 1, "all-reduce": 2}[kind]
    assert payload % devices == 0
    return phases * payload // devices * (devices - 1)


def assert_counts(counts: Counts, expected: Expected, sizes: Sizes) -> None:
    assert counts.flops == expected.flops
    assert {(c.kind, c.axes): (c.count, c.payload_bytes) for c in counts.collectives} == (
        expected.collectives
    )
    for collective in counts.collectives:
        devices = int(np.prod([size for name, size in zip(AXES, sizes) if name in collective.axes]))
        assert collective.group_size == devices
        assert collective.wire_bytes == ring_bytes(
            collective.kind, collective.payload_bytes, devices
        )
    assert counts.uncounted == ()


@pytest.mark.slow_after(30)
@pytest.mark.parametrize("sizes", FACTORIZATIONS, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_arithmetic(name: str, sizes: Sizes) -> None:
    layer = LAYERS[name]
    data = serialized(compile_layer(layer, sizes))
    assert_agrees(data)
    assert_counts(count(read_module(data), list(zip(AXES, sizes))), layer.expected(*sizes), sizes)


def test_every_factorization_is_tried() -> None:
    # Ways to place 3, and 4, factors of two on three axes: C(5, 2) and C(6, 2).
    assert len(FACTORIZATIONS) == len(set(FACTORIZATIONS)) == 10 + 15


@pytest.mark.parametrize("name", LAYERS)
def test_traffic_without_loops_is_what_xla_says(name: str) -> None:
    compiled = compile_layer(LAYERS[name], (2, 2, 2))
    counts = count(read_module(serialized(compiled)), list(zip(AXES, (2, 2, 2))))
    # XLA adds the scalar constants that a fusion takes.
    assert 0 <= compiled.cost_analysis()["bytes accessed"] - counts.hbm_bytes < 64
