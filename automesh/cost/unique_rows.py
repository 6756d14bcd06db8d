"""Finds plans that share a part of their mesh, so that the part is priced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.intp]
T = TypeVar("T")

_SMALL_TABLE = 1 << 14  # a table of so many entries is always cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The distinct values of a column, none negative.

    Attributes:
      codes: [rows] rank of each value among the distinct ones.
      found: the distinct values, ascending; may hold some that no row has.
    """

    codes: Codes
    found: Codes

    def __len__(self) -> int:
        return len(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """The distinct rows of some columns, in the order of their values.

    Attributes:
      first: [distinct] a row that has each of them.
      inverse: [rows] index of each row's distinct row.
    """

    first: Codes
    inverse: Codes

    def __len__(self) -> int:
        return len(self.first)


def distinct(columns: Sequence[NDArray[np.integer] | Ranks], rows: int) -> Distinct:
    """Finds the distinct rows.

    Args:
      columns: each [rows], none negative; none at all makes all rows equal.
    """
    key, radix = np.zeros(rows, np.intp), 1
    for column in columns:
        ranks = column if isinstance(column, Ranks) else ranked(column)
        if radix == 1:
            key = ranks.codes
        else:
            if radix * len(ranks) > _widest_table(rows):
                shorter = ranked(key, radix)
                key, radix = shorter.codes, len(shorter)
            key = key * len(ranks) + ranks.codes
        radix *= len(ranks)
    ranks = ranked(key, radix)
    first = np.zeros(len(ranks), np.intp)
    first[ranks.codes[::-1]] = np.arange(rows - 1, -1, -1)
    return Distinct(first=first, inverse=ranks.codes)


def ranked(column: NDArray[np.integer], limit: int = 0) -> Ranks:
    """Ranks the values of a column.

    Args:
      limit: above all values, if it is known.
    """
    values = np.ascontiguousarray(column, np.intp)
    if not len(values):
        return Ranks(codes=values, found=values)
    limit = limit or int(values.max()) + 1
    if limit > _widest_table(len(values)):
        found, codes = np.unique(values, return_inverse=True)
        return Ranks(codes=codes.astype(np.intp, copy=False), found=found)
    seen = np.zeros(limit, np.bool_)
    seen[values] = True
    found = np.flatnonzero(seen)
    table = np.empty(limit, np.intp)
    table[found] = np.arange(len(found))
    return Ranks(codes=table[values], found=found)


def joined(parts: Sequence[T]) -> T:
    """Concatenates dataclasses of arrays along the last dimension of every array.

    Args:
      parts: of one class, whose fields are arrays or such dataclasses; at least one.
    """
    first: Any = parts[0]
    values = {
        field.name: [getattr(part, field.name) for part in parts]
        for field in dataclasses.fields(first)
    }
    return type(first)(
        **{
            name: np.concatenate(each, axis=-1) if isinstance(each[0], np.ndarray) else joined(each)
            for name, each in values.items()
        }
    )


def products(one: Ranks, other: Ranks) -> Ranks:
    """Multiplies two columns row by row; computes only products of distinct values."""
    every = np.multiply.outer(one.found, other.found).reshape(-1)
    found, codes = np.unique(every, return_inverse=True)
    return Ranks(codes=codes[one.codes * len(other) + other.codes], found=found)


def _widest_table(rows: int) -> int:
    """Returns the largest size of a look-up table that is cheaper than sorting all rows."""
    return max(_SMALL_TABLE, 4 * rows)
