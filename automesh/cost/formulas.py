"""Sums of monomials as arrays: every distinct product of powers is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from automesh.cost.terms import Monomial, Sum
from automesh.hardware.fabric.fabric import Floats
from automesh.mesh.plan_arrays import Sizes

Indices = NDArray[np.intp]
Powers = tuple[tuple[str, int], ...]


def with_copies(temporaries: Floats, reread: Floats, on_chip_bytes: float) -> Floats:
    """Adds to the temporaries the copies of arguments in the memory on the chip.

    A TPU's compiler keeps there what kernels read again later, while temporaries leave room, and
    counts these copies in its peak (programs of libtpu 0.0.52).

    Args:
      temporaries: bytes on one device, [sizes].
      reread: bytes of the arguments that are read more than once, [sizes].
      on_chip_bytes: see `Terms`.
    """
    return np.maximum(temporaries, np.minimum(temporaries + reread, on_chip_bytes))


class Formulas:
    """Numbers the distinct powers of one step's formulas, so that coefficients become arrays.

    Attributes:
      axes: larger than 1, in the order of the sizes' columns; other axes have size 1 and drop out.
      powers: in the order in which they were met.
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.powers: list[Powers] = []
        self._numbers: dict[Powers, int] = {}
        self._met: dict[Powers, int] = {}

    def number(self, powers: Powers) -> int:
        """Returns the number of `powers`; adds them if they are new."""
        found = self._met.get(powers)
        if found is None:
            kept = tuple(sorted((axis, power) for axis, power in powers if axis in self.axes))
            found = self._numbers.get(kept)
            if found is None:
                found = self._numbers[kept] = len(self.powers)
                self.powers.append(kept)
            self._met[powers] = found
        return found

    def matrix(self, sums: Sequence[Sum]) -> Floats:
        """Returns the coefficients, [sums, powers so far]: `matrix @ values` evaluates all sums."""
        numbered = [
            (row, self.number(one.powers), one.coefficient)
            for row, total in enumerate(sums)
            for one in total
        ]
        matrix = np.zeros((len(sums), len(self.powers)))
        for row, column, coefficient in numbered:
            matrix[row, column] += coefficient
        return matrix

    def values(self, sizes: Sizes) -> Floats:
        """Evaluates every product of powers so far on every mesh: [powers, meshes].

        Args:
          sizes: [meshes, axes].
        """
        columns = {axis: sizes[:, place].astype(float) for place, axis in enumerate(self.axes)}
        values = np.empty((len(self.powers), len(sizes)))
        for row, powers in enumerate(self.powers):
            # Products of whole numbers are exact, so that one division is the only rounding.
            above = _product(columns, [(axis, power) for axis, power in powers if power > 0])
            below = _product(columns, [(axis, -power) for axis, power in powers if power < 0])
            values[row] = above / below
        return values


# An axis splits a few dimensions of an array, and a product has a few arrays. A larger power is in
# terms that somebody else has written: it has a value, too, without as many multiplications.
_MOST_FACTORS = 64


def _product(columns: dict[str, Floats], powers: Iterable[tuple[str, int]]) -> Floats | float:
    product: Floats | float = 1.0
    for axis, power in powers:
        if power > _MOST_FACTORS:
            product = product * columns[axis] ** float(power)
            continue
        for _ in range(power):
            product = product * columns[axis]
    return product


class Sums:
    """Sums of one step, to be evaluated together.

    Terms are added one by one instead of by a matrix product, whose rounding depends on the number
    of meshes: a mesh must have the same price alone and among others.
    """

    def __init__(self, formulas: Formulas, sums: Sequence[Sum]) -> None:
        longest = max((len(total) for total in sums), default=0)
        self._columns: Indices = np.zeros((longest, len(sums)), np.intp)
        self._coefficients: Floats = np.zeros((longest, len(sums)))
        for place, total in enumerate(sums):
            for term, one in enumerate(total):
                self._columns[term, place] = formulas.number(one.powers)
                self._coefficients[term, place] = one.coefficient

    def at(self, values: Floats) -> Floats:
        """Evaluates the sums, [sums, meshes], from `Formulas.values`."""
        total = np.zeros((self._columns.shape[1], values.shape[1]))
        for columns, coefficients in zip(self._columns, self._coefficients, strict=True):
            total += coefficients[:, None] * values[columns]
        return total


def added(*sums: Sum) -> Sum:
    """Adds several sums, with one monomial for each distinct product of powers."""
    total: dict[Powers, float] = {}
    for one in sums:
        for term in one:
            total[term.powers] = total.get(term.powers, 0.0) + term.coefficient
    return tuple(Monomial(coefficient=value, powers=powers) for powers, value in total.items())
