"""What workers that propagate have lowered, passed on to those that lower the same step (no jax).

A worker tells what a lowering says about other meshes, and what it lowers next. The parent keeps
that per call of `build`, in the order in which it came, and does not look into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from automesh.mesh.axes import Call
from automesh.worker.messages import LOWERINGS

_Record = Mapping[str, Any]


@dataclass(slots=True)
class SharedLowerings:
    """Of one search.

    Attributes:
      records: per call, what was lowered.
      states: per call, "open", "alike" or "varied", as the last worker that spoke of it said.
      claims: what each job that runs lowers now.
    """

    records: dict[Call, list[_Record]] = field(default_factory=dict[Call, list[_Record]])
    states: dict[Call, str] = field(default_factory=dict[Call, str])
    claims: dict[Listener, tuple[Call, _Record]] = field(
        default_factory=dict["Listener", tuple[Call, _Record]]
    )

    def listener(self, call: Call) -> Listener:
        """Takes the events of one job that propagates a step with this mapping and these knobs."""
        return Listener(shared=self, call=call)

    def is_alike_elsewhere(self, call: Call) -> bool:
        """Whether the step is alike on its meshes with other knobs, and varied with none."""
        states = {other: state for other, state in self.states.items() if other != call}
        return "alike" in states.values() and "varied" not in self.states.values()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listener:
    """Answers the events of one job."""

    shared: SharedLowerings
    call: Call

    def __call__(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """What others have lowered that this worker has not heard of, and what they lower now."""
        if event.get("event") != LOWERINGS:
            return None
        shared = self.shared
        records = shared.records.setdefault(self.call, [])
        known = records[int(event["heard"]) :]
        records += event["new"]
        shared.states[self.call] = str(event["state"])
        self.close()
        claimed = [sizes for call, sizes in shared.claims.values() if call == self.call]
        if event["claim"] is not None:
            shared.claims[self] = (self.call, event["claim"])
        return {
            "known": known,
            "heard": len(records),
            "claimed": claimed,
            "alike": shared.is_alike_elsewhere(self.call),
        }

    def close(self) -> None:
        """Forgets what the job was lowering."""
        self.shared.claims.pop(self, None)
