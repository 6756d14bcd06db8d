"""The rule about parts of the state that are smaller than what a TPU keeps them in."""

from __future__ import annotations

import math
from collections.abc import Iterator

from automesh.cost.terms import Finding, Monomial
from automesh.ir.findings.nouns import LEAST_BYTES, Program, several
from automesh.ir.graph import Value, added, element_bytes

PARTS_BELOW_TILE = "parts-below-tile"
# A tile of a TPU has 128 lanes: the last dimension of an array is filled up to them
# (https://openxla.org/xla/tiled_layout).
LANES = 128


def parts_below_tile(program: Program) -> Iterator[Finding]:
    """Arguments whose last dimension the mesh cuts into parts of less than a tile, those that are
    cut alike together. The bytes are what is filled up, and below 0 on meshes that leave enough."""
    if program.platform != "tpu":
        return
    alike: dict[tuple[int, tuple[str, ...]], list[tuple[str, Value]]] = {}
    for number, value in enumerate(program.graph.top.arguments):
        axes = value.axes[-1] if value.axes else ()
        if axes and value.shape[-1] >= LANES and value.global_bytes >= LEAST_BYTES:
            key = value.shape[-1], axes
            alike.setdefault(key, []).append((program.state.name(number), value))
    for (size, axes), found in alike.items():
        yield Finding(
            rule=PARTS_BELOW_TILE,
            array=several([name for name, _ in found]),
            bytes=added(*(one for _, value in found for one in _filled_up(value))),
            axes=axes,
            source=program.state.source,
            detail=str(size),
        )


def _filled_up(value: Value) -> tuple[Monomial, Monomial]:
    """Bytes with a last dimension of one tile, less those of the part itself."""
    rows = Value(shape=value.shape[:-1], dtype=value.dtype, axes=value.axes[:-1])
    tile = LANES * element_bytes(value.dtype)
    row = rows.bytes
    whole = Monomial(coefficient=math.prod(value.shape[:-1]) * tile, powers=row.powers)
    part = value.bytes
    return whole, Monomial(coefficient=-part.coefficient, powers=part.powers)
