"""Linear sums of unknown values, and how often a loop over such bounds runs.

`fori_loop(n, n + 20)` runs 20 times whatever `n` is: its counter starts at `n`, its limit is `n +
20`, and the difference of the two has no `n` any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A whole number: a constant and multiples of values that are not known.

    Attributes:
      factors: by value, its factor; none is 0.
    """

    constant: int = 0
    factors: Mapping[Hashable, int] = field(default_factory=dict[Hashable, int])

    @staticmethod
    def of(value: Hashable) -> Linear:
        """Makes the sum of one unknown value."""
        return Linear(factors={value: 1})

    @property
    def number(self) -> int | None:
        """The number itself; None if it depends on something unknown."""
        return None if self.factors else self.constant

    def plus(self, other: Linear, times: int = 1) -> Linear:
        """Returns `self + times * other`."""
        factors = dict(self.factors)
        for value, factor in other.factors.items():
            factors[value] = factors.get(value, 0) + times * factor
        return Linear(
            constant=self.constant + times * other.constant,
            factors={value: factor for value, factor in factors.items() if factor},
        )

    def times(self, number: int) -> Linear:
        """Returns the product with a number."""
        return Linear().plus(self, number)


def executions(distance: int, step: int, direction: str) -> int | None:
    """Counts the executions of a loop that runs while `distance` compares to 0 as `direction` says.

    Args:
      distance: the left side of the comparison minus the right one, before the first execution.
      step: what every execution adds to it.
      direction: LT, LE, GT, GE, NE or EQ.

    Returns:
      None: it runs for ever, or the comparison is EQ.

    >>> executions(-20, 1, "LT"), executions(-20, 3, "LE"), executions(-20, 3, "NE")
    (20, 7, None)
    """
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
        direction = {"GT": "LT", "GE": "LE"}[direction]
    left = -distance + (direction == "LE")
    if direction == "NE":
        if not distance:
            return 0
        return left // step if step and left % step == 0 and left // step > 0 else None
    if direction not in ("LT", "LE"):
        return None
    if left <= 0:
        return 0
    return -(-left // step) if step > 0 else None
