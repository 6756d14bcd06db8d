"""Discrete-event replay of an in-order core and asynchronous transfers. Exact, no floats.

The rules
* The core does its work in order. `Depart` hands a flight over and costs the core nothing; `Await`
  holds the core until the flight is there.
* A wire serves flights in the order in which they departed, each for its ticks, one after the
  other. A flight arrives when each of its wires has served it and the flight's tail there has
  passed, plus its latency. Alone it takes the largest of ticks + tail, plus latency.
* The memory serves the core first, copies in the order of departures with what is left.
* At the end of the program the core awaits all that is still on its way.

Why in order of departure, and not an equal share for each: a time here is a maximum of sums of
durations, so that no shorter duration can make anything later. With equal shares it can: a flight
that departs earlier, because something before it got faster, would slow down those that are on the
wire already. On one wire both rules end a busy period at the same time.

Proofs, for what the tests check
* No shorter duration makes a step slower. For wires: every time is made of earlier ones by max and
  +. For memory: a copy of which r ticks are left when work of D ticks with d of memory begins
  (d <= D) is there before the work ends if r <= D - d, and d later than it would have been
  otherwise. Wherever the core stands after the work is no earlier than its end, so that the awaited
  time is the maximum of the core's own and of (departure + all that memory serves first), again a
  maximum of sums.
* Busy <= step: the intervals in which a wire serves do not overlap, and all end before the core has
  awaited everything; memory gives the core d in D and copies the rest.
* Step <= `serial`: walk back from the end to what each moment waited for; the walk passes each work
  and each flight once, and stays there no longer than the flight alone takes. With the core's own
  time taken off, the same walk shows that waits are no longer than all flights alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from automesh.cost.replay.program import (
    CORE,
    LATENCY,
    MEMORY,
    MEMORY_CAUSE,
    TICKS_PER_S,
    Await,
    CoreWork,
    Depart,
    Flight,
    Repeat,
    Step,
    Use,
)
from automesh.cost.replay.timeline import Slice, SliceKind, Timeline

# Trips of a loop that are drawn: the second one, too, as transfers are carried into it.
DRAWN_TRIPS = 3
# Trips after which a periodic loop is expected to have repeated itself.
_LONGEST_PERIOD = 32
Totals = Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of playing a program; all times in ticks.

    Attributes:
      step: from the first tick to the arrival of all flights.
      causes: ticks by cause, which sum to `step`.
      busy: ticks by resource.
      alone: sums of `Flight.alone` over all flights.
      serial: ticks of all work and flights, one after the other.
      flops: of all work.
    """

    step: int
    causes: dict[str, int]
    busy: dict[str, int]
    alone: dict[str, int]
    serial: int
    flops: int
    timeline: Timeline


def play(program: Sequence[Step]) -> Played:
    """Plays a program from its first step to its last."""
    player = _Player()
    player.play(program)
    player.drain()
    totals = player.totals

    def by_name(kind: str) -> dict[str, int]:
        return {name: amount for (one, name), amount in totals.items() if one == kind and amount}

    return Played(
        step=player.clock,
        causes=by_name("cause"),
        busy=by_name("busy"),
        alone=by_name("alone"),
        serial=totals["serial", ""],
        flops=totals["flops", ""],
        timeline=player.timeline(),
    )


@dataclass(slots=True)
class _Service:
    """The interval in which a wire serves one flight."""

    begin: int
    end: int
    cause: str


@dataclass(slots=True)
class _Aloft:
    """A flight on its way.

    Attributes:
      arrival: tick of arrival; for a copy within memory, if the core does not use the memory
        meanwhile.
      last: the use that ends last.
    """

    flight: Flight
    number: int
    arrival: int
    last: Use | None


@dataclass(slots=True)
class _Hidden:
    """The point from which a loop's trips are not drawn."""

    since: int | None = None
    trip: int = 0


