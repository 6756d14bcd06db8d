"""What the replay's engine plays: core work and transfers with their times, no HLO and no hardware.

All times are whole ticks, so that sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

TICKS_PER_S = 10**15
# Names of the resources that the engine itself knows.
CORE, MEMORY = "core", "hbm"
# Causes of seconds that it knows.
LATENCY, MEMORY_CAUSE = "latency", "memory"


def ticks(seconds: float) -> int:
    """Seconds in whole ticks, rounded."""
    return round(seconds * TICKS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the core does, one piece after the other.

    Attributes:
      name: for the timeline.
      causes: (cause, ticks): how long the core takes, and why.
      memory: ticks that the device's memory is busy with it, if it does nothing else meanwhile; at
        most what the core takes.
      serial: ticks if the core computes and reads in turn; at least what the core takes.
      flops: of matrix products.
      source: `step.py:123`; empty if unknown.
    """

    name: str
    causes: tuple[tuple[str, int], ...]
    memory: int = 0
    serial: int = 0
    flops: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.memory > sum(spent for _, spent in self.causes):
            raise ValueError(f"`{self.name}` ends before memory has served it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a flight does on one resource.

    Attributes:
      ticks: that the resource is busy with it.
      cause: what those who wait for it wait for.
      tail: ticks that the flight still needs elsewhere when this resource is through with it.
      tail_cause: what those who wait for the tail wait for.
    """

    resource: str
    ticks: int
    cause: str
    tail: int = 0
    tail_cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A transfer beside the core.

    Attributes:
      latency: ticks between the end of all uses and the arrival.
      uses: of wires, each taken in the order of departures.
      memory: ticks of a copy within the device's memory, which the core's own reads and writes go
        before; such a copy has neither latency nor uses.
      alone: (what it counts as, ticks) of a flight that meets no other; they sum to its time.
    """

    name: str
    latency: int = 0
    uses: tuple[Use, ...] = ()
    memory: int = 0
    alone: tuple[tuple[str, int], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.memory and (self.latency or self.uses):
            raise ValueError(f"`{self.name}`: a copy within memory has neither latency nor uses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Depart:
    """Starts a flight and puts it at the end of a lane."""

    flight: Flight
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Waits for the first flight in a lane and takes it out; does nothing on an empty lane."""

    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Plays steps again and again."""

    name: str
    trips: int
    body: tuple[Step, ...]
    source: str = ""


Step = Work | Depart | Await | Repeat
