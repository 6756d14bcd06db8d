"""What workers that propagate have lowered, passed on to those that lower the same step (no jax).

A worker tells what a lowering says about other meshes, and what it lowers next. The parent keeps
that per call of `build`, in the order in which it came, and reads of it only what it must: whatever
user code has done to a worker, its news end neither the search nor another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import Call
from automesh.worker.messages import LOWERINGS

_Record = Mapping[str, Any]
# What is known of a call of `build`, the more the further behind; a worker that has just turned to
# it knows less than others have said.
_STATES = ("open", "alike", "varied")
_KEYS = {"text": str, "signature": str, "asked": bool, "numbers": str, "elements": str}


@dataclass(slots=True)
class SharedLowerings:
    """Of one search.

    Attributes:
      records: per call, what was lowered.
      states: per call, what workers have said of it.
      claims: what each job that runs lowers now.
    """

    records: dict[Call, list[_Record]] = field(default_factory=dict[Call, list[_Record]])
    states: dict[Call, str] = field(default_factory=dict[Call, str])
    claims: dict[Listener, tuple[Call, _Record]] = field(
        default_factory=dict["Listener", tuple[Call, _Record]]
    )

    def listener(self, call: Call, *, is_deaf: bool = False) -> Listener:
        """Takes the events of one job that propagates a step with this mapping and these knobs.

        Args:
          is_deaf: the job shall know of nothing that others have lowered, nor they of its own.
        """
        return Listener(shared=self, call=call, is_deaf=is_deaf)

    def is_alike_elsewhere(self, call: Call) -> bool:
        """Whether the step is alike on its meshes with other knobs, and varied with none."""
        others = {state for other, state in self.states.items() if other != call}
        return "alike" in others and "varied" not in self.states.values()

    def forget(self, call: Call) -> None:
        """Drops what is known of a call: nobody asks for it, or it is not to be trusted."""
        self.records.pop(call, None)

    def distrust(self, call: Call) -> None:
        """As `forget`, and what was concluded from it."""
        self.forget(call)
        self.states.pop(call, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listener:
    """Answers the events of one job."""

    shared: SharedLowerings
    call: Call
    is_deaf: bool = False

    def __call__(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """What others have lowered that this worker has not heard of, and what they lower now."""
        if event.get("event") != LOWERINGS or self.is_deaf:
            return None
        shared = self.shared
        records = shared.records.setdefault(self.call, [])
        heard, new = event.get("heard"), event.get("new")
        # More than there are: some were dropped meanwhile.
        start = heard if isinstance(heard, int) and 0 <= heard <= len(records) else 0
        known = records[start:]
        records += [one for one in (new if isinstance(new, list) else []) if _is_record(one)]
        self._note(event.get("state"))
        self.close()
        claimed = [sizes for call, sizes in shared.claims.values() if call == self.call]
        claim = event.get("claim")
        if isinstance(claim, dict) and _are_sizes(claim):
            shared.claims[self] = (self.call, claim)
        return {
            "known": known,
            "heard": len(records),
            "claimed": claimed,
            "alike": shared.is_alike_elsewhere(self.call),
        }

    def _note(self, state: object) -> None:
        before = self.shared.states.get(self.call, _STATES[0])
        if state in _STATES and _STATES.index(str(state)) > _STATES.index(before):
            self.shared.states[self.call] = str(state)

    def close(self) -> None:
        """Forgets what the job was lowering."""
        self.shared.claims.pop(self, None)


def _is_record(one: object) -> bool:
    """Whether it has what another worker reads of it: see `automesh.sharding.lowerings`."""
    if not isinstance(one, dict) or not _are_sizes(one.get("sizes")):
        return False
    if one.get("refused") is True:
        return True
    return all(isinstance(one.get(key), kind) for key, kind in _KEYS.items())


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, dict) and all(isinstance(size, int) for size in sizes.values())
