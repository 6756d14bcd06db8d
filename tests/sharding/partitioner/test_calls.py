"""What the partitioner gathers for custom calls and for updates; the figures are XLA's own.

They were read in programs that jaxlib 0.12 compiles for CPUs, and libtpu 0.0.52 for a v5e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

SIZES = {"dp": 8}
KIB = 1 << 10


def _gathered_kib(work: Callable[[Any], Any], platform: str, *shape: int) -> float:
    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("dp")))
        return jax.jit(lambda x: jnp.sum(work(x) ** 2)), (x,)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp",), platform=platform
    )
    terms = propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms
    return (
        sum(
            value_of(one.payload_bytes, SIZES) * value_of(one.count, SIZES)
            for one in terms.collectives
            if one.kind == "all-gather"
        )
        / KIB
    )


@pytest.mark.parametrize(
    ("work", "platform", "shape", "expected"),
    [
        (lambda x: jnp.linalg.qr(x)[1], "cpu", (1024, 256), 1024),
        (lambda x: jnp.linalg.qr(x)[1], "gpu", (1024, 256), 1024),
        # Each matrix of a batch by itself, where jax says that the library's function can.
        (lambda x: jnp.linalg.qr(x)[1], "cpu", (16, 128, 64), 0),
        (lambda x: jnp.linalg.qr(x)[1], "tpu", (16, 128, 64), 0),
        (lambda x: jnp.linalg.eigh(x)[0], "cpu", (16, 64, 64), 0),
        (lambda x: jnp.linalg.eigh(x)[0], "tpu", (16, 64, 64), 256),
    ],
)
def test_a_custom_call_is_split_along_a_batch_at_most(
    work: Callable[[Any], Any], platform: str, shape: tuple[int, ...], expected: float
) -> None:
    assert _gathered_kib(work, platform, *shape) == expected


@pytest.mark.parametrize(
    ("rows", "start", "expected"),
    [
        (8, lambda x: jnp.int32(x[0, 0]), 2048 + 16),
        (1, lambda x: jnp.int32(x[0, 0]), 0),
        (8, lambda _: 16, 0),
    ],
    ids=["several rows somewhere", "one row somewhere", "several rows at a known place"],
)
def test_rows_that_are_written_somewhere_gather_the_array(
    rows: int, start: Callable[[Any], Any], expected: float
) -> None:
    def work(x: Any) -> Any:
        return lax.dynamic_update_slice(x, x[:rows] * 2, (start(x), 0))

    # Beside what the place itself and the rows need, which is little.
    found = _gathered_kib(work, "cpu", 1024, 512)
    assert found == pytest.approx(expected, abs=20)
