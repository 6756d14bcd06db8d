"""A partitioned program as a graph: values with their mesh axes, operations, loops.

Made by `sharding.mlir.module` from the MLIR module that Shardy leaves, changed in place by
`ir.passes`, read by `ir.fusion`, `ir.terms` and `ir.memory`. This module knows no MLIR.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from automesh.cost.terms import Monomial, Sum

ELEMENT_BYTES = {
    "i1": 1.0, "i4": 0.5, "ui4": 0.5, "i8": 1.0, "ui8": 1.0, "i16": 2.0, "ui16": 2.0,
    "i32": 4.0, "ui32": 4.0, "i64": 8.0, "ui64": 8.0,
    "f16": 2.0, "bf16": 2.0, "f32": 4.0, "f64": 8.0, "complex<f32>": 8.0, "complex<f64>": 16.0,
}  # fmt: skip

# The attribute of operations that compute whether a loop goes on.
IN_CONDITION = "in_condition"


def element_bytes(dtype: str) -> float:
    """Returns the bytes of one element of a StableHLO type; f8 and f6 types take one byte, f4 types
    half a byte."""
    if dtype in ELEMENT_BYTES:
        return ELEMENT_BYTES[dtype]
    if dtype.startswith(("f8", "f6")):
        return 1.0
    if dtype.startswith("f4"):
        return 0.5
    raise KeyError(dtype)


_NOTHING = Monomial(coefficient=0.0)


@dataclass(eq=False, slots=True, kw_only=True)
class Value:
    """One tensor.

    Attributes:
      shape: global sizes. If the program states sizes that depend on the axes, as inside manual
        regions, these are the sizes with all axes at 1, if the dependence is known (see `grown`);
        else those of one device at the sampled sizes.
      dtype: as StableHLO prints it: f32, bf16, i32 ...
      axes: per dimension, the mesh axes that divide it, major first; an axis may divide it twice.
      grown: per dimension, the mesh axes that multiply it, as the result of an all-gather in a
        manual region may grow with the axis; empty if there are none at all.
      free: dimensions whose dependence on the axes is ignored, as for small arrays of indices.
      manual: mesh axes of the manual regions around it.
      producer: the operation that makes it; None for an argument of a block.
      is_constant: True if it depends on no argument of the program.
      on_host: True if it is in host memory; see `ir.passes.offload`.
      stated: the sizes in the program, if `shape` differs because the compiler pads it to equal
        parts; else empty.
      in_part: axes that `axes` does not have, as only a part of each splits the value: `shape` is
        divided by that.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]
    manual: tuple[str, ...] = ()
    producer: Operation | None = None
    users: list[Operation] = field(default_factory=list["Operation"])
    is_constant: bool = False
    on_host: bool = False
    grown: tuple[tuple[str, ...], ...] = ()
    free: tuple[int, ...] = ()
    stated: tuple[int, ...] = ()
    in_part: tuple[str, ...] = ()

    @property
    def global_bytes(self) -> float:
        return math.prod(self.shape) * element_bytes(self.dtype)

    @property
    def bytes(self) -> Monomial:
        """Bytes on one device."""
        return _monomial(self.global_bytes, self.axes, self.grown)

    @property
    def device_bytes(self) -> Monomial:
        """Bytes in the memory of one device; 0 if the value is on the host."""
        return _NOTHING if self.on_host else self.bytes

    def dimension(self, index: int) -> Monomial:
        """Returns the size of one dimension on one device."""
        grown = (self.grown[index],) if self.grown else ()
        return _monomial(float(self.shape[index]), (self.axes[index],), grown)

    def __repr__(self) -> str:
        sizes = ",".join(
            f"{size}{{{'+'.join(axes)}}}" if axes else str(size)
            for size, axes in zip(self.shape, self.axes, strict=True)
        )
        return f"{self.dtype}[{sizes}]"


