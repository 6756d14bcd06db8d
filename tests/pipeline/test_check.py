"""A schedule that exists can be run; what cannot be run is refused with the reason."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError, WrongType
from automesh.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    find_needs,
    make_schedule,
    parse_schedule,
    simulate,
)
from automesh.pipeline.actions import Ranks


def some_schedules() -> st.SearchStrategy[Schedule]:
    """Generated schedules, small ones."""

    def make(name: str, p: int, rounds: int, v: int) -> Schedule:
        several = name in ("interleaved", "kimi_k2", "wavefront")
        return make_schedule(
            name,
            num_ranks=p,
            num_microbatches=p * max(rounds, 2),
            num_stages=p * v if several else None,
        )

    return st.builds(
        make, st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)
    )


@settings(max_examples=40, deadline=None)
@given(some_schedules())
def test_printing_and_parsing_are_inverse(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule).splitlines(), name=schedule.name) == schedule


@settings(max_examples=40, deadline=None)
@given(some_schedules())
def test_in_the_common_order_needs_come_first(schedule: Schedule) -> None:
    seen: set[Action] = set()
    at = [0] * schedule.num_ranks
    for rank, action in schedule.order:
        assert schedule.ranks[rank][at[rank]] == action
        at[rank] += 1
        assert seen.issuperset(schedule.needs[action])
        seen.add(action)
    assert len(seen) == sum(map(len, schedule.ranks))


def can_end(ranks: Ranks) -> bool:
    """Whether the graph of needs and of the ranks' orders has no cycle, by peeling leaves."""
    after = {action: set(needs) for action, needs in find_needs(ranks).items()}
    for actions in ranks:
        for first, second in itertools.pairwise(actions):
            after[second].add(first)
    while True:
        free = {action for action, waits in after.items() if not waits}
        if not free:
            return not after
        after = {action: waits - free for action, waits in after.items() if action not in free}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_shuffled_schedule_is_refused_exactly_if_it_cannot_end(data: st.DataObject) -> None:
    ranks = [list(actions) for actions in data.draw(some_schedules()).ranks]
    for _ in range(data.draw(st.integers(1, 6))):
        actions = ranks[data.draw(st.integers(0, len(ranks) - 1))]
        here, there = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions.insert(there, actions.pop(here))
    shuffled = tuple(map(tuple, ranks))
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    if can_end(shuffled):
        made = Schedule(name="mine", num_microbatches=microbatches, ranks=shuffled)
        assert simulate(made).makespan_s > 0
    else:
        with pytest.raises(UsageError, match="the schedule can never end: rank") as caught:
            Schedule(name="mine", num_microbatches=microbatches, ranks=shuffled)
        assert "\n" not in caught.value.message


WRONG: list[tuple[list[str], str]] = [
    ([], "a schedule has at least 1 rank, got none"),
    (["F0 B0", ""], "rank 1 of 2 has nothing to do in this schedule"),
    (["F0 B0 G1"], "`G1` in the schedule of rank 0 is not an action"),
    (["F0 B-1"], "`B-1` in the schedule of rank 0 is not an action"),
    (["F0 B0 F0"], "F0@0 is in the schedule 2 times; each action is there once"),
    (["F0 F1 B0"], "stage 0 does F for microbatch 1; it must do F and B, or F, I and W"),
    (["F0 B0 I0"], "stage 0 does F and B and I for microbatch 0; it must do F and B, or"),
    (["F0 I0"], "stage 0 does F and I for microbatch 0; it must do F and B, or F, I and W"),
    (["F1 B1"], "stage 0 does nothing for microbatch 0; it must do F and B"),
    (["F0 B0", "F0 B0 F0@0"], "stage 0 is on rank 0 and, for F0@0, on rank 1; a stage has one"),
    (["F0 B0 F0@2 B0@2"], "the schedule has a stage 2 but no stage 1"),
    (
        ["B0 F0", "F0 B0"],
        "the schedule can never end: rank 0 is at B0@0, which needs F0@0 of rank 0",
    ),
    (
        ["F0 B0 F1 B1", "F0 F1 B0 B1"],
        "the schedule can never end: rank 0 is at B0@0, which needs B0@1 of rank 1; "
        "rank 1 is at F1@1, which needs F1@0 of rank 0",
    ),
]


@pytest.mark.parametrize(("lines", "message"), WRONG)
def test_what_cannot_be_run_is_refused_in_a_sentence(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_schedule(lines)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("lines", ["F0 B0", ["F0 B0", 3], None, 7])
def test_lines_are_lines(lines: object) -> None:
    with pytest.raises(WrongType, match="a schedule is given as a sequence of lines of text"):
        parse_schedule(lines)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(kind="F", microbatch=2, stage=0), "is of microbatch 2; there are 2, numbered"),
        (Action(kind="F", microbatch=0, stage=-1), "is of stage -1; stages begin at 0"),
    ],
)
def test_numbers_out_of_range(action: Action, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(name="mine", num_microbatches=2, ranks=((action,),))
    with pytest.raises(UsageError, match="a schedule has at least 1 microbatch, got 0"):
        Schedule(name="mine", num_microbatches=0, ranks=((action,),))
