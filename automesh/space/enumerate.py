"""Enumerates all factorizations of the devices into axes, over ICI and DCN, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from automesh.errors import UsageError
from automesh.mesh.plan_arrays import Batch, Sizes
from automesh.space.space import AxisRange

MAX_MESHES = 4_000_000


def enumerate_meshes(
    axes: Sequence[AxisRange], *, num_devices: int, num_granules: int = 1
) -> Batch:
    """Lists every way to give all devices to the axes, before any rule.

    ICI sizes multiply to the devices in a granule; DCN sizes multiply to the granules, over the
    axes with `dcn`. Order: by total sizes, the first axis largest first, then in the same way by
    DCN sizes.

    Raises:
      UsageError: no devices, granules that do not divide the devices, several granules and no axis
        with `dcn`, or more than `MAX_MESHES` meshes.
    """
    if num_devices < 1 or num_granules < 1 or num_devices % num_granules:
        raise UsageError(f"{num_devices} devices in {num_granules} granules cannot form a mesh")
    capable = [index for index, axis in enumerate(axes) if axis.dcn]
    if num_granules > 1 and not capable:
        raise UsageError(
            f"there are {num_granules} granules (slices or nodes), but no axis may span them",
            hint="give an axis of the search space `dcn = true`",
        )
    inside = num_devices // num_granules
    count = count_factorizations(inside, len(axes))
    count *= count_factorizations(num_granules, len(capable))
    if count > MAX_MESHES:
        raise UsageError(
            f"{num_devices} devices over {len(axes)} axes make {count} meshes, "
            f"more than the {MAX_MESHES} that can be listed",
            hint="take axes out of the search space",
        )
    over_ici = factorizations(inside, len(axes))
    over_dcn = np.ones((count_factorizations(num_granules, len(capable)), len(axes)), np.int64)
    over_dcn[:, capable] = factorizations(num_granules, len(capable))
    ici = np.repeat(over_ici, len(over_dcn), axis=0)
    dcn = np.tile(over_dcn, (len(over_ici), 1))
    order = np.lexsort((-np.hstack([ici * dcn, dcn])).T[::-1])
    return Batch(names=tuple(axis.name for axis in axes), ici=ici[order], dcn=dcn[order])


def factorizations(total: int, parts: int) -> Sizes:
    """Lists all ordered ways to write `total` as a product of `parts` factors: [ways, parts].

    >>> factorizations(4, 2).tolist()
    [[4, 1], [2, 2], [1, 4]]
    """
    table = np.ones((1, parts), np.int64)
    for prime, exponent in prime_exponents(total):
        powers = prime ** np.array(_compositions(exponent, parts), np.int64).reshape(-1, parts)
        table = (table[:, None, :] * powers[None, :, :]).reshape(-1, parts)
    return table


def count_factorizations(total: int, parts: int) -> int:
    """Counts the rows of `factorizations` without making them.

    An exponent e falls on n parts in C(e+n-1, n-1) ways, each prime on its own.
    """
    if parts == 0:
        return 1 if total == 1 else 0
    return math.prod(
        math.comb(exponent + parts - 1, parts - 1) for _, exponent in prime_exponents(total)
    )


def prime_exponents(number: int) -> list[tuple[int, int]]:
    """Returns the prime factorization of a positive integer.

    >>> prime_exponents(96)
    [(2, 5), (3, 1)]
    """
    found: list[tuple[int, int]] = []
    divisor = 2
    while divisor * divisor <= number:
        exponent = 0
        while number % divisor == 0:
            number //= divisor
            exponent += 1
        if exponent:
            found.append((divisor, exponent))
        divisor += 1
    return [*found, (number, 1)] if number > 1 else found


def _compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Lists all ways to write `total` as an ordered sum of `parts` non-negative integers, large
    first."""
    if parts == 0:
        return [()] if total == 0 else []
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(total, -1, -1)
        for rest in _compositions(total - first, parts - 1)
    ]