@dataclass(eq=False, slots=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
      name: of StableHLO or Shardy without dialect: dot_general, add, all_gather (Shardy's),
        while, case, custom_call ... Explicit collectives of manual regions have Shardy's names
        too: all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute.
      attributes: what analyses need, by name, as plain Python values; see
        `sharding.mlir.attributes`.
      bodies: of while: [body]; of case: its branches; of custom_call, sort, reduce, scatter: none.
      trips: of while: executions of the body each time the loop is reached, at the sampled sizes;
        None if unknown.
      trip_formula: the same at all sizes, where it depends on them.
      source: `file.py:12` of the innermost frame in the user's code; empty if unknown.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    bodies: list[Block] = field(default_factory=list["Block"])
    trips: int | None = 1
    source: str = ""
    trip_formula: Sum | None = None

    def __post_init__(self) -> None:
        for result in self.results:
            result.producer = self
        for operand in self.operands:
            operand.users.append(self)

    @property
    def times(self) -> Sum | None:
        """Executions of the body each time the loop is reached, at all sizes; None if unknown."""
        if self.trip_formula is not None or self.trips is None:
            return self.trip_formula
        return (Monomial(coefficient=float(self.trips)),) if self.trips else ()


@dataclass(eq=False, slots=True, kw_only=True)
class Block:
    """A sequence of operations with arguments and returned values."""

    arguments: list[Value] = field(default_factory=list[Value])
    operations: list[Operation] = field(default_factory=list[Operation])
    returned: list[Value] = field(default_factory=list[Value])


@dataclass(eq=False, slots=True, kw_only=True)
class Graph:
    """A whole program, all calls inlined.

    Attributes:
      mesh: names and sizes of the mesh axes that the program was propagated with, in order.
      donated: positions of the arguments whose memory outputs may take over.
      aliased: (argument, output) positions that the program itself ties together.
      host: positions of the arguments that lie in host memory.
      host_outputs: positions of the returned values that lie in host memory.
      sub_axes: axes over which some array is only partly split: the graph is valid only at the
        sizes of `mesh`.
      padded: axes that do not divide some array evenly, whose shape is then padded to equal parts:
        also valid only at the sizes of `mesh`.
    """

    top: Block
    mesh: tuple[tuple[str, int], ...]
    donated: tuple[int, ...] = ()
    aliased: tuple[tuple[int, int], ...] = ()
    host: tuple[int, ...] = ()
    host_outputs: tuple[int, ...] = ()
    sub_axes: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()


def operations_in(block: Block) -> Iterator[Operation]:
    """Yields the operations of a block, each before those of its bodies."""
    for operation in block.operations:
        yield operation
        for body in operation.bodies:
            yield from operations_in(body)


def used_in(bodies: Iterable[Block]) -> Iterator[Value]:
    """Collects all values that bodies read or return, including their own."""
    for body in bodies:
        for operation in body.operations:
            yield from operation.operands
            yield from used_in(operation.bodies)
        yield from body.returned


def _monomial(
    coefficient: float, divided: tuple[tuple[str, ...], ...], grown: tuple[tuple[str, ...], ...]
) -> Monomial:
    return Monomial(coefficient=coefficient, powers=_powers(divided, grown))


@lru_cache(maxsize=1 << 12)  # The values of a program are split in few different ways.
def _powers(
    divided: tuple[tuple[str, ...], ...], grown: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, int], ...]:
    powers: dict[str, int] = {}
    for sign, dimensions in ((-1, divided), (1, grown)):
        for axes in dimensions:
            for axis in axes:
                powers[axis] = powers.get(axis, 0) + sign
    return tuple(sorted((axis, power) for axis, power in powers.items() if power))


def times(one: Monomial, other: Monomial) -> Monomial:
    """Multiplies two monomials."""
    powers = dict(one.powers)
    for axis, power in other.powers:
        powers[axis] = powers.get(axis, 0) + power
    return Monomial(
        coefficient=one.coefficient * other.coefficient,
        powers=tuple(sorted((axis, power) for axis, power in powers.items() if power)),
    )


def added(*sizes: Monomial) -> Sum:
    """Adds sums, with one monomial for each distinct product of powers."""
    total: dict[tuple[tuple[str, int], ...], float] = {}
    for size in sizes:
        total[size.powers] = total.get(size.powers, 0.0) + size.coefficient
    return tuple(
        Monomial(coefficient=value, powers=powers)
        for powers, value in sorted(total.items())
        if value
    )


def multiplied(one: Sum, other: Sum) -> Sum:
    """Multiplies two sums."""
    return added(*(times(left, right) for left in one for right in other))


def total_bytes(values: Iterable[Value]) -> Sum:
    """Counts the bytes of all values on one device."""
    return added(*(value.bytes for value in values))
