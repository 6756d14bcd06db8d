"""The input of the replay engine: core work and transfers in ticks, without HLO and hardware.

All times are whole ticks, so that sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

TICKS_PER_S = 10**15
# Names of the resources that the engine treats in its own way.
CORE, MEMORY = "core", "hbm"
# Causes of seconds that the engine itself sets.
LATENCY, MEMORY_CAUSE = "latency", "memory"


def ticks(seconds: float) -> int:
    """Converts seconds to whole ticks, rounded."""
    return round(seconds * TICKS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWork:
    """One piece of work of the core, which does them in order.

    Attributes:
      name: for the timeline.
      causes: (cause, ticks): time of the core by cause.
      memory: ticks that the device's memory is busy with it; at most the core's ticks.
      serial: ticks if the core computes and reads in turn; at least the core's ticks.
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
    """The use of one resource by a flight.

    Attributes:
      ticks: that the resource is busy with it.
      cause: cause of waits for it.
      tail: ticks that the flight still needs elsewhere after this resource.
      tail_cause: cause of waits for the tail.
    """

    resource: str
    ticks: int
    cause: str
    tail: int = 0
    tail_cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A transfer that runs asynchronously to the core.

    Attributes:
      latency: ticks between the end of all uses and the arrival.
      uses: of wires, each served in the order of departures.
      memory: ticks of a copy within the device's memory, where the core's own reads and writes have
        priority; such a copy has neither latency nor uses.
      alone: (cause, ticks) of a flight that waits for no other; they sum to its time.
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
    """Starts a flight and appends it to a lane."""

    flight: Flight
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Waits for the first flight in a lane and removes it; does nothing on an empty lane."""

    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Plays steps again and again."""

    name: str
    trips: int
    body: tuple[Step, ...]
    source: str = ""


Step = CoreWork | Depart | Await | Repeat
