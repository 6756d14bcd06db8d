"""How one kind of program depends on the sizes of its mesh, and where that was checked (jax)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from automesh.sharding.lowerings import Lowering
from automesh.sharding.size_dependence import Fit, Sample


@dataclass(slots=True, kw_only=True)
class Law:
    """The law of one kind of program at all sizes, as far as it was checked.

    Attributes:
      fit: of its numbers.
      rigid: axes at whose other sizes the program is of another kind.
      leaned_on: lowerings between those from which the fit was learnt: it must explain them.
      held: per axis, the largest size at which the fit held.
      limited: axes for which it did not hold at a larger size.
      refused: smallest size that the user's code refuses.
    """

    fit: Fit
    rigid: set[str] = field(default_factory=set[str])
    leaned_on: list[Lowering] = field(default_factory=list[Lowering])
    held: dict[str, int] = field(default_factory=dict[str, int])
    limited: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])

    def changed(self, lowering: Lowering) -> list[str]:
        """Returns the axes whose sizes differ from the base of the fit."""
        return changed_axes(self.fit.base.sizes, lowering.sizes)

    def knows(self, lowering: Lowering) -> bool:
        """Whether the fit covers all axes of a lowering."""
        return all(map(self.fit.knows, self.changed(lowering)))

    def explains(self, lowering: Lowering) -> bool:
        """Whether the fit gives exactly the numbers of a lowering."""
        return self.knows(lowering) and self.fit.holds(lowering.sample)


def steps_to_learn_from(
    law: Law,
    axis: str,
    alike: Sequence[Lowering],
    active: Sequence[str],
    largest: Mapping[str, int],
) -> tuple[int, ...]:
    """Returns sizes of an axis from which its law may be learnt, in the order of trial.

    Args:
      alike: lowerings of this kind of program whose axes the law will know.
    """
    base = law.fit.base.sizes
    double = 2 * base[axis]
    more = [one for one in alike if one.sizes[axis] > base[axis]]
    known = [one.sizes[axis] for one in more if law.changed(one) == [axis]]
    most = max(known, default=largest_in_reach(base, axis, largest) if axis in active else double)
    is_between = any(one.sizes[axis] < most for one in more)
    return (most, double) if is_between and most > double else (double,)


def largest_in_reach(sizes: Mapping[str, int], axis: str, largest: Mapping[str, int]) -> int:
    """Returns the largest wanted size of an axis that the devices allow, at these other sizes."""
    room = len(jax.devices()) // math.prod(sizes.values())
    most = sizes[axis] * 2 ** (max(1, room).bit_length() - 1)
    return min(most, largest.get(axis, most))


def most_axes_first(sample: Sample) -> tuple[object, ...]:
    """Returns a sort key: more axes first, then smaller sizes, whose multiples the devices
    allow."""
    sizes = [size for _, size in sorted(sample.sizes.items())]
    return -sum(size > 1 for size in sizes), math.prod(sizes), sizes


def changed_axes(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    return [axis for axis, size in other.items() if size != one[axis]]
