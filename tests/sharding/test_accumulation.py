"""Where the gradients of microbatches are reduced: in the loop, or once behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.collectives import kind_named
from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

MICROBATCHES = 16
WIDTH = 512


def _build(kind: str, layers: int = 0) -> Any:
    dtype = jnp.bfloat16 if kind == "narrow" else jnp.float32

    def loss(w: Any, x: Any) -> Any:
        if layers:
            x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            return jnp.mean(x**2)
        return jnp.mean(jnp.tanh(x @ w) ** 2).astype(jnp.float32)

    def step(w: Any, x: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            gradient = jax.grad(loss)(w, part)
            if kind == "narrow":
                gradient = gradient.astype(jnp.float32)
            if kind == "divided":
                gradient = gradient / MICROBATCHES
            return total + gradient, None

        parts = x.reshape(MICROBATCHES, -1, WIDTH, order="F")
        total, _ = jax.lax.scan(body, jnp.zeros(w.shape, jnp.float32), parts)
        return (w - 0.1 * total).astype(w.dtype)

    def build(mesh: Any) -> Any:
        def array(shape: tuple[int, ...], *spec: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

        shape = (layers, WIDTH, WIDTH) if layers else (WIDTH, WIDTH)
        return jax.jit(step, donate_argnums=0), (array(shape), array((4096, WIDTH), "dp"))

    return build


def _reductions(build: Any, platform: str) -> float:
    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp",), platform=platform
    )
    terms = propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms
    return sum(
        value_of(one.count, {"dp": 8}) for one in terms.collectives if one.kind == "all-reduce"
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize(
    ("kind", "layers", "expected"),
    # As many as stand in programs of libtpu 0.0.52, times the turns of their loops.
    [("plain", 0, 1), ("narrow", 0, 1), ("divided", 0, MICROBATCHES), ("plain", 4, 64)],
)
def test_gradients_that_are_only_added_up_are_reduced_once(
    kind: str, layers: int, expected: int, platform: str
) -> None:
    every = MICROBATCHES * max(layers, 1)
    expected = every if platform == "cpu" else expected
    assert _reductions(_build(kind, layers), platform) == expected


_WORDS = 4096


def _with_embedding(kind: str) -> Any:
    """A table of 8.4 MB and a layer of 1.0 MB, of which `kind` says how they are trained."""

    def loss(params: Any, tokens: Any) -> Any:
        if kind == "narrow":
            params = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params)
        table, layer = params
        x = jnp.tanh(table[tokens] @ layer)
        if "tied" in kind:
            scores = jax.nn.log_softmax(x @ table.T)
            return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))
        if kind == "twice":
            x = x * jnp.sin(table[tokens + 1])
        return jnp.mean(x**2).astype(jnp.float32)

    def step(params: Any, tokens: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            gradients = jax.grad(loss)(params, part)
            if kind == "divided":
                gradients = jax.tree.map(lambda one: one / 4, gradients)
            return jax.tree.map(jnp.add, total, gradients), None

        if kind in ("tied", "twice"):
            return jax.grad(loss)(params, tokens)
        parts = jnp.moveaxis(tokens.reshape(64, 4, 64), 1, 0)
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)[0]

    def build(mesh: Any) -> Any:
        def array(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

        params = (array((_WORDS, WIDTH), jnp.float32), array((WIDTH, WIDTH), jnp.float32))
        return jax.jit(step), (params, array((64, 256), jnp.int32, "dp"))

    return build


@pytest.mark.parametrize(
    ("kind", "tables", "layers"),
    # All-reduced by libtpu 0.0.52, in tables and layers.
    [
        ("tied", 2, 1),
        ("twice", 1, 1),
        ("accumulated", 4, 1),
        ("accumulated tied", 8, 1),
        ("divided", 4, 4),
        ("narrow", 1, 1),
    ],
)
def test_the_gradients_of_a_table_are_reduced_as_often_as_by_a_tpu(
    kind: str, tables: int, layers: int
) -> None:
    programs = Programs(
        build=lambda mesh: build_on(_with_embedding(kind), mesh), axis_names=("dp",), platform="tpu"
    )
    terms = propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms
    reduced = sum(
        value_of(one.count, {"dp": 8}) * value_of(one.payload_bytes, {"dp": 8})
        for one in terms.collectives
        if one.kind == "all-reduce"
    )
    assert reduced == 4 * WIDTH * (tables * _WORDS + layers * WIDTH)


def test_a_maximum_that_is_added_up_stays_in_the_loop() -> None:
    """The largest of sums is not the sum of the largest."""

    def build(mesh: Any) -> Any:
        def step(x: Any) -> Any:
            parts = x.reshape(MICROBATCHES, -1, WIDTH, order="F")
            total, _ = jax.lax.scan(
                lambda total, part: (total + jnp.max(part, axis=0), None), jnp.zeros(WIDTH), parts
            )
            return total

        x = jax.ShapeDtypeStruct((4096, WIDTH), "float32", sharding=NamedSharding(mesh, P("dp")))
        return jax.jit(step), (x,)

    assert _reductions(build, "tpu") == MICROBATCHES


def test_microbatches_that_take_a_part_of_an_axis_are_reduced_over_the_rest_of_it():
    """64 rows on eight devices become four microbatches of 16, two devices for each row.

    The partitioner of jaxlib 0.12 gathers the rows in groups of four and reduces the gradient in
    pairs: 2.0 MiB of the gradient in each of four trips (3.5 MiB over the whole axis).
    """

    def step(w: Any, x: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(w), None

        return w - jax.lax.scan(body, jnp.zeros_like(w), x.reshape(4, 16, 128, WIDTH))[0]

    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct(
            (64, 128, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("dp"))
        )
        w = jax.ShapeDtypeStruct((WIDTH, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
        return jax.jit(step), (w, x)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp",), platform="none"
    )
    terms = propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms
    sent = {
        one.kind: kind_named(one.kind).wire_bytes(round(value_of(one.payload_bytes, {"dp": 8})), 8)
        for one in terms.collectives
    }
    assert sent["all-reduce"] == pytest.approx(2 * 2**20, rel=1e-4)
    assert sent["all-gather"] == pytest.approx(6 * 2**20, rel=1e-4)
