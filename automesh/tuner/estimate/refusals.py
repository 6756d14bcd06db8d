"""Meshes that a step refuses, concluded from simpler ones that it was seen to refuse.

Where an array does not divide evenly, the step is lowered at these very sizes, since jax and the
user's code may refuse them. On many devices hundreds of meshes differ only in what else they
divide. So each way to divide unevenly is tried with as few axes as possible first. A mesh that
divides the same array by the same number, or by a multiple of it, and has these axes too, is then
refused without being lowered; what the step accepted says nothing about others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from automesh.mesh.axes import Call
from automesh.tuner.estimate.propagations import Need, Uneven


class _Way(NamedTuple):
    """What a need divides unevenly, of one call of `build` and with these axes larger than 1."""

    call: Call
    active: frozenset[str]
    parts: Uneven

    def includes(self, other: _Way) -> bool:
        """Whether all that the other divides unevenly is divided here as well, by the same number
        or a multiple of it, and all axes of the other are larger than 1 here, too."""
        mine = dict(self.parts)
        return (
            self.call == other.call
            and self.active >= other.active
            and all(guard in mine and mine[guard] % number == 0 for guard, number in other.parts)
        )


@dataclass(slots=True)
class Refusals:
    """Which ways to divide unevenly a step refuses.

    Attributes:
      refused: ways that were refused, each with the need that showed it and the reason.
    """

    refused: dict[_Way, tuple[Need, str]] = field(default_factory=dict[_Way, tuple[Need, str]])
    _tried: set[_Way] = field(default_factory=set[_Way])

    def next_round(self, needs: Sequence[Need]) -> tuple[list[Need], list[Need]]:
        """Parts needs into those to answer now and those that wait for what these show.

        Args:
          needs: most promising first; none that `why` knows of.

        Returns:
          Both in the same order. The first is empty only if there are no needs.
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
        """Takes in that the user's code refused a need, if uneven division alone sets it apart."""
        if need.uneven and need.is_only_uneven:
            self.refused.setdefault(_way(need), (need, reason))

    def why(self, need: Need) -> str:
        """Why a need would be refused, in words; empty if nothing says that it would."""
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
