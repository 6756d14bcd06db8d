"""Dimensions that must be split alike: a union-find whose members can be divided (no jax).

A dimension is a sequence of *factors*, outermost first: 512 columns that a reshape divides into 8
heads of 64 are the factors 8 and 64. If two dimensions must agree, their factors must, one by one;
a factor that meets two smaller ones is divided into them, in all dimensions that contain it. A
dimension of size 1 has no factor.

A factor also has *pieces*: the parts that slices take from it or concatenations put into it. The
same interval of the same factor is always the same piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntFlag

Dim = tuple[int, ...]
"""Numbers of factors, outermost first."""
Dims = tuple[Dim, ...]
"""The dimensions of an array."""


class DimensionMark(IntFlag):
    """The kinds of operations along a dimension, other than elementwise ones."""

    WALKED = 1
    """A loop takes one slice a turn."""
    SHIFTED = 2
    """Neighbours meet: rolls, slices at an offset, padding."""
    WINDOWED = 4
    """A window slides over it."""
    KERNEL = 8
    """It is the window of a convolution."""
    ORDERED = 16
    """It is sorted, cumulatively summed, transformed or searched for the position of a maximum."""
    LOOKED_UP = 32
    """Indices choose among its elements."""
    SLICED = 64
    """A slice is taken at a position that is known only at run time."""
    KEY = 128
    """It holds the words of a random key."""
    UNKNOWN = 256
    """An operation whose rules are not known takes it."""
    TANGLED = 512
    """Reshapes divide it at incompatible places."""
    SOLVED = 1024
    """It belongs to a matrix that is factorized or solved."""
    PICKED = 2048
    """One element of it is taken."""
    SUMMED = 4096
    """Sums go over it."""
    GROUPED = 8192
    """It has groups whose sizes are data."""
    POSITIONS = 16384
    """It is compared or computed with its own positions."""
    CUT = 32768
    """Parts of it are taken."""
    PUT = 65536
    """Parts of it are put together."""


# A dimension with one of these marks is never split in a computation.
WHOLE = (
    DimensionMark.WALKED
    | DimensionMark.KERNEL
    | DimensionMark.KEY
    | DimensionMark.UNKNOWN
    | DimensionMark.TANGLED
    | DimensionMark.SOLVED
)
# A batch has none of these marks, since its elements never meet.
MEETING = (
    WHOLE
    | DimensionMark.ORDERED
    | DimensionMark.SHIFTED
    | DimensionMark.WINDOWED
    | DimensionMark.LOOKED_UP
    | DimensionMark.PICKED
    | DimensionMark.GROUPED
)

# Marks that say nothing about the elements inside of a network where the operation is before it or
# behind it.
MOVING = (MEETING & ~WHOLE) | DimensionMark.CUT | DimensionMark.PUT

_Interval = tuple[int, int]


class Dimensions:
    """The factors of all dimensions of a program."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._marks: list[int] = []
        self._parts: list[Dim | None] = []
        self._pieces: dict[int, dict[_Interval, Dim]] = {}
        self._todo: list[tuple[Dim, Dim]] = []
        self._is_joining = False
        self._moved: list[tuple[Dim, DimensionMark]] = []
        # Factors that were regrouped, with their groups and the members of each.
        self._regrouped: list[tuple[int, int, int]] = []

    def new(self, size: int, marks: int = 0) -> Dim:
        """Makes a dimension that agrees with no other yet."""
        dim = (self._new(size, marks),) if size > 1 else ()
        self._note_moved(dim, marks)
        return dim

    def news(self, shape: Iterable[int], marks: int = 0) -> Dims:
        """Makes the dimensions of an array."""
        return tuple(self.new(size, marks) for size in shape)

    def _new(self, size: int, marks: int) -> int:
        number = len(self._parent)
        self._parent.append(number)
        self._size.append(size)
        self._marks.append(int(marks))
        self._parts.append(None)
        return number

    def find(self, factor: int) -> int:
        """Returns the representative of a factor and of all that agree with it."""
        parent = self._parent
        while parent[factor] != factor:
            parent[factor] = parent[parent[factor]]
            factor = parent[factor]
        return factor

    def factors(self, dim: Dim) -> Dim:
        """Returns the current factors of a dimension."""
        if len(dim) == 1:
            root = self.find(dim[0])
            parts = self._parts[root]
            return (root,) if parts is None else self.factors(parts)
        return tuple(factor for one in dim for factor in self.factors((one,)))

    def size(self, factor: int) -> int:
        """Returns the number of elements of a factor."""
        return self._size[factor]

    def size_of(self, dim: Dim) -> int:
        """Returns the number of elements of a dimension."""
        return math.prod(self._size[factor] for factor in dim)

    def marks(self, factor: int) -> DimensionMark:
        """Returns the marks of a representative factor."""
        return DimensionMark(self._marks[factor])

    def pieces(self, factor: int) -> dict[_Interval, Dim]:
        """Returns the pieces of a representative factor, by (begin, size)."""
        return self._pieces.get(factor, {})

    def mark(self, dim: Dim, marks: int) -> None:
        """Adds marks to a dimension."""
        for factor in self.factors(dim):
            self._marks[factor] |= marks
        self._note_moved(dim, marks)

    def mark_parts(self, dim: Dim, marks: int) -> None:
        """Adds marks to a dimension and to all pieces of it: what meets along a padded dimension
        met along the dimension that was padded."""
        self.mark(dim, marks)
        for factor in self.factors(dim):
            for piece in self.pieces(factor).values():
                if any(marks & ~self.marks(one) for one in self.factors(piece)):
                    self.mark_parts(piece, marks)

    def _note_moved(self, dim: Dim, marks: int) -> None:
        if marks & MOVING and dim:
            self._moved.append((dim, DimensionMark(marks) & MOVING))

    def moved(self) -> list[tuple[Dim, DimensionMark]]:
        """Returns what has got marks of `MOVING` since the last call."""
        found, self._moved = self._moved, []
        return found

    def roots(self) -> list[int]:
        """Returns the representative factors."""
        return [
            number
            for number, parent in enumerate(self._parent)
            if parent == number and self._parts[number] is None
        ]

    # Joining.

    def join(self, one: Dim, other: Dim) -> None:
        """Joins two dimensions of the same size, which must be split alike."""
        if one == other or not one or not other:
            return
        self._todo.append((one, other))
        if self._is_joining:
            return
        self._is_joining = True
        while self._todo:
            self._join(*self._todo.pop())
        self._is_joining = False

    def join_all(self, one: Dims, other: Dims) -> None:
        """Joins the dimensions of two arrays of the same shape."""
        for mine, yours in zip(one, other, strict=True):
            self.join(mine, yours)

    def _join(self, one: Dim, other: Dim) -> None:
        mine, yours = list(reversed(one)), list(reversed(other))
        while mine and yours:
            a, b = self._first(mine), self._first(yours)
            if a == b or self._size[a] == self._size[b]:
                self._union(a, b)
                mine.pop()
                yours.pop()
                continue
            common = math.gcd(self._size[a], self._size[b])
            if common == 1:
                self._tangle(mine, yours)
                continue
            for factor in (a, b):
                if self._size[factor] > common:
                    self._take_apart(factor, common)
        self.mark((*mine, *yours), DimensionMark.TANGLED)

    def _first(self, rest: list[int]) -> int:
        """Returns the outermost current factor of the rest of a dimension."""
        rest[-1:] = reversed(self.factors((rest[-1],)))
        return rest[-1]

    def _tangle(self, mine: list[int], yours: list[int]) -> None:
        """Marks factors without a common divisor as tangled, until both sides have equal sizes."""
        left, right = [mine.pop()], [yours.pop()]
        while (a := self.size_of(tuple(left))) != (b := self.size_of(tuple(right))):
            side, rest = (left, mine) if a < b else (right, yours)
            if not rest:
                break
            side.append(self._first(rest))
            rest.pop()
        self.mark((*left, *right), DimensionMark.TANGLED)

    def _union(self, a: int, b: int) -> None:
        if a == b:
            return
        if a > b:  # The earlier one represents both.
            a, b = b, a
        self._parent[b] = a
        self._marks[a] |= self._marks[b]
        for interval, dim in self._pieces.pop(b, {}).items():
            known = self._piece(a, interval)
            if known and dim:
                self._todo.append((known, dim))

    def _take_apart(self, factor: int, outer: int) -> Dim:
        """Divides a factor into two, in all dimensions that contain it."""
        inner = self._size[factor] // outer
        parts = (self._new(outer, self._marks[factor]), self._new(inner, self._marks[factor]))
        pieces = self._pieces.pop(factor, {})
        self._parts[factor] = parts
        for (begin, size), dim in pieces.items():
            again = self.piece(parts, begin, size)
            if dim and again:
                self._todo.append((dim, again))
        return parts

    def split(self, dim: Dim, outer: int) -> tuple[Dim, Dim]:
        """Divides a dimension into an outer part of `outer` elements and an inner part; new
        unrelated dimensions if its factors do not fit."""
        whole = self.factors(dim)
        if len(whole) == 1 and self._is_mixed(whole[0], outer):
            return self._regroup(whole[0], outer)
        rest = list(reversed(dim))
        taken: list[int] = []
        left = outer
        while left > 1 and rest:
            factor = self._first(rest)
            size = self._size[factor]
            if left % size == 0:
                taken.append(rest.pop())
                left //= size
            elif size % left == 0:
                self._take_apart(factor, left)
            else:
                break
        if left == 1:
            return tuple(taken), tuple(reversed(rest))
        self.mark(dim, DimensionMark.TANGLED)
        inner = self.size_of(self.factors(dim)) // outer
        return self.new(outer, DimensionMark.TANGLED), self.new(inner, DimensionMark.TANGLED)

    def _is_mixed(self, factor: int, outer: int) -> bool:
        """Whether groups of a factor cross the unequal pieces that it is made of, such as rows with
        and without labels."""
        size = self._size[factor]
        pieces = self.packed(factor)
        if size % outer or outer in (1, size) or len({length for (_, length), _ in pieces}) < 2:
            return False
        inner = size // outer
        crosses = any(begin % inner or length % inner for (begin, length), _ in pieces)
        return crosses or any(self.find(one) == factor for one, _, _ in self._regrouped)

    def _regroup(self, factor: int, outer: int) -> tuple[Dim, Dim]:
        """Divides a factor into groups that say nothing about its pieces."""
        marks = DimensionMark.TANGLED
        groups = self._new(outer, marks), self._new(self._size[factor] // outer, marks)
        self._regrouped.append((factor, *groups))
        return groups[:1], groups[1:]

    def gathered(self, dim: Dim) -> Dim:
        """Returns the factor that was regrouped into these two, in this or the other order: all of
        its elements, which have then moved; else the dimension itself."""
        own = self.factors(dim) if self._regrouped else ()
        for factor, *groups in self._regrouped:
            whole = self.find(factor)
            known = self.factors((groups[0],)) + self.factors((groups[1],))
            if self._parts[whole] is not None or sorted(own) != sorted(known):
                continue
            if own != known:
                self.mark((whole,), DimensionMark.SHIFTED)
            return (whole,)
        return dim

    # Pieces.

    def piece(self, dim: Dim, begin: int, size: int) -> Dim:
        """Returns the piece that a slice takes out of a dimension."""
        factors = self.factors(dim)
        total = self.size_of(factors)
        if size == total or not size:
            return factors if size else ()
        if len(factors) == 1:
            return self._piece(factors[0], (begin, size))
        inner = self.size_of(factors[1:])
        if begin % inner == 0 and size % inner == 0:
            if size == inner:
                self.mark(factors[:1], DimensionMark.PICKED)
            outer = self.piece(factors[:1], begin // inner, size // inner)
            return (*outer, *factors[1:])
        if factors and begin // inner == (begin + size - 1) // inner:
            self.mark(factors[:1], DimensionMark.PICKED)
            return self.piece(factors[1:], begin % inner, size)
        self.mark(dim, DimensionMark.SHIFTED)
        return self.new(size, DimensionMark.SHIFTED)

    def _piece(self, factor: int, interval: _Interval) -> Dim:
        """Returns a piece of a factor. A piece inside of another one is a piece of that, too: a
        batch of views of two sizes is two batches end to end, and a slice for each view cuts them.
        """
        known = self._pieces.setdefault(factor, {})
        if interval in known:
            return known[interval]
        begin, size = interval
        dim = known[interval] = self.new(size)
        around: list[tuple[_Interval, Dim]] = []
        inside: list[tuple[_Interval, Dim]] = []
        for one in known.items() if size > 1 else ():
            first, length = one[0]
            if length > size and first <= begin and begin + size <= first + length:
                around.append(one)
            elif 1 < length < size and begin <= first and first + length <= begin + size:
                inside.append(one)
        for (first, _), other in _nearest(sorted(around, key=_length)):
            self.join(self.piece(other, begin - first, size), dim)
        for (first, length), other in _nearest(sorted(inside, key=_length, reverse=True)):
            self.join(self.piece(dim, first - begin, length), other)
        return dim

    def is_packed(self, factor: int) -> bool:
        """Whether its pieces are end to end and only used separately."""
        return bool(self.packed(factor))

    def packed(self, factor: int) -> Sequence[tuple[_Interval, Dim]]:
        """Returns the largest pieces of a factor in order, if they are end to end without overlap;
        else none."""
        pieces = sorted(
            self._pieces.get(factor, {}).items(), key=lambda one: (one[0][0], -one[0][1])
        )
        found: list[tuple[_Interval, Dim]] = []
        end = 0
        for (begin, size), dim in pieces:
            if begin + size <= end:  # Inside of the last one.
                continue
            if begin != end or size == 1:
                return ()
            found.append(((begin, size), dim))
            end = begin + size
        return found if len(found) > 1 and end == self._size[factor] else ()

    def is_unstacked(self, factor: int) -> bool:
        """Whether each of its elements is taken by itself."""
        taken = {begin for begin, size in self._pieces.get(factor, {}) if size == 1}
        return len(taken) == self._size[factor]

    def is_cut(self, factor: int) -> bool:
        """Whether parts of it are taken that are not end to end, so that neighbours meet."""
        pieces = self._pieces.get(factor, {})
        return any(size > 1 for _, size in pieces) and not self.is_packed(factor)


def _is_inside(one: _Interval, other: _Interval) -> bool:
    """Whether an interval is a part of another one."""
    return other[0] <= one[0] and sum(one) <= sum(other)


def _length(one: tuple[_Interval, Dim]) -> int:
    return one[0][1]


def _nearest(those: Iterable[tuple[_Interval, Dim]]) -> list[tuple[_Interval, Dim]]:
    """Returns the pieces, the nearest in size first, without those that a nearer one implies."""
    found: list[tuple[_Interval, Dim]] = []
    for one in those:
        if not any(_is_inside(one[0], near[0]) or _is_inside(near[0], one[0]) for near in found):
            found.append(one)
    return found