class _Player:
    def __init__(self) -> None:
        self.clock = 0
        self.totals: Totals = Counter()
        self._wires: dict[str, deque[_Service]] = {}
        self._copies: list[_Aloft] = []
        self._lanes: dict[str, deque[_Aloft]] = {}
        self._slices: list[tuple[int, Slice]] = []  # By the tick in which they begin.
        self._hidden = 0
        self._departed = 0

    def play(self, program: Sequence[Step]) -> None:
        for step in program:
            match step:
                case CoreWork():
                    self._work(step)
                case Depart():
                    self._depart(step)
                case Await():
                    lane = self._lanes.get(step.lane)
                    if lane:
                        self._await(lane.popleft())
                case Repeat():
                    self._repeat(step)

    def drain(self) -> None:
        """Awaits all flights that are still on their way."""
        left = [aloft for lane in self._lanes.values() for aloft in lane]
        self._lanes.clear()
        for aloft in sorted(left, key=lambda one: (one.arrival, one.number)):
            self._await(aloft)

    def _work(self, work: CoreWork) -> None:
        begin = self.clock
        for cause, spent in work.causes:
            if spent:
                self._draw("work", CORE, work.name, self.clock, spent, cause, -1, work.source)
                self.totals["cause", cause] += spent
                self.clock += spent
        if self._copies and work.memory:
            for copy in self._copies:
                # The core goes first, unless the copy ends before the work does anyway.
                if copy.arrival + work.memory > self.clock:
                    copy.arrival += work.memory
        self.totals["busy", CORE] += self.clock - begin
        self.totals["busy", MEMORY] += work.memory
        self.totals["serial", ""] += max(work.serial, self.clock - begin)
        self.totals["flops", ""] += work.flops

    def _depart(self, step: Depart) -> None:
        flight = step.flight
        aloft = _Aloft(flight, self._departed, self.clock, None)
        self._departed += 1
        if flight.memory:
            self._copies = [copy for copy in self._copies if copy.arrival > self.clock]
            begin = self._copies[-1].arrival if self._copies else self.clock
            aloft.arrival = begin + flight.memory
            self._copies.append(aloft)
            self.totals["busy", MEMORY] += flight.memory
            self.totals["serial", ""] += flight.memory
        for use in flight.uses:
            arrival = self._serve(use, aloft) + use.tail
            if aloft.last is None or arrival > aloft.arrival:
                aloft.arrival, aloft.last = arrival, use
        aloft.arrival += flight.latency
        for label, spent in flight.alone:
            self.totals["alone", label] += spent
        alone = max((use.ticks + use.tail for use in flight.uses), default=0)
        self.totals["serial", ""] += alone + flight.latency
        self._lanes.setdefault(step.lane, deque()).append(aloft)

    def _serve(self, use: Use, aloft: _Aloft) -> int:
        """Serves a flight on a wire; returns the tick when the wire is free again."""
        queue = self._wires.setdefault(use.resource, deque())
        while queue and queue[0].end <= self.clock:
            queue.popleft()
        begin = queue[-1].end if queue else self.clock
        queue.append(_Service(begin, begin + use.ticks, use.cause))
        self.totals["busy", use.resource] += use.ticks
        flight = aloft.flight
        self._draw(
            "transfer",
            use.resource,
            flight.name,
            begin,
            use.ticks,
            use.cause,
            aloft.number,
            flight.source,
        )
        return begin + use.ticks

    def _await(self, aloft: _Aloft) -> None:
        begin, end = self.clock, aloft.arrival
        if aloft.flight.memory:
            self._copies = [copy for copy in self._copies if copy.arrival > max(begin, end)]
        if end <= begin:
            return
        for cause, spent in reversed(self._blamed(aloft, begin, end)):
            name = f"wait for {aloft.flight.name}"
            self._draw(
                "wait", CORE, name, self.clock, spent, cause, aloft.number, aloft.flight.source
            )
            self.totals["cause", cause] += spent
            self.clock += spent

    def _blamed(self, aloft: _Aloft, begin: int, end: int) -> list[tuple[str, int]]:
        """Returns (cause, ticks) for each part of the core's wait for a flight, the latest part
        first.

        Before its turn, a flight waits for those that departed before it: the wire has served
        without a break since `begin`, as all of them had departed by then.
        """
        flight, use = aloft.flight, aloft.last
        found: list[tuple[str, int]] = []
        if flight.memory:
            return [(MEMORY_CAUSE, end - begin)]

        def blame(cause: str, most: int) -> None:
            nonlocal end
            spent = min(most, end - begin)
            if spent > 0:
                found.append((cause, spent))
                end -= spent

        blame(LATENCY, flight.latency)
        if use is None or end == begin:
            return found
        blame(use.tail_cause, use.tail)
        for service in reversed(self._wires[use.resource]):
            if service.begin < end:
                blame(service.cause, end - service.begin)
        return found

    def _repeat(self, loop: Repeat) -> None:
        """Plays trips until one begins as an earlier one did, then multiplies.

        A trip only depends on what remains of the flights and services that are active when it
        begins: if these move in time, the whole trip does, and past events do not matter. So if two
        trips begin in the same state, all trips between them repeat: clock and totals grow by
        exactly the same amounts, and active flights move along. A loop that never repeats itself is
        played to its end.
        """
        seen: dict[object, tuple[int, int, Totals]] = {}
        trip, hidden = 0, _Hidden()
        while trip < loop.trips:
            state = self._state()
            if trip == DRAWN_TRIPS or state in seen:
                self._hide(hidden, trip)
            if state in seen:
                first, clock, before = seen[state]
                times, rest = divmod(loop.trips - trip, trip - first)
                self._advance(self.clock - clock, before, times)
                trip = loop.trips - rest
                seen.clear()
            else:
                if len(seen) == _LONGEST_PERIOD:
                    del seen[next(iter(seen))]
                seen[state] = (trip, self.clock, self.totals.copy())
                self.play(loop.body)
                trip += 1
        if hidden.since is not None:
            self._hidden -= 1
            name = f"{loop.trips - hidden.trip} more trips of {loop.name}"
            spent = self.clock - hidden.since
            self._draw("repeats", CORE, name, hidden.since, spent, "", -1, loop.source)

    def _hide(self, hidden: _Hidden, trip: int) -> None:
        if hidden.since is None:
            hidden.since, hidden.trip = self.clock, trip
            self._hidden += 1

    def _state(self) -> object:
        """Returns the state that the next trip depends on, relative to the present tick."""
        now = self.clock
        lanes = [
            (name, [(id(one.flight), id(one.last), one.arrival - now) for one in lane])
            for name, lane in sorted(self._lanes.items())
            if lane
        ]
        return (
            tuple(
                (
                    name,
                    tuple(
                        (flight, last, left) if left > 0 else flight for flight, last, left in lane
                    ),
                )
                for name, lane in lanes
            ),
            tuple(
                (name, tuple((one.end - now, one.cause) for one in queue if one.end > now))
                for name, queue in sorted(self._wires.items())
            ),
            tuple(copy.arrival - now for copy in self._copies if copy.arrival > now),
        )

    def _advance(self, period: int, before: Totals, times: int) -> None:
        """Advances all times by a number of periods equal to the last one."""
        for key, amount in self.totals.items():
            self.totals[key] = amount + times * (amount - before[key])
        moved = times * period
        self.clock += moved
        for lane in self._lanes.values():
            for aloft in lane:
                aloft.arrival += moved
        for queue in self._wires.values():
            for service in queue:
                service.begin += moved
                service.end += moved

    def _draw(
        self,
        kind: SliceKind,
        track: str,
        name: str,
        begin: int,
        spent: int,
        cause: str,
        flight: int,
        source: str,
    ) -> None:
        if spent and not self._hidden:
            one = Slice(
                kind=kind,
                track=track,
                name=name,
                start_s=begin / TICKS_PER_S,
                seconds=spent / TICKS_PER_S,
                cause=cause,
                flight=flight,
                source=source,
            )
            self._slices.append((begin, one))

    def timeline(self) -> Timeline:
        """Returns the drawn slices as a timeline."""
        ordered = sorted(self._slices, key=lambda drawn: (drawn[0], drawn[1].track))
        return Timeline(step_s=self.clock / TICKS_PER_S, slices=tuple(one for _, one in ordered))
