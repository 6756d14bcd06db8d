"""Arrays that are padded, cut and put together along a split dimension, on eight CPUs.

The figures are those of jaxlib 0.12: bytes of its partitioned module, and memory of temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

MIB = 2.0**20
SIZES = {"dp": 4, "tp": 2}
ROW = 1024 * 4  # Bytes.


def _shifted(x: Any, by: int) -> Any:
    """Rows that move by some places, with zeros behind them."""
    padded = jnp.pad(x, ((max(by, 0), max(-by, 0)), (0, 0)))
    start = max(-by, 0)
    return padded[start : start + len(x)]


def _padded(x: Any, mode: str, by: int = 2) -> Any:
    return jnp.sum(jnp.tanh(jnp.pad(x, ((by, by), (0, 0)), mode=mode)))


def _five_points(x: Any) -> Any:
    p = jnp.pad(x, 1, mode="edge")
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x


def _variation(x: Any) -> Any:
    return jnp.sum(jnp.abs(x[1:] - x[:-1])) + jnp.sum(jnp.abs(x[:, 1:] - x[:, :-1]))


Moved = dict[str, float]
# A step on f32[1024,1024], what splits it, bytes of its collectives over dp, temporaries in MiB.
STEPS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], Moved, float]] = {
    # A pad and a slice that become one: 5 rows and 2 MiB if rows moved twice.
    "shifts": (
        lambda x: x + _shifted(x, 1) + _shifted(x, -1),
        ("dp",),
        {"collective-permute": 2 * ROW},
        0.01,
    ),
    "far shifts": (
        lambda x: x + _shifted(x, 3) + _shifted(x, -2),
        ("dp",),
        {"collective-permute": 5 * ROW},
        0.03,
    ),
    # A pad that several slices read stays as it is.
    "shifts of one pad": (
        lambda x: x + (lambda p: p[2:] + p[:-2])(jnp.pad(x, ((1, 1), (0, 0)))),
        ("dp",),
        {"collective-permute": 7 * ROW},
        1.02,
    ),
    # Ghost cells: two halos of the pad, and four rows for each side.
    "periodic": (
        lambda x: _padded(x, "wrap"),
        ("dp",),
        {"collective-permute": 10 * ROW, "all-reduce": 4},
        2.05,
    ),
    # Parts are not even: each roll is made for two distances.
    "periodic, not even": (
        lambda x: _padded(x, "wrap", 1),
        ("dp",),
        {"collective-permute": 14 * ROW, "all-reduce": 4},
        2.05,
    ),
    "edges": (
        _five_points,
        ("dp", "tp"),
        {"collective-permute": 38948},
        2.02,
    ),
    # Two pieces of one array that are no roll: each device makes all rows of some columns.
    "shift that changes its last row": (
        lambda x: x + jnp.concatenate([x[1:], 2.0 * x[:1]]),
        ("dp",),
        {"collective-permute": ROW, "all-to-all": (2 * 1024 + 4) * ROW},
        2.0,
    ),
    # A sum over parts that are not even reads them with zeros instead of the padding.
    "differences": (
        lambda x: jnp.sum((x[1:] - x[:-1]) ** 2),
        ("dp",),
        {"collective-permute": ROW, "all-reduce": 4},
        1.0,
    ),
    "variation": (
        _variation,
        ("dp", "tp"),
        {"collective-permute": ROW / 2, "all-reduce": 8},
        1.5,
    ),
    # What is gathered has the padding of the last part; the result is cut from it.
    "whole result": (
        lambda x: x[:-2] + x[2:] - 2 * x[1:-1],
        ("dp",),
        {"collective-permute": 3 * ROW, "all-gather": 1024 * ROW},
        4.0,
    ),
}


def _build(name: str) -> Any:
    step, split, _, _ = STEPS[name]

    def build(mesh: Any) -> Any:
        sharding = NamedSharding(mesh, P(*split))
        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
        is_alike = name != "whole result" and jax.eval_shape(step, x).shape == x.shape
        return jax.jit(step, out_shardings=sharding if is_alike else None), (x,)

    return build


@pytest.mark.parametrize("name", STEPS)
def test_rows_and_buffers_are_those_of_the_compiler(name: str) -> None:
    programs = Programs(
        build=lambda mesh: build_on(_build(name), mesh), axis_names=("dp", "tp"), platform="cpu"
    )
    terms = propagate(programs, sizes=tuple(SIZES.items()), probes=(), enter=lambda _: None).terms
    moved: dict[str, float] = {}
    for one in terms.collectives:
        if "dp" in one.axes:
            bytes_in_all = value_of(one.count, SIZES) * value_of(one.payload_bytes, SIZES)
            moved[one.kind] = moved.get(one.kind, 0.0) + bytes_in_all
    expected, temporaries = STEPS[name][2:]
    assert moved == pytest.approx(expected, rel=0.01)
    most = max(value_of(point.bytes, SIZES) for point in terms.points) / MIB
    assert most == pytest.approx(temporaries, rel=0.3, abs=0.05)


def _collectives(step: Callable[[Any, Any], Any], rows: int, platform: str) -> list[Any]:
    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
        return jax.jit(lambda x: step(x, mesh)), (x,)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp", "tp"), platform=platform
    )
    terms = propagate(programs, sizes=tuple(SIZES.items()), probes=(), enter=lambda _: None).terms
    return [one for one in terms.collectives if one.kind == "all-gather"]


def _whole(x: Any, mesh: Any) -> Any:
    """Gathers what is split over dp first."""
    split = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
    return jax.lax.with_sharding_constraint(split, NamedSharding(mesh, P()))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_padded_arrays_that_are_gathered_and_put_together(platform: str) -> None:
    """Before, the slice behind a padded gather did not say what it cuts, and this failed."""

    def step(x: Any, mesh: Any) -> Any:
        both = _whole(jnp.tanh(x), mesh), _whole(jnp.cos(x), mesh)
        return jnp.concatenate(both, axis=0)

    found = _collectives(step, 1022, platform)
    moved = sum(value_of(one.count, SIZES) * value_of(one.payload_bytes, SIZES) for one in found)
    assert moved == 2 * 1024 * ROW


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("rows", [4094, 4096])
@pytest.mark.parametrize("is_converted", [True, False])
def test_padded_arrays_are_converted_before_they_are_gathered(
    platform: str, rows: int, is_converted: bool
) -> None:
    """Before, parts that are not even were gathered in 32 bits."""

    def step(x: Any, mesh: Any) -> Any:
        whole = _whole(jnp.tanh(x), mesh)
        if is_converted:
            whole = whole.astype(jnp.bfloat16)
        return whole @ whole.T

    is_narrow = is_converted or platform == "tpu"
    (one,) = _collectives(step, rows, platform)
    assert value_of(one.payload_bytes, SIZES) == 4096 * ROW / (2 if is_narrow else 1)
