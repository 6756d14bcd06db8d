"""Decides which plans and outcomes of a study a search takes over (pure functions)."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Outcome, OutOfMemory, ReplayOutcome, TimedOut

# Free memory comes and goes: only this much more is another machine, or another limit.
_MORE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The plans that a search may try, and its limits.

    A study outlives its search space: plans that were legal in another one must neither win nor be
    tried again.

    Attributes:
      plans: those that the search knows; None for all.
      timeout_s: what one job of a worker may take; 0 where nothing runs.
      worker_bytes: the memory of this machine that one worker may take; 0 where nothing runs.
      speeds: the speeds with which schedules are replayed, in words; empty where none are. Times at
        other speeds cannot be compared.
    """

    plans: frozenset[Plan] | None = None
    timeout_s: float = 0.0
    worker_bytes: int = 0
    speeds: str = ""

    def covers(self, plan: Plan) -> bool:
        """Whether a plan is one of the search's."""
        return self.plans is None or plan in self.plans

    def overcomes(self, outcome: Outcome | None) -> bool:
        """Whether an outcome has become invalid: the limit at which it failed is wider now, or it
        was priced at other speeds.

        The limit that it failed for is wider, or it was priced at other speeds.
        """
        match outcome:
            case TimedOut(limit_s=limit_s):
                return limit_s < self.timeout_s
            case OutOfMemory(is_host=True, limit_bytes=limit_bytes):
                return _MORE * limit_bytes < self.worker_bytes
            case Compiled(replay=ReplayOutcome(speeds=speeds)):
                return bool(self.speeds) and speeds != self.speeds
            case _:
                return False


EVERYTHING = Scope()
