"""An operation of a traced program with the dimensions of its operands, and the events that are
recorded for the later analysis of classes (jax's names of parameters, but no import of jax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions, Dims

Shape = tuple[int, ...]
Source = tuple[int, ...]
"""The integers of the data that an array of indices comes from: a number for each of its columns, 0
for other columns; empty for none. Dimensions in which the same integers look up are one class."""


def primitives(names: str) -> frozenset[str]:
    """Splits names of primitives at spaces."""
    return frozenset(names.split())


def shape_of(variable: Any) -> Shape:
    """Returns the shape of a variable; empty for a variable that is no array."""
    return tuple(int(size) for size in getattr(variable.aval, "shape", ()))


class ArrayOrigin(IntFlag):
    """The kinds of data that an array is made from."""

    STATE = 1
    """State that a gradient changes: parameters, moments."""
    DATA = 2
    """Other arguments, and arrays that the step holds."""
    RANDOM = 4
    """Random numbers of a key."""
    GRADIENT = 8
    """Results of a backward pass; of these an optimizer makes its steps, and a task the weights of
    its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationPlace:
    """The place of an operation in a program.

    Attributes:
      path: numbers of equations, outermost first.
      bodies: for all but the last equation, the number of its program.
    """

    path: tuple[int, ...]
    bodies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loops around an operation.

    Attributes:
      turns: product of the turns of all loops; a loop of unknown length counts once.
      carries: number of the innermost one, from 1; 0 outside of loops.
    """

    turns: int = 1
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A product that sums over dimensions, or a sum alone.

    Attributes:
      summed: dimensions that are summed over.
      batch: dimensions of both operands and the result.
      left, right: dimensions of only one operand; for a sum, the rest is in `left`.
      is_forward: whether it is not in a backward pass.
    """

    summed: Dims
    batch: Dims = ()
    left: Dims = ()
    right: Dims = ()
    is_forward: bool
    is_product: bool
    made: tuple[ArrayOrigin, ...]
    loop: Loop
    result: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Elements of an array that indices choose.

    Attributes:
      looked_up: dimensions in which indices choose.
      by: dimensions of the indices.
      window: the other dimensions of the chosen elements.
      result: dimensions of the result.
      chosen_by: origin of the indices; none if they are positions.
      is_by_held: whether the indices are an unchanged argument or a constant of the step.
      is_held_whole: whether the looked-up array is an unchanged argument or a constant of the step.
      is_of_windows: whether the indices are the positions behind given places.
      source: of the indices.
      takes_rows: whether what is chosen is rows, and no single column or number.
      place: None inside of a `shard_map`, where no constraint can be put.
    """

    looked_up: Dims
    by: Dims
    window: Dims
    result: Dims
    shape: Shape
    made: ArrayOrigin
    chosen_by: ArrayOrigin
    place: EquationPlace | None
    is_forward: bool
    is_by_held: bool
    is_held_whole: bool
    is_of_windows: bool
    is_float: bool
    source: Source = ()
    takes_rows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Factorized:
    """Matrices that are factorized, on gradients or outside of them.

    Attributes:
      matrix: dimensions of a matrix.
      many: dimensions of independent matrices.
      made: dimensions of the results, without those of `many`.
    """

    matrix: Dims
    many: Dims
    made: Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Elements that are summed into places that indices give.

    Attributes:
      into: dimensions in which indices choose.
      by: dimensions of the indices.
      source: of the indices.
    """

    into: Dims
    by: Dims
    made: ArrayOrigin
    is_forward: bool
    source: Source = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """An array that begins inside the step: random numbers, or zeros that a loop carries."""

    dims: Dims
    shape: Shape
    place: EquationPlace
    is_random: bool
    output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A reshape of data that makes several dimensions of one, such as micro-batches, or a slice.

    Attributes:
      dims: dimensions of the result; of a slice only those of which it takes a part.
      output: number of the operation's output that is the result.
    """

    dims: Dims
    shape: Shape
    place: EquationPlace
    output: int = 0
    is_slice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A place where data meet parameters.

    Attributes:
      dims, shape: dimensions and shape of an array of floats.
      output: number of the operation's output that is the array; -1 for its first operand.
      is_table: whether the array is a lookup table of parameters or its gradient; else it is the
        result.
      number: how many equations were walked before.
    """

    dims: Dims
    shape: Shape
    place: EquationPlace
    output: int = 0
    is_table: bool = False
    number: int
    loop: Loop
    is_forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRows:
    """An operation of a forward pass after which elements of a dimension are in other places, or
    meet each other.

    Attributes:
      marks: what it does along the dimension.
      is_of_data: whether no parameters have met the array before.
      number: how many equations were walked before.
    """

    dim: Dim
    marks: DimensionMark
    is_of_data: bool
    number: int
    loop: Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A loop that takes a slice of a dimension in each turn.

    Attributes:
      sums_gradients: whether each turn has both passes and adds its gradients to those of the
        turns before: its slices are micro-batches.
    """

    dim: Dim
    turns: int
    is_forward: bool
    sums_gradients: bool = False


@dataclass(slots=True)
class Events:
    """The recorded events of a program, in its order, which the analysis of classes uses."""

    products: list[Contraction] = field(default_factory=list[Contraction])
    lookups: list[Lookup] = field(default_factory=list[Lookup])
    segments: list[Segments] = field(default_factory=list[Segments])
    draws: list[Draw] = field(default_factory=list[Draw])
    divisions: list[Division] = field(default_factory=list[Division])
    walks: list[Walk] = field(default_factory=list[Walk])
    # Products with only parameters on one side, and lookups in parameters.
    meetings: list[Meeting] = field(default_factory=list[Meeting])
    moves: list[MovedRows] = field(default_factory=list[MovedRows])
    # By primitive, how often one was met whose rules are not known.
    unknown: dict[str, int] = field(default_factory=dict[str, int])
    # Dimensions of results of backward passes, each list of factors once.
    backward: set[Dim] = field(default_factory=set[Dim])
    # Gradients that a loop adds up in its turns: the product, its elements, the turns.
    in_loops: list[tuple[Contraction, int, int]] = field(
        default_factory=list[tuple[Contraction, int, int]]
    )
    # Dimensions of carried values of loops, except loops over layers.
    carried: list[Dims] = field(default_factory=list[Dims])
    # Dimensions of kernels of convolutions: (features in, features out, spatial).
    kernels: list[tuple[Dim, Dim, Dims]] = field(default_factory=list[tuple[Dim, Dim, Dims]])
    # Dimensions of images of convolutions.
    spatial: list[Dims] = field(default_factory=list[Dims])
    # For each source, the dimensions in which its integers choose.
    chosen: dict[int, list[Dim]] = field(default_factory=dict[int, list[Dim]])
    # For each source that is the places of the largest or smallest scores, the dimension that has
    # as many as were asked for; () for one.
    ranked: dict[int, Dim] = field(default_factory=dict[int, Dim])
    # Sources that the step itself computes.
    computed: set[int] = field(default_factory=set[int])
    # For each source, the dimension whose own positions its integers are.
    positions: dict[int, Dim] = field(default_factory=dict[int, Dim])
    # For each source that is all positions of a dimension in the order of data, that dimension.
    ordered: dict[int, Dim] = field(default_factory=dict[int, Dim])
    # Sources that are positions behind a place: the rows of a window.
    windows: set[int] = field(default_factory=set[int])
    # Of positions, what they are multiplied by.
    strides: dict[int, int] = field(default_factory=dict[int, int])
    # For each source that is places inside of rows which lie end to end, the multiplied positions
    # of these rows that are added to it.
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    # Such sources by which the forward pass has chosen among rows of the data.
    by_offset: set[int] = field(default_factory=set[int])
    # The dimension of the positions that an `argmax` or `top_k` has just returned.
    places: list[Dim] = field(default_factory=list[Dim])
    # Dimensions of carried values that begin as parameters, once for each of a batch.
    copies: list[Dims] = field(default_factory=list[Dims])
    # Factorizations that no gradient is taken through, such as those of an optimizer.
    factorized: list[Factorized] = field(default_factory=list["Factorized"])
    # Dimensions along which each Fourier transform runs, and those of its result.
    transformed: list[Dims] = field(default_factory=list[Dims])
    # Dimensions along which such factors are used to solve.
    solved: list[Dims] = field(default_factory=list[Dims])
    equations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation:
    """An operation with its operands and results.

    Attributes:
      ins: dimensions of each operand.
      given, shapes: shapes of the operands and of the results.
      made: origin of each operand.
      held: operands that are unchanged arguments or constants of the step.
      sources: source of each operand.
      is_differentiated: whether a gradient is taken through it: an optimizer's work is not.
      is_float: whether the first result is made of floats.
    """

    name: str
    params: Mapping[str, Any]
    ins: tuple[Dims, ...]
    given: tuple[Shape, ...]
    shapes: tuple[Shape, ...]
    made: tuple[ArrayOrigin, ...]
    is_backward: bool
    is_differentiated: bool
    loop: Loop
    place: Callable[[], EquationPlace]
    held: tuple[bool, ...]
    sources: tuple[Source, ...]
    is_float: bool
    all: Dimensions
    events: Events

    def fresh(self, marks: int = 0) -> list[Dims]:
        """Makes new dimensions for the results, which agree with no others."""
        return [self.all.news(shape, marks) for shape in self.shapes]

    def together(self) -> ArrayOrigin:
        """Returns the origins of all operands together."""
        made = ArrayOrigin(0)
        for one in self.made:
            made |= one
        return made


Rule = Callable[[TracedOperation], "list[Dims]"]
