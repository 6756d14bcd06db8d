"""The simulator: hand-computed steps, what holds for every step, and a second way to compute it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError, WrongType
from automesh.pipeline import (
    Action,
    Schedule,
    Simulated,
    StageCost,
    find_makespans,
    make_schedule,
    parse_schedule,
    simulate,
    steady_step_s,
)
from tests.pipeline.test_check import some_schedules

# Integers, so that sums are exact in any order.
SECONDS = st.integers(0, 5).map(float)
COSTS = st.builds(
    StageCost,
    forward_s=SECONDS,
    backward_s=SECONDS,
    input_gradient_s=SECONDS,
    weight_gradient_s=SECONDS,
    to_next_s=SECONDS,
    to_previous_s=SECONDS,
    activation_bytes=st.integers(0, 9),
)


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, list[StageCost]]:
    schedule = draw(some_schedules())
    size = schedule.num_stages
    return schedule, draw(st.lists(COSTS, min_size=size, max_size=size))


def times_of(simulated: Simulated, rank: int) -> list[tuple[float, float]]:
    return [(one.start_s, one.end_s) for one in simulated.spans[rank]]


def test_two_ranks_with_transfers() -> None:
    # F 2 s, B 3 s; activations take 1 s to go up, gradients 2 s to come down.
    cost = StageCost(forward_s=2, backward_s=3, to_next_s=1, to_previous_s=2)
    simulated = simulate(make_schedule("1f1b", num_ranks=2, num_microbatches=2), cost)
    assert times_of(simulated, 0) == [(0, 2), (2, 4), (10, 13), (15, 18)]
    assert times_of(simulated, 1) == [(3, 5), (5, 8), (8, 10), (10, 13)]
    assert [(str(one.action), one.start_s, one.end_s) for one in simulated.transfers] == [
        ("F0@0", 2, 3),
        ("F1@0", 4, 5),
        ("B0@1", 8, 10),
        ("B1@1", 13, 15),
    ]
    assert simulated.makespan_s == 18
    assert simulated.busy_s == (10, 10)
    assert simulated.bubble == pytest.approx(1 - 20 / 36)


def test_a_link_carries_one_transfer_at_a_time() -> None:
    # Three results in a row, a second each, over a link that takes 3 s for one.
    cost = StageCost(forward_s=1, to_next_s=3)
    simulated = simulate(make_schedule("gpipe", num_ranks=2, num_microbatches=3), cost)
    assert [(one.start_s, one.end_s) for one in simulated.transfers] == [(1, 4), (4, 7), (7, 10)]
    assert times_of(simulated, 1)[:3] == [(4, 5), (7, 8), (10, 11)]


def test_directions_do_not_meet_and_stages_of_one_rank_need_no_link() -> None:
    # A folded pipeline: rank 1 has the stages 1 and 2.
    schedule = parse_schedule(["F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1"])
    cost = StageCost(to_next_s=1, to_previous_s=1)
    simulated = simulate(schedule, cost)
    assert [(one.from_rank, one.to_rank) for one in simulated.transfers] == [
        (0, 1),
        (1, 0),
        (0, 1),
        (1, 0),
    ]
    assert simulated.makespan_s == 4 * 1 + 4 * 2 + 4 * 1


def test_stages_of_different_cost() -> None:
    # The slow second stage is never idle between its first and last action.
    slow = StageCost(forward_s=2, backward_s=4)
    simulated = simulate(
        make_schedule("1f1b", num_ranks=2, num_microbatches=3), [StageCost(), slow]
    )
    assert times_of(simulated, 1) == [(1, 3), (3, 7), (7, 9), (9, 13), (13, 15), (15, 19)]
    assert simulated.makespan_s == 19 + 2


def test_what_is_held_over_time() -> None:
    cost = StageCost(activation_bytes=10)
    simulated = simulate(make_schedule("1f1b", num_ranks=2, num_microbatches=2), cost)
    held = [(one.at_s, one.activations, one.activation_bytes) for one in simulated.held[0]]
    assert held == [(0, 1, 10), (1, 2, 20), (6, 1, 10), (9, 0, 0)]
    assert simulated.peak_live == (2, 1)
    assert simulated.peak_bytes == (20, 10)


def test_an_input_gradient_frees_nothing() -> None:
    simulated = simulate(parse_schedule(["F0 I0 F1 I1 W0 W1"]))
    assert [one.activations for one in simulated.held[0]] == [1, 2, 1, 0]
    assert [one.at_s for one in simulated.held[0]] == [0, 2, 5, 6]


def test_bytes_of_different_stages_add_up() -> None:
    costs = [StageCost(activation_bytes=size) for size in (1, 10, 100, 1000)]
    schedule = make_schedule("interleaved", num_ranks=2, num_microbatches=2, num_stages=4)
    assert simulate(schedule, costs).peak_bytes == (2 * 101, 2 * 10 + 1000)


def test_a_step_without_duration() -> None:
    simulated = simulate(
        make_schedule("gpipe", num_ranks=2, num_microbatches=2),
        StageCost(forward_s=0, backward_s=0),
    )
    assert (simulated.makespan_s, simulated.bubble) == (0, 0)


def relaxed(schedule: Schedule, costs: Sequence[StageCost]) -> dict[Action, tuple[float, float]]:
    """The same times by another way: bounds are raised, in any order, until none is broken."""
    home = {one: rank for rank, actions in enumerate(schedule.ranks) for one in actions}
    free = dict.fromkeys(home, 0.0)

    def lasting(one: Action) -> float:
        return costs[one.stage].seconds(one.kind)

    def crossing(one: Action) -> tuple[int, float] | None:
        """The rank that a result is sent to, and for how long."""
        ahead = one.stage + (1 if one.kind == "F" else -1)
        if one.kind == "W" or not 0 <= ahead < schedule.num_stages:
            return None
        cost = costs[one.stage]
        seconds = cost.to_next_s if one.kind == "F" else cost.to_previous_s
        return None if schedule.homes[ahead] == home[one] else (schedule.homes[ahead], seconds)

    def arrivals() -> dict[Action, float]:
        there: dict[Action, float] = {}
        for actions in schedule.ranks:
            link: dict[int, float] = {}
            for one in actions:
                end, sent = free[one] + lasting(one), crossing(one)
                there[one] = end
                if sent:
                    target, seconds = sent
                    there[one] = link[target] = max(end, link.get(target, 0.0)) + seconds
        return there

    while True:
        there, before = arrivals(), dict(free)
        for actions in schedule.ranks:
            for previous, one in zip((None, *actions), actions):
                bounds = [
                    free[need] + lasting(need) if home[need] == home[one] else there[need]
                    for need in schedule.needs[one]
                ]
                bounds += [free[previous] + lasting(previous)] if previous else []
                free[one] = max([0.0, *bounds])
        if free == before:
            return {one: (start, start + lasting(one)) for one, start in free.items()}


@settings(max_examples=40, deadline=None)
@given(priced())
def test_a_second_way_gives_the_same_times(case: tuple[Schedule, list[StageCost]]) -> None:
    schedule, costs = case
    expected = relaxed(schedule, costs)
    for spans in simulate(schedule, costs).spans:
        for one in spans:
            assert (one.start_s, one.end_s) == expected[one.action]


@settings(max_examples=40, deadline=None)
@given(priced())
def test_bounds(case: tuple[Schedule, list[StageCost]]) -> None:
    schedule, costs = case
    simulated = simulate(schedule, costs)
    work = [costs[action.stage].seconds(action.kind) for _, action in schedule.order]
    sent = sum(one.end_s - one.start_s for one in simulated.transfers)
    assert max(simulated.busy_s) <= simulated.makespan_s <= sum(work) + sent
    assert 0 <= simulated.bubble < 1
    assert sum(simulated.busy_s) == sum(work)
    for held in simulated.held:
        assert [one.at_s for one in held] == sorted(one.at_s for one in held)
        assert (held[-1].activations, held[-1].activation_bytes) == (0, 0)
    for link in {(one.from_rank, one.to_rank) for one in simulated.transfers}:
        over = [one for one in simulated.transfers if (one.from_rank, one.to_rank) == link]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(over))


@settings(max_examples=40, deadline=None)
@given(priced(), st.data())
def test_nothing_gets_slower_when_something_gets_faster(
    case: tuple[Schedule, list[StageCost]], data: st.DataObject
) -> None:
    schedule, costs = case
    stage = data.draw(st.integers(0, len(costs) - 1))
    fields = ("forward_s", "backward_s", "input_gradient_s", "weight_gradient_s", "to_next_s")
    field = data.draw(st.sampled_from((*fields, "to_previous_s")))
    faster = [*costs]
    faster[stage] = replace(costs[stage], **{field: getattr(costs[stage], field) / 2})
    slow, fast = simulate(schedule, costs), simulate(schedule, faster)
    for before, after in zip(slow.spans, fast.spans):
        assert all(b.end_s <= a.end_s for a, b in zip(before, after))
    assert steady_step_s(schedule, faster) <= steady_step_s(schedule, costs) + 1e-9


@settings(max_examples=30, deadline=None)
@given(priced(), st.data())
def test_many_costs_at_a_time_are_each_as_alone(
    case: tuple[Schedule, list[StageCost]], data: st.DataObject
) -> None:
    schedule, costs = case
    sets = [costs, *(data.draw(st.lists(st.permutations(costs), max_size=3)))]
    alone = [simulate(schedule, one).makespan_s for one in sets]
    assert find_makespans(schedule, sets).tolist() == alone


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), SECONDS, SECONDS)
def test_closed_form_of_whole_backwards(p: int, m: int, forward: float, backward: float) -> None:
    cost = StageCost(forward_s=forward, backward_s=backward)
    for name in ("gpipe", "1f1b", "eager_1f1b", "wavefront"):
        simulated = simulate(make_schedule(name, num_ranks=p, num_microbatches=m), cost)
        assert simulated.makespan_s == (m + p - 1) * (forward + backward)


def test_recomputing_twice_can_make_zero_bubble_lose() -> None:
    # Each half recomputes the forward: 1 + 1 and 1 + 1, against 1 + 2 at once.
    cost = StageCost(backward_s=3, input_gradient_s=2, weight_gradient_s=2)
    whole, halves = (
        simulate(make_schedule(name, num_ranks=2, num_microbatches=16), cost).makespan_s
        for name in ("1f1b", "zb_h1")
    )
    assert whole == (16 + 1) * 4
    assert halves > whole


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_are_numbers(value: float) -> None:
    with pytest.raises(UsageError, match=r"to_next_s of a stage is .*at least 0"):
        StageCost(to_next_s=value)


@pytest.mark.parametrize("value", ["1", None, True])
def test_costs_are_no_other_things(value: object) -> None:
    with pytest.raises(WrongType, match="forward_s of a stage is a number, got"):
        StageCost(forward_s=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", [1.0, {"forward_s": 1.0}, [StageCost(), 2.0]])
def test_costs_are_costs(costs: object) -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(WrongType, match="what stages cost is given as `StageCost`s, got"):
        simulate(schedule, costs)  # type: ignore[arg-type]


def test_a_cost_for_every_stage() -> None:
    schedule = make_schedule("gpipe", num_ranks=4, num_microbatches=4)
    message = "3 stage costs are given for a schedule of 4 stages"
    with pytest.raises(UsageError, match=message):
        simulate(schedule, [StageCost()] * 3)
    with pytest.raises(UsageError, match=message):
        find_makespans(schedule, [[StageCost()] * 4, [StageCost()] * 3])
