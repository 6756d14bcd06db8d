"""Concludes which meshes a step refuses from simpler meshes that it has refused.

If an array does not divide evenly, the step is lowered at exactly these sizes, since jax and the
user's code may refuse them. On many devices hundreds of meshes have the same uneven division and
differ only in others. So each uneven division is first tried with as few axes as possible. If the
step refuses it, a mesh that also has these axes and divides the same array by the same number or a
multiple of it is refused without lowering. A mesh that the step accepts says nothing about others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from automesh.mesh.axes import Call
from automesh.tuner.estimate.propagations import Need, Uneven


class _Way(NamedTuple):
    """The uneven divisions of a need, with its call of `build` and its active axes."""

    call: Call
    active: frozenset[str]
    parts: Uneven

    def includes(self, other: _Way) -> bool:
        """Whether this has all uneven divisions of the other, each by the same number or a multiple
        of it, and all of its active axes."""
        mine = dict(self.parts)
        return (
            self.call == other.call
            and self.active >= other.active
            and all(guard in mine and mine[guard] % number == 0 for guard, number in other.parts)
        )


@dataclass(slots=True)
class Refusals:
    """The uneven divisions that a step refuses.

    Attributes:
      refused: the refused divisions, each with the need that showed it and the reason.
    """

    refused: dict[_Way, tuple[Need, str]] = field(default_factory=dict[_Way, tuple[Need, str]])
    _tried: set[_Way] = field(default_factory=set[_Way])

    def next_round(self, needs: Sequence[Need]) -> tuple[list[Need], list[Need]]:
        """Splits needs into those to answer now and those that wait for their results.

        Args:
          needs: most promising first, without those that `why` refuses.

        Returns:
          Both parts in the same order. The first is empty only if there are no needs.
        """
        new = {way for need in needs if (way := _way(need)) not in self._tried and way.parts}
        by_call: dict[Call, list[_Way]] = {}
        for way in new:
            by_call.setdefault(way.call, []).append(way)
        simplest = {
            way
            for alike in by_call.values()
            for way in alike
            if not any(way.includes(one) for one in alike if one is not way)
        }
        now, later, begun = list[Need](), list[Need](), set[_Way]()
        for need in needs:
            way = _way(need)
            is_first = way in simplest and way not in begun
            (now if is_first or way not in new else later).append(need)
            begun.add(way)
        self._tried |= simplest
        return now, later

    def note(self, need: Need, reason: str) -> None:
        """Notes that the user's code refused a need, if uneven division is the only possible
        reason."""
        if need.uneven and need.is_only_uneven:
            self.refused.setdefault(_way(need), (need, reason))

    def why(self, need: Need) -> str:
        """Says why a need would be refused; empty if no known refusal implies it."""
        way = _way(need)
        for other, (shown, reason) in self.refused.items():
            if need != shown and way.includes(other):
                seen = ",".join(f"{axis}:{size}" for axis, size in shown.sizes)
                divided = {("*".join(guard.axes), number) for guard, number in other.parts}
                alike = " and ".join(
                    f"`{axes}` is a multiple of {number}" for axes, number in sorted(divided)
                )
                return f"{reason} (seen at `{seen}`; not tried here, where {alike}, too)"
        return ""


def _way(need: Need) -> _Way:
    return _Way(call=need.call, active=frozenset(need.active), parts=need.uneven)
