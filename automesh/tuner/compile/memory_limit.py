"""What fits a device: its memory, less what is kept in reserve (pure functions)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automesh.outcomes import Compiled, Outcome, OutOfMemory
from automesh.units import format_bytes

_PRINTED = 0.005  # compilers print their limit with two decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device.

    Judged when outcomes are read, not when they are stored, so that a search that goes on with
    another reserve need not compile again.

    Attributes:
      limit_bytes: what a program could use; 0 where nobody says.
      reserve_bytes: of these, what is kept free.
    """

    limit_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What a plan may use; 0 where there is no limit."""
        return max(self.limit_bytes - self.reserve_bytes, 1) if self.limit_bytes else 0

    def judged(self, outcome: Outcome) -> Outcome:
        """The outcome with this reserve: a program that leaves less than that free does not fit."""
        if not self.limit_bytes:
            return outcome
        match outcome:
            case Compiled(memory=memory) if memory.peak_bytes > self.free_bytes:
                return self.refusal(memory.peak_bytes)
            case OutOfMemory() if self.is_device(outcome):
                return replace(outcome, reserve_bytes=self.reserve_bytes)
            case _:
                return outcome

    def refusal(self, needed_bytes: int) -> OutOfMemory:
        """The outcome of a program that needs more than there is."""
        has = f"which has {format_bytes(self.limit_bytes)}"
        if self.reserve_bytes:
            has += f", {format_bytes(self.reserve_bytes)} of them in reserve"
        return OutOfMemory(
            stage="compile",
            needed_bytes=needed_bytes,
            limit_bytes=self.limit_bytes,
            detail=f"the compiler needs {format_bytes(needed_bytes)} on each device, {has}",
            reserve_bytes=self.reserve_bytes,
        )

    def is_device(self, outcome: OutOfMemory) -> bool:
        """Whether it was the device's memory that did not suffice, not that of this machine."""
        if outcome.is_host:
            return False
        # What does not fit the compiler's own limit does not fit a lower one of the user's.
        least = (1 - _PRINTED) * self.limit_bytes
        return bool(self.limit_bytes) and outcome.limit_bytes >= least


NO_LIMIT = DeviceMemory()
