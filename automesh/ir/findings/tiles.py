"""The rule about products that a mesh cuts into parts smaller than a TPU multiplies at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

from automesh.cost.terms import Finding, Monomial
from automesh.ir.findings.nouns import LEAST_BYTES, PartitionedProgram, words, work_of
from automesh.ir.findings.rule import (
    Rule,
    Sizes,
    WholeProgramCheck,
    advice,
    array_of,
    axes_of,
    parts,
)
from automesh.ir.graph import Operation, Value, added, times
from automesh.ir.terms.collectives import nearby_source

PARTS_BELOW_TILE = "parts-below-tile"
# The matrix units of TPUs up to v5 multiply 128 by 128, and v6e has units of 256 by 256
# (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm).
LANES = 128
# Least part of a step's multiplications that a reported product must have.
_SHARE = 0.05


def parts_below_tile(program: PartitionedProgram) -> Iterator[Finding]:
    """Finds products with less than a tile of columns or sums on a device, but more in all.

    The rule looks at the last dimensions of their operands, which lie along the lanes. Rows of a
    batch are left out: a matrix unit takes them one after the other. A size that several products
    share is reported once, at the first of them.

    The bytes are the padding of the operand; they are below 0 on meshes where the part is large
    enough.
    """
    if program.platform != "tpu":
        return
    products = [one for one in program.operations() if one.operation.name == "dot_general"]
    total = sum(work_of(program, one) for one in products)
    told: set[tuple[int, tuple[str, ...]]] = set()
    for seen in products:
        operation = seen.operation
        if work_of(program, seen) < _SHARE * total:
            continue
        for value, dims in _sides(operation):
            axes = tuple(axis for d in dims for axis in value.axes[d])
            size = math.prod(value.shape[d] for d in dims)
            source = operation.source or nearby_source(operation)
            if size < LANES or not axes or (size, axes) in told:
                continue
            if value.global_bytes < LEAST_BYTES:
                continue
            told.add((size, axes))
            yield Finding(
                rule=PARTS_BELOW_TILE,
                array=words(value),
                bytes=added(*_padding_bytes(value, dims)),
                axes=axes,
                count=seen.count,
                source=source,
                detail=str(size),
            )


def _parts_below_tile_words(finding: Finding, sizes: Sizes) -> str:
    size, cut = int(finding.detail), "cut" if len(finding.axes) > 1 else "cuts"
    part = -(-size // parts(finding.axes, sizes))
    return (
        f"{axes_of(finding)} {cut} the {size} of {array_of(finding)} into parts of {part}, and a "
        f"TPU multiplies 128 at a time: {1 - part / 128:.0%} of its matrix unit has nothing to do "
        "in this product"
    )


def _sides(product: Operation) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """Lists operands with their row, column and summed dimensions."""
    of, (left, right) = product.attributes, product.operands[:2]
    for value, dims in (
        (left, _others(left, of["lhs_batch"], of["lhs_contracting"])),
        (right, _others(right, of["rhs_batch"], of["rhs_contracting"])),
        (left, tuple(of["lhs_contracting"])),
    ):
        if len(value.shape) - 1 in dims:
            yield value, dims


def _others(value: Value, *taken: tuple[int, ...]) -> tuple[int, ...]:
    used = {d for dims in taken for d in dims}
    return tuple(d for d in range(len(value.shape)) if d not in used)


def _padding_bytes(value: Value, dims: tuple[int, ...]) -> tuple[Monomial, Monomial]:
    """Counts the bytes of padding up to a tile in these dimensions."""
    part = value.bytes
    whole = Monomial(coefficient=part.coefficient * LANES, powers=part.powers)
    for d in dims:
        one = value.dimension(d)
        powers = tuple((axis, -power) for axis, power in one.powers)
        whole = times(whole, Monomial(coefficient=1 / one.coefficient, powers=powers))
    return whole, Monomial(coefficient=-part.coefficient, powers=part.powers)


RULES: tuple[Rule, ...] = (
    Rule(
        name=PARTS_BELOW_TILE,
        check=WholeProgramCheck(parts_below_tile),
        title="parts below a tile",
        what=_parts_below_tile_words,
        why="a matrix unit has 128 rows and 128 columns (256 on v6e), and what a device's part "
        "does not fill stays idle",
        cure=advice("let these axes split a larger dimension, or fewer devices this one"),
    ),
)
