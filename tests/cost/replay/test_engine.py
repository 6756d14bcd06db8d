"""The replay's engine: hand-computed schedules, and what holds for every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.replay import engine
from automesh.cost.replay.engine import Played, play
from automesh.cost.replay.program import Await, CoreWork, Depart, Flight, Repeat, Step, Use, ticks


def work(spent: int, *, memory: int = 0, name: str = "work") -> CoreWork:
    return CoreWork(name=name, causes=(("compute", spent),), memory=memory, serial=spent + memory)


def over(wire: str, spent: int, *, latency: int = 0, name: str = "") -> Flight:
    """A flight over one wire."""
    cause = f"ici {wire}"
    return Flight(
        name=name or f"over {wire}",
        latency=latency,
        uses=(Use(resource=wire, ticks=spent, cause=cause),),
        alone=((cause, spent + latency),),
    )


def copy(spent: int) -> Flight:
    return Flight(name="copy", memory=spent)


def go(flight: Flight, lane: str = "lane") -> Depart:
    return Depart(flight=flight, lane=lane)


def wait(lane: str = "lane") -> Await:
    return Await(lane=lane)


def repeat(trips: int, *body: Step) -> Repeat:
    return Repeat(name="loop", trips=trips, body=body)


def in_order(flight: Flight) -> list[Step]:
    return [go(flight, "now"), wait("now")]


def test_two_products_and_a_gather_that_one_of_them_hides() -> None:
    # gather: 0 .. 12 on the wire, there at 14; first product 0 .. 10; the second needs both.
    gather = over("x+", 12, latency=2)
    played = play([go(gather), work(10), wait(), work(20)])
    assert played.step == 34
    assert played.causes == {"compute": 30, "ici x+": 2, "latency": 2}
    assert played.busy == {"core": 30, "x+": 12}
    assert played.alone == {"ici x+": 14}
    assert played.serial == 44
    # Hidden altogether behind a longer product.
    played = play([go(gather), work(14), wait(), work(20)])
    assert played.causes == {"compute": 34}
    # Not hidden at all.
    played = play([*in_order(gather), work(10), work(20)])
    assert played.causes == {"compute": 30, "ici x+": 12, "latency": 2}


def test_two_collectives_on_one_link_take_turns() -> None:
    # 0 .. 10 and 10 .. 17; the second arrives at 20. With equal shares the last byte leaves at 17
    # as well.
    first, second = over("x+", 10, latency=3), over("x+", 7, latency=3)
    played = play([go(first, "a"), go(second, "b"), work(4), wait("a"), wait("b")])
    assert played.step == 20
    assert played.causes == {"compute": 4, "ici x+": 6 + 4, "latency": 3 + 3}
    # On two links they do not meet.
    apart = play([go(first, "a"), go(over("x-", 7, latency=3), "b"), work(4), wait("a"), wait("b")])
    assert apart.step == 13


def test_a_wait_is_blamed_on_what_the_wire_was_busy_with() -> None:
    slow = Flight(name="slow", uses=(Use(resource="x+", ticks=10, cause="ici fsdp"),))
    quick = Flight(name="quick", uses=(Use(resource="x+", ticks=3, cause="ici tp"),))
    played = play([go(slow, "prefetch"), work(4), *in_order(quick), work(1), wait("prefetch")])
    assert played.step == 14
    assert played.causes == {"compute": 5, "ici fsdp": 6, "ici tp": 3}


def test_a_flight_over_two_wires_waits_for_the_later_one() -> None:
    both = Flight(
        name="both",
        uses=(
            Use(resource="x+", ticks=4, cause="ici dp"),
            Use(resource="y+", ticks=6, cause="ici dp"),
        ),
    )
    assert play(in_order(both)).step == 6
    # x is free at 5: x is through at 9, y at 6.
    assert play([go(over("x+", 5)), *in_order(both)]).step == 9
    # y is free at 5: 11.
    assert play([go(over("y+", 5)), *in_order(both)]).step == 11


def test_parts_in_turn_are_a_tail_of_each_other() -> None:
    # 4 inside granules, then 10 between them: 14 alone.
    hybrid = Flight(
        name="hybrid",
        latency=1,
        uses=(
            Use(resource="dcn", ticks=10, cause="dcn dp", tail=4, tail_cause="ici dp"),
            Use(resource="x+", ticks=4, cause="ici dp", tail=10, tail_cause="dcn dp"),
        ),
        alone=(("dcn dp", 11), ("ici dp", 4)),
    )
    played = play(in_order(hybrid))
    assert played.step == 15
    assert played.causes == {"dcn dp": 10, "ici dp": 4, "latency": 1}
    assert played.serial == 15
    # The link is taken for 3 more.
    played = play([go(over("x+", 3)), *in_order(hybrid)])
    assert played.step == 18
    # The network is taken for 8 more.
    assert play([go(over("dcn", 8)), *in_order(hybrid)]).step == 23


def test_prefetch_in_a_loop() -> None:
    """Each trip starts the next layer's gather, then works on this one's."""

    def layers(trips: int, gather: int) -> Played:
        body = (wait(), go(over("x+", gather, latency=1)), work(10))
        return play([go(over("x+", gather, latency=1)), repeat(trips, *body), wait()])

    # The first gather is waited for; then 10 of work hide 8; the last gather is for nobody.
    assert layers(80, 7).step == 8 + 80 * 10
    assert layers(80, 7).causes == {"compute": 800, "ici x+": 7, "latency": 1}
    # 14 are not hidden: every trip takes 15, the last arrival is awaited at the end.
    slow = layers(80, 14)
    assert slow.step == 15 + 80 * 15
    assert slow.causes == {"compute": 800, "ici x+": 14 + 80 * 4, "latency": 81}
    assert slow.busy == {"core": 800, "x+": 81 * 14}


def test_a_lane_is_empty_in_the_first_trip() -> None:
    body = (wait(), work(5), go(over("dcn", 20)))
    played = play([repeat(3, *body)])
    # 5, then 20 + 5 twice, then the last flight.
    assert played.step == 5 + 25 + 25 + 20
    assert play([wait("nobody")]).step == 0


def test_copies_give_way_to_the_core() -> None:
    # Memory: work needs 6 of the first 10, the copy has the other 4 and 3 more after it.
    played = play([go(copy(7)), work(10, memory=6), wait()])
    assert played.step == 13
    assert played.causes == {"compute": 10, "memory": 3}
    assert played.busy == {"core": 10, "hbm": 13}
    # Two copies in turn; the second is behind the first and the work.
    played = play([go(copy(2), "a"), go(copy(7), "b"), work(10, memory=6), wait("a"), wait("b")])
    assert played.step == 15
    # A copy that arrives during the work does not hold up anything.
    played = play([go(copy(4)), work(10, memory=6), wait()])
    assert played.causes == {"compute": 10}


def test_loops_within_loops_multiply() -> None:
    inner = repeat(50, go(over("x+", 4)), work(3), wait())
    played = play([repeat(40, inner, work(7))])
    assert played.step == 40 * (50 * 4 + 7)
    assert played.busy == {"core": 40 * (150 + 7), "x+": 40 * 50 * 4}


def test_a_loop_of_many_trips_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Sequence[Step]] = []
    usual: Callable[..., None] = engine._Player.play

    def counted(self: object, program: Sequence[Step]) -> None:
        played.append(program)
        usual(self, program)

    monkeypatch.setattr(engine._Player, "play", counted)
    result = play([repeat(1_000_000, go(over("x+", 4)), work(3), wait())])
    assert result.step == 4_000_000
    assert len(played) < 10


def test_a_loop_that_does_not_repeat_is_played_to_its_end() -> None:
    # Every trip leaves two ticks more on the wire.
    played = play([repeat(100, go(over("x+", 5)), work(3))])
    assert played.step == 500
    assert played.causes == {"compute": 300, "ici x+": 200}
    # A wire that falls behind by one tick a trip holds up the core from the tenth trip on.
    lag = play([go(over("x+", 1)), repeat(100, go(over("x+", 11)), work(10), wait()), wait()])
    assert lag.step == 1 + 100 * 11


def test_the_timeline_has_the_first_trips_and_says_how_many_follow() -> None:
    timeline = play([repeat(80, go(over("x+", 14)), work(10), wait())]).timeline
    assert timeline.tracks == ("core", "x+")
    repeats = [one for one in timeline.slices if one.kind == "repeats"]
    drawn = [one for one in timeline.slices if one.kind == "work"]
    assert [one.name for one in repeats] == [f"{80 - len(drawn)} more trips of loop"]
    core = sorted((one for one in timeline.slices if one.track == "core"), key=lambda s: s.start_s)
    for one, following in itertools.pairwise(core):
        assert following.start_s == pytest.approx(one.start_s + one.seconds)
    assert core[-1].start_s + core[-1].seconds == pytest.approx(timeline.step_s)
    waits = [one for one in timeline.slices if one.kind == "wait"]
    sent = {one.flight for one in timeline.slices if one.kind == "transfer"}
    assert waits
    assert all(one.flight in sent for one in waits)


def test_seconds_become_ticks() -> None:
    assert ticks(1.0) == 10**15
    assert ticks(1.5e-15) == 2
    with pytest.raises(ValueError, match="neither latency nor uses"):
        Flight(name="copy", memory=3, latency=1)
    with pytest.raises(ValueError, match="before memory has served it"):
        CoreWork(name="work", causes=(("compute", 2),), memory=3)


WIRES = ("x+", "x-", "dcn")
LANES = ("a", "b")
small = st.integers(0, 12)


@st.composite
def works(draw: st.DrawFn) -> CoreWork:
    spent = draw(small)
    return work(spent, memory=draw(st.integers(0, spent)))


@st.composite
def flights(draw: st.DrawFn) -> Flight:
    if draw(st.booleans()) and draw(st.booleans()):
        return copy(draw(st.integers(1, 12)))
    wires = draw(st.lists(st.sampled_from(WIRES), min_size=1, max_size=3, unique=True))
    uses = tuple(
        Use(
            resource=wire,
            ticks=draw(small),
            cause=f"ici {wire}",
            tail=draw(st.sampled_from((0, 0, 1, 5))),
            tail_cause="ici tail",
        )
        for wire in wires
    )
    latency = draw(st.sampled_from((0, 0, 1, 4)))
    longest = max(uses, key=lambda use: use.ticks + use.tail)
    alone = longest.ticks + longest.tail + latency
    return Flight(name="flight", latency=latency, uses=uses, alone=(("all", alone),))


departs = st.builds(Depart, flight=flights(), lane=st.sampled_from(LANES))
awaits = st.builds(Await, lane=st.sampled_from(LANES))
plain = st.one_of(works(), departs, awaits)


def loops(body: st.SearchStrategy[Step], most: int) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda trips, steps: repeat(trips, *steps),
        st.integers(0, most),
        st.lists(body, max_size=5),
    )


inner = loops(plain, 7)
programs = st.lists(st.one_of(plain, inner, loops(st.one_of(plain, inner), 4)), max_size=6)


def unrolled(program: Sequence[Step]) -> list[Step]:
    found: list[Step] = []
    for step in program:
        if isinstance(step, Repeat):
            found += unrolled(step.body) * step.trips
        else:
            found.append(step)
    return found


def changed(program: Sequence[Step], change: Callable[[Step], Step]) -> list[Step]:
    return [
        replace(step, body=tuple(changed(step.body, change)))
        if isinstance(step, Repeat)
        else change(step)
        for step in program
    ]


def halved(resource: str) -> Callable[[Step], Step]:
    """What doubling the speed of one resource does to a step; uneven ticks are rounded up."""

    def half(amount: int) -> int:
        return (amount + 1) // 2

    def change(step: Step) -> Step:
        if isinstance(step, CoreWork):
            ((cause, spent),) = step.causes
            if resource == "core":
                return replace(step, causes=((cause, max(half(spent), step.memory)),))
            return replace(step, memory=half(step.memory)) if resource == "hbm" else step
        if isinstance(step, Depart):
            flight = step.flight
            uses = tuple(
                replace(use, ticks=half(use.ticks)) if use.resource == resource else use
                for use in flight.uses
            )
            memory = half(flight.memory) if resource == "hbm" else flight.memory
            return replace(step, flight=replace(flight, uses=uses, memory=memory))
        return step

    return change


@settings(deadline=None)
@given(programs)
def test_loops_are_exact(program: list[Step]) -> None:
    short, long = play(program), play(unrolled(program))
    assert (short.step, short.causes, short.busy) == (long.step, long.causes, long.busy)
    assert (short.alone, short.serial) == (long.alone, long.serial)


@settings(deadline=None)
@given(programs)
def test_nothing_is_lost(program: list[Step]) -> None:
    played = play(program)
    assert sum(played.causes.values()) == played.step
    assert all(spent <= played.step for spent in played.busy.values())
    assert played.step <= played.serial
    waits = played.step - played.busy.get("core", 0) - played.causes.get("memory", 0)
    assert 0 <= waits <= sum(played.alone.values())


@settings(deadline=None)
@given(programs, st.sampled_from((*WIRES, "hbm", "core")))
def test_a_faster_resource_never_makes_a_step_slower(program: list[Step], resource: str) -> None:
    assert play(changed(program, halved(resource))).step <= play(program).step


@settings(deadline=None)
@given(programs, st.data())
def test_no_shorter_duration_makes_a_step_slower(program: list[Step], data: st.DataObject) -> None:
    """Each tick count shrinks by itself, latencies and tails as well."""
    flat = unrolled(program)[:40]

    def shorter(amount: int) -> int:
        return data.draw(st.integers(0, amount))

    quicker: list[Step] = []
    for step in flat:
        if isinstance(step, CoreWork):
            memory = shorter(step.memory)
            ((cause, spent),) = step.causes
            quicker.append(
                replace(step, causes=((cause, max(memory, shorter(spent))),), memory=memory)
            )
        elif isinstance(step, Depart):
            flight = step.flight
            uses = tuple(
                replace(use, ticks=shorter(use.ticks), tail=shorter(use.tail))
                for use in flight.uses
            )
            flight = replace(
                flight, uses=uses, memory=shorter(flight.memory), latency=shorter(flight.latency)
            )
            quicker.append(replace(step, flight=flight))
        else:
            quicker.append(step)
    assert play(quicker).step <= play(flat).step
