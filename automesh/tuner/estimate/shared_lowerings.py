"""Passes lowerings of a step from one propagating worker to others with the same step (no jax).

A worker reports what a lowering implies for other meshes, and what it lowers next. The parent keeps
these records for each call of `build` in the order of arrival, and reads only the fields that it
needs. So records of a worker that user code has damaged end neither the search nor another worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import Call
from automesh.worker.messages import LOWERINGS

_Record = Mapping[str, Any]
# What is known of a call of `build`, from least to most; a worker that has just begun with the call
# knows less than others have reported.
_STATES = ("open", "alike", "varied")
# The records of a large step have tens of kilobytes, and there may be hundreds of calls.
MOST_CHARS = 64 * 2**20
_KEYS = {"text": str, "signature": str, "asked": bool, "numbers": str, "elements": str}


@dataclass(slots=True)
class SharedLowerings:
    """The lowerings of the workers of one search, by call of `build`.

    Attributes:
      records: the numbered lowerings of each call; the call used last is the last one.
      states: what workers have reported of each call.
      claims: what each running job is lowering now.
      running: number of running jobs of each call.
    """

    records: dict[Call, list[tuple[int, _Record]]] = field(
        default_factory=dict[Call, list[tuple[int, _Record]]]
    )
    states: dict[Call, str] = field(default_factory=dict[Call, str])
    claims: dict[Listener, tuple[Call, _Record]] = field(
        default_factory=dict["Listener", tuple[Call, _Record]]
    )
    running: Counter[Call] = field(default_factory=Counter[Call])
    _number: int = 0
    _chars: int = 0

    def listener(self, call: Call, *, is_isolated: bool = False) -> Listener:
        """Makes the listener for the events of a job that propagates a step with this call.

        Args:
          is_isolated: whether the job neither gets lowerings of others nor shares its own.
        """
        self.running[call] += 1
        return Listener(shared=self, call=call, is_isolated=is_isolated)

    def is_alike_elsewhere(self, call: Call) -> bool:
        """Whether the step was alike on its meshes at other knobs, and varied at none."""
        others = {state for other, state in self.states.items() if other != call}
        return "alike" in others and "varied" not in self.states.values()

    def add(self, call: Call, records: Sequence[_Record]) -> None:
        """Adds lowerings of a worker; if there are too many, drops the oldest calls without running
        jobs."""
        mine = self.records.pop(call, [])
        for record in records:
            self._number += 1
            mine.append((self._number, record))
            self._chars += _chars(record)
        self.records[call] = mine
        for other in list(self.records):
            if self._chars <= MOST_CHARS:
                break
            if not self.running[other]:
                self.forget(other)

    def forget(self, call: Call) -> None:
        """Drops the lowerings of a call."""
        for _, record in self.records.pop(call, []):
            self._chars -= _chars(record)

    def distrust(self, call: Call) -> None:
        """Drops the lowerings of a call, and the conclusions from them."""
        self.forget(call)
        self.states.pop(call, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listener:
    """Answers the events of one propagation job."""

    shared: SharedLowerings
    call: Call
    is_isolated: bool = False

    def __call__(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Returns lowerings of others that this worker does not have yet, and what they are
        lowering now."""
        if event.get("event") != LOWERINGS or self.is_isolated:
            return None
        shared = self.shared
        heard, new = event.get("heard"), event.get("new")
        last = max(0, heard) if isinstance(heard, int) else 0
        known = [one for number, one in shared.records.get(self.call, []) if number > last]
        shared.add(
            self.call, [one for one in (new if isinstance(new, list) else []) if _is_record(one)]
        )
        self._note(event.get("state"))
        shared.claims.pop(self, None)
        claimed = [sizes for call, sizes in shared.claims.values() if call == self.call]
        claim = event.get("claim")
        if isinstance(claim, dict) and _are_sizes(claim):
            shared.claims[self] = (self.call, claim)
        records = shared.records[self.call]
        return {
            "known": known,
            "heard": records[-1][0] if records else last,
            "claimed": claimed,
            "alike": shared.is_alike_elsewhere(self.call),
        }

    def _note(self, state: object) -> None:
        before = self.shared.states.get(self.call, _STATES[0])
        if state in _STATES and _STATES.index(str(state)) > _STATES.index(before):
            self.shared.states[self.call] = str(state)

    def close(self) -> None:
        """Ends the claims of the job, which has ended."""
        self.shared.claims.pop(self, None)
        self.shared.running[self.call] -= 1


def _chars(record: _Record) -> int:
    return len(record.get("numbers", "")) + len(record.get("elements", ""))


def _is_record(one: object) -> bool:
    """Whether a record has the fields that another worker reads; see
    `automesh.sharding.lowerings`."""
    if not isinstance(one, dict) or not _are_sizes(one.get("sizes")):
        return False
    if one.get("refused") is True:
        return True
    return all(isinstance(one.get(key), kind) for key, kind in _KEYS.items())


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, dict) and all(isinstance(size, int) for size in sizes.values())
