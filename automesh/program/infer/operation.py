"""An operation of a traced program with the dimensions of its operands, and what is noted down of
it for those who judge classes later (jax's names of parameters, but no import of jax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

from automesh.program.infer.dimensions import Dim, Dimensions, Dims

Shape = tuple[int, ...]
Source = tuple[int, ...]
"""From which integers of the data an array of indices comes, a number for each of its columns, 0
for others; empty if it comes from none. What the same integers look up in is one class."""


def primitives(names: str) -> frozenset[str]:
    """Names of primitives, with spaces between them."""
    return frozenset(names.split())


class Origin(IntFlag):
    """What an array is made of."""

    STATE = 1
    """Something that comes back changed by a gradient: parameters, moments."""
    DATA = 2
    """Other arguments, and what the step holds."""
    RANDOM = 4
    """Draws of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationPlace:
    """Where an operation is.

    Attributes:
      path: numbers of equations, outermost first.
      bodies: of all but the last, which of its programs.
    """

    path: tuple[int, ...]
    bodies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loops around an operation.

    Attributes:
      turns: of all of them, multiplied; a loop of unknown length counts once.
      carries: number of the innermost one, from 1; 0 outside of loops.
    """

    turns: int = 1
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A product that sums over dimensions, or a sum alone.

    Attributes:
      summed: dimensions that sums go over.
      batch: that both operands and the result have.
      left, right: that only one operand has; of a sum, what is left is in `left`.
      is_forward: not in a backward pass.
    """

    summed: Dims
    batch: Dims = ()
    left: Dims = ()
    right: Dims = ()
    is_forward: bool
    is_product: bool
    made: tuple[Origin, ...]
    loop: Loop
    result: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Elements of an array that indices choose.

    Attributes:
      looked_up: dimensions that indices go along.
      by: dimensions of the indices.
      window: the other dimensions of what is chosen.
      result: dimensions of all that is chosen.
      is_held_whole: what is looked up in is an argument or a constant of the step, as it is.
    """

    looked_up: Dims
    by: Dims
    window: Dims
    result: Dims
    shape: Shape
    made: Origin
    place: EquationPlace
    is_forward: bool
    is_held_whole: bool
    is_float: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Elements that are added up where indices say.

    Attributes:
      into: dimensions that indices go along.
      by: dimensions of the indices.
    """

    into: Dims
    by: Dims
    made: Origin
    is_forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """An array that begins inside the step: random numbers, or zeros that a loop carries."""

    dims: Dims
    shape: Shape
    place: EquationPlace
    is_random: bool
    output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where something of the data meets parameters.

    Attributes:
      dims, shape: of an array of floats.
      output: of the operation that the array is; -1 for its first operand.
      is_table: the array is a table of parameters that is looked up in, or its gradient; else the
        result.
    """

    dims: Dims
    shape: Shape
    place: EquationPlace
    output: int = 0
    is_table: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A loop that takes a slice of a dimension in each turn."""

    dim: Dim
    turns: int
    is_forward: bool


@dataclass(slots=True)
class Events:
    """What judges look at, in the order of the program."""

    products: list[Contraction] = field(default_factory=list[Contraction])
    lookups: list[Lookup] = field(default_factory=list[Lookup])
    segments: list[Segments] = field(default_factory=list[Segments])
    draws: list[Draw] = field(default_factory=list[Draw])
    walks: list[Walk] = field(default_factory=list[Walk])
    # Products with parameters alone on one side, and lookups in them.
    meetings: list[Meeting] = field(default_factory=list[Meeting])
    # By primitive, how often one was met whose rules are not known.
    unknown: dict[str, int] = field(default_factory=dict[str, int])
    # Dimensions of results of backward passes, each list of factors once.
    backward: set[Dim] = field(default_factory=set[Dim])
    # Of sums that a backward loop adds up turn by turn: the product, elements of it, turns.
    in_loops: list[tuple[Contraction, int, int]] = field(
        default_factory=list[tuple[Contraction, int, int]]
    )
    # Dimensions of what loops carry, but for those that go over layers.
    carried: list[Dims] = field(default_factory=list[Dims])
    # Dimensions of kernels of convolutions: (features in, features out, spatial).
    kernels: list[tuple[Dim, Dim, Dims]] = field(default_factory=list[tuple[Dim, Dim, Dims]])
    # Of images that convolutions go over.
    spatial: list[Dims] = field(default_factory=list[Dims])
    # By source, what its integers choose in.
    chosen: dict[int, list[Dim]] = field(default_factory=dict[int, list[Dim]])
    # By source, the dimension whose own places its integers are.
    positions: dict[int, Dim] = field(default_factory=dict[int, Dim])
    # The dimension in which the integers are places that an `argmax` or `top_k` has just given.
    places: list[Dim] = field(default_factory=list[Dim])
    equations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation.

    Attributes:
      ins: dimensions of each operand.
      given, shapes: of the operands and of the results.
      made: what each operand is made of.
      held: operands that are arguments or constants of the step, as they are.
      sources: of each operand.
      is_float: whether the first result is made of floats.
    """

    name: str
    params: Mapping[str, Any]
    ins: tuple[Dims, ...]
    given: tuple[Shape, ...]
    shapes: tuple[Shape, ...]
    made: tuple[Origin, ...]
    is_backward: bool
    loop: Loop
    place: Callable[[], EquationPlace]
    held: tuple[bool, ...]
    sources: tuple[Source, ...]
    is_float: bool
    all: Dimensions
    events: Events

    def fresh(self, marks: int = 0) -> list[Dims]:
        """Results that agree with nothing."""
        return [self.all.news(shape, marks) for shape in self.shapes]

    def together(self) -> Origin:
        """What the results are made of."""
        made = Origin(0)
        for one in self.made:
            made |= one
        return made


Rule = Callable[[Operation], "list[Dims]"]
