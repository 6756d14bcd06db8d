"""Every schedule by name: valid, and as fast and as lean as the published closed forms."""

from __future__ import annotations

import itertools

import pytest

from automesh.errors import UsageError, WrongType
from automesh.pipeline import (
    SCHEDULES,
    Schedule,
    StageCost,
    find_makespans,
    make_schedule,
    parse_schedule,
    simulate,
    steady_step_s,
)
from tests.support.samples.schedule_closed_forms import promised_held, promised_makespan

SEVERAL = ("interleaved", "kimi_k2", "wavefront")


def held_by(schedule: Schedule) -> list[int]:
    """Of each rank the most forwards whose last backward is to come, counted from its order."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return [
        max(itertools.accumulate(change[action.kind] for action in actions))
        for actions in schedule.ranks
    ]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_is_what_the_closed_forms_say(name: str) -> None:
    v = 2 if name == "dualpipe_v" else 1
    chunk = StageCost(
        forward_s=1 / v, backward_s=2 / v, input_gradient_s=1 / v, weight_gradient_s=1 / v
    )
    for p in range(2, 9):
        for m in range(p, 33):
            if name == "dualpipe_v" and m < 2 * p:
                continue
            if name in ("interleaved", "kimi_k2") and m % (m // p):
                continue
            schedule = make_schedule(name, num_ranks=p, num_microbatches=m)
            assert (schedule.num_ranks, schedule.num_stages) == (p, p * v)
            (makespan,) = find_makespans(schedule, [[chunk] * schedule.num_stages])
            assert makespan == promised_makespan(name, p, m, v), (p, m)
            assert held_by(schedule) == promised_held(name, p, m, v), (p, m)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 8, 3), (3, 9, 4), (4, 8, 2), (4, 16, 3), (8, 32, 4)]
)
def test_several_stages_per_rank_shrink_the_bubble(name: str, p: int, m: int, v: int) -> None:
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, num_stages=p * v)
    assert schedule.homes == tuple(stage % p for stage in range(p * v))
    cost = StageCost(forward_s=1 / v, backward_s=2 / v)
    simulated = simulate(schedule, cost)
    assert simulated.makespan_s == pytest.approx(promised_makespan(name, p, m, v))
    assert list(simulated.peak_live) == held_by(schedule) == promised_held(name, p, m, v)


def test_rounds_may_be_longer_than_the_ranks() -> None:
    # m = 10 on 4 ranks: two rounds of 5.
    schedule = make_schedule("interleaved", num_ranks=4, num_microbatches=10, num_stages=8)
    assert simulate(schedule).makespan_s == 3 * (2 * 10 + 3)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 1, 3), (4, 3, 2), (5, 2, 4)])
def test_fewer_microbatches_than_ranks_go_round(p: int, m: int, v: int) -> None:
    schedule = make_schedule("interleaved", num_ranks=p, num_microbatches=m, num_stages=p * v)
    assert simulate(schedule).makespan_s == 3 * (p * v + m - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 1), (4, 3)])
def test_few_microbatches(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m)
    assert simulate(schedule).makespan_s == 3 * (m + p - 1)


def test_dualpipe_v_is_folded() -> None:
    schedule = make_schedule("dualpipe_v", num_ranks=4, num_microbatches=8)
    assert schedule.homes == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_zero_bubble_h2_has_none_between_steps_in_a_row(p: int) -> None:
    for m in (2 * p - 1, 2 * p + 3):
        h1, h2, plain = (
            make_schedule(name, num_ranks=p, num_microbatches=m)
            for name in ("zb_h1", "zb_h2", "1f1b")
        )
        assert steady_step_s(h2) == 3 * m
        assert steady_step_s(h1) == 3 * m + p - 1
        assert steady_step_s(plain) == simulate(plain).makespan_s


def test_one_schedule_is_made_once() -> None:
    one, other = (make_schedule("1f1b", num_ranks=4, num_microbatches=8) for _ in range(2))
    assert one is other
    assert hash(one) == hash(parse_schedule(str(one).splitlines(), name="1f1b"))


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("1f1f", {}, "there is no schedule `1f1f` (did you mean `1f1b`?)"),
    ("1f1b", {"num_ranks": 0}, "the number of ranks of a schedule is at least 1, got 0"),
    ("1f1b", {"num_microbatches": -3}, "the number of microbatches of a schedule is at least 1"),
    ("1f1b", {"num_stages": 8}, "`1f1b` has 1 stage per rank, which is 4 for 4 ranks, got 8"),
    ("interleaved", {"num_stages": 6}, "6 stages cannot be divided evenly over 4 ranks"),
    ("interleaved", {"num_microbatches": 9, "num_stages": 8}, "9 microbatches do not make 2 equal"),
    ("kimi_k2", {"num_microbatches": 13, "num_stages": 8}, "13 microbatches do not make 3 equal"),
    ("wavefront", {"num_microbatches": 10, "num_stages": 8}, "a multiple of 4 microbatches, got"),
    ("zb_h1", {"num_microbatches": 3}, "`zb_h1` needs at least 4 microbatches for 4 ranks, got 3"),
    ("zb_h2", {"num_microbatches": 3}, "`zb_h2` needs at least 4 microbatches for 4 ranks, got 3"),
    ("dualpipe_v", {"num_microbatches": 7}, "`dualpipe_v` needs at least 8 microbatches"),
    ("dualpipe_v", {"num_stages": 12}, "has 2 stages per rank, which is 8 for 4 ranks, got 12"),
]


@pytest.mark.parametrize(("name", "changed", "message"), WRONG)
def test_wrong_numbers_are_one_sentence(
    name: str, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_schedule(name, **{"num_ranks": 4, "num_microbatches": 8, **changed})  # type: ignore[arg-type]
    assert message in caught.value.message
    assert isinstance(caught.value, ValueError)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("value", [2.0, "4", True, None])
def test_numbers_are_ints(value: object) -> None:
    with pytest.raises(WrongType, match="the number of ranks of a schedule is an int, got"):
        make_schedule("1f1b", num_ranks=value, num_microbatches=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, 1, ["1f1b"]])
def test_names_are_strings(name: object) -> None:
    with pytest.raises(WrongType, match="a schedule is named by a string, got"):
        make_schedule(name, num_ranks=2, num_microbatches=2)  # type: ignore[arg-type]
