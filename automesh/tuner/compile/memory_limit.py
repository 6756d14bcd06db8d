"""Decides whether a program fits the memory of a device, less the reserve (pure functions)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automesh.outcomes import Compiled, Outcome, OutOfMemory
from automesh.units import format_bytes

_PRINTED = 0.005  # compilers print their limit with two decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device.

    Outcomes are judged when they are read, not when they are stored, so that a search that is
    resumed with another reserve need not compile again.

    Attributes:
      limit_bytes: memory that a program could use; 0 if unknown.
      reserve_bytes: the part of it that plans must leave free.
    """

    limit_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Memory that a plan may use; 0 if there is no limit."""
        return max(self.limit_bytes - self.reserve_bytes, 1) if self.limit_bytes else 0

    def judged(self, outcome: Outcome) -> Outcome:
        """Returns the outcome under this reserve: a program that leaves less free does not fit."""
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
        """Makes the outcome of a program that needs more memory than there is."""
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
        """Whether the device's memory was too small, and not that of this machine."""
        if outcome.is_host:
            return False
        # A program that exceeds the compiler's limit also exceeds a lower one of the user's.
        least = (1 - _PRINTED) * self.limit_bytes
        return bool(self.limit_bytes) and outcome.limit_bytes >= least


NO_LIMIT = DeviceMemory()
