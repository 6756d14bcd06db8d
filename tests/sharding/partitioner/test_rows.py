"""What slices, pads, windows, rolls and reversals along a split dimension send.

The figures are those of programs that jaxlib 0.12 compiles for CPUs: KiB of all permutes.
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
from automesh.program.nouns import Propagation
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

KIB = 1 << 10


def _gated(x: Any) -> Any:
    gate, up = jnp.split(x, 2)
    return jax.nn.silu(gate) * up


def _packed(x: Any) -> Any:
    query, key, value = jnp.split(x, 3)
    return jax.nn.silu(query) * key + value


def _propagated(
    work: Callable[[Any], Any], rows: int, parts: int, platform: str = "cpu"
) -> Propagation:
    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct((rows, 512), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
        return jax.jit(work), (x,)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("tp",), platform=platform
    )
    return propagate(programs, sizes=(("tp", parts),), probes=(), enter=lambda _: None)


def _sent_kib(found: Propagation, parts: int) -> dict[str, float]:
    sent: dict[str, float] = {}
    for one in found.terms.collectives:
        sizes = {"tp": parts}
        many = value_of(one.payload_bytes, sizes) * value_of(one.count, sizes) / KIB
        sent[one.kind] = sent.get(one.kind, 0.0) + many
    return sent


@pytest.mark.parametrize(
    ("work", "rows", "parts", "expected"),
    [
        (_gated, 1024, 2, 1024),
        (_gated, 1024, 4, 1280),
        (_gated, 1024, 8, 640),
        (_packed, 1536, 4, 2560),
        (_packed, 1536, 8, 2048),
        (jax.grad(lambda x: jnp.sum(jnp.sin(x[:512]))), 1024, 8, 640),
        (lambda x: jnp.tanh(jnp.pad(x, ((512, 512), (0, 0)))), 1024, 8, 1536),
        (lambda x: jnp.tanh(x[::-1]), 1024, 8, 256),
        (lambda x: jnp.roll(x, 300, axis=0), 1024, 8, 256),
        (lambda x: jnp.roll(x, 1, axis=0) + jnp.roll(x, -1, axis=0) - 2 * x, 1024, 8, 4),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), 1024, 8, 4),
        (lambda x: jnp.tanh(x[::2]), 1024, 8, 0),
    ],
)
def test_rows_move_as_in_the_compiled_program(
    work: Callable[[Any], Any], rows: int, parts: int, expected: float
) -> None:
    sent = _sent_kib(_propagated(work, rows, parts), parts)
    assert sent.get("collective-permute", 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 2048), ("tpu", 0)])
def test_a_running_sum_along_a_split_dimension_gathers_on_cpus(
    platform: str, expected: float
) -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.cumsum(x, axis=0)))

    sent = _sent_kib(_propagated(work, 1024, 8, platform), 8)
    assert sent.get("all-gather", 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", 2048), ("tpu", 0)])
def test_a_top_k_of_whole_rows_gathers_on_cpus(platform: str, expected: float) -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(lax.top_k(x, 5)[0]))

    found = _propagated(work, 1024, 8, platform)
    assert _sent_kib(found, 8).get("all-gather", 0.0) == pytest.approx(expected)
    if platform == "cpu":  # The array gathered, and the first places alone.
        most = max(value_of(point.bytes, {"tp": 8}) for point in found.terms.points)
        assert most == pytest.approx(2048 * KIB, rel=0.05)


def test_a_top_k_along_the_dimension_that_is_split_gathers_on_cpus() -> None:
    def work(x: Any) -> Any:
        return jnp.sum(jnp.sin(lax.top_k(x.T, 8)[0]))

    sent = _sent_kib(_propagated(work, 4096, 8), 8)
    assert sent["all-gather"] == pytest.approx(8192)
    assert not {"all-to-all", "collective-permute"} & set(sent)


def test_what_moves_in_another_pattern_at_other_sizes_is_propagated_apart() -> None:
    found = _propagated(_packed, 1536, 4)
    assert any("split over `tp` moves rows between devices" in note for note in found.notes)
    halo = _propagated(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), 1024, 4
    )
    assert not any("moves rows" in note for note in halo.notes)
