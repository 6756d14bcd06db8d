"""A pipeline's step drawn in time lasts as long as its price, and nothing in it overlaps."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.pipeline.step import (
    BUBBLE,
    STAYS,
    Move,
    PipelineWork,
    Spent,
    StageMemory,
    price_pipeline,
)
from automesh.cost.pipeline.timeline import draw_pipeline
from automesh.cost.replay.trace import trace_json
from automesh.pipeline import make_schedule
from automesh.pipeline.actions import KIND_WORDS, ActionKind

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zb_h1", "zb_h2")


def spent(seconds: float, cause: str = "compute") -> Spent:
    return Spent(step_s=seconds, lower_s=seconds, upper_s=seconds, causes=((cause, seconds),))


def work(stages: int, seconds: list[float], sent_s: float, finish_s: list[float]) -> PipelineWork:
    programs: dict[tuple[int, ActionKind], Spent] = {
        (stage, kind): spent(seconds[(stage + place) % len(seconds)])
        for stage in range(stages)
        for place, kind in enumerate(KIND_WORDS)
    }
    move = Move(seconds=sent_s, cause="dcn pp")
    return PipelineWork(
        programs=programs,
        to_next=[*[move] * (stages - 1), STAYS],
        to_previous=[STAYS, *[move] * (stages - 1)],
        memory=[StageMemory(lasting=1, activation=1, working=1)] * stages,
        finish=[spent(finish_s[stage % len(finish_s)], "memory") for stage in range(stages)],
    )


TIMES = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=5)


@given(st.sampled_from(NAMES), st.integers(2, 4), TIMES, st.integers(0, 3), TIMES)
@settings(max_examples=80, deadline=None)
def test_a_timeline_is_what_was_priced(
    name: str, ranks: int, seconds: list[float], sent_s: int, finish_s: list[float]
) -> None:
    stages = 2 * ranks if name == "interleaved" else ranks
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=8, num_stages=stages)
    each = work(stages, seconds, float(sent_s), finish_s)
    cost, drawn = price_pipeline(schedule, each), draw_pipeline(schedule, each)
    assert drawn.step_s == pytest.approx(cost.step_s)
    ends = [one.start_s + one.seconds for one in drawn.slices]
    assert max(ends, default=0.0) <= drawn.step_s + 1e-9
    for track in drawn.tracks:
        along = [one for one in drawn.slices if one.track == track]
        for one, following in pairwise(along):
            assert one.start_s + one.seconds <= following.start_s + 1e-9
    for rank in range(ranks):
        mine = [one for one in drawn.slices if one.track == f"rank {rank}"]
        worked = sum(one.seconds for one in mine if one.kind == "work")
        times = [each.programs[one.stage, one.kind].step_s for one in schedule.ranks[rank]]
        own = [stage for stage, home in enumerate(schedule.homes) if home == rank]
        assert worked == pytest.approx(sum(times) + sum(each.finish[one].step_s for one in own))
        # What it does and what it waits for are the whole step, to its end.
        assert sum(one.seconds for one in mine) == pytest.approx(drawn.step_s)


def test_what_is_drawn_of_two_ranks() -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    drawn = draw_pipeline(schedule, work(2, [1.0], 0.5, [2.0, 1.0]))
    assert drawn.tracks == ("rank 0", "rank 1", "dcn pp 0 to 1", "dcn pp 1 to 0")
    second = [one for one in drawn.slices if one.track == "rank 1"]
    assert [(one.kind, one.name, one.start_s, one.seconds) for one in second] == [
        ("wait", "waits to begin F0@1", 0.0, 1.5),
        ("work", "F0@1", 1.5, 1.0),
        ("work", "F1@1", 2.5, 1.0),
        ("work", "B0@1", 3.5, 1.0),
        ("work", "B1@1", 4.5, 1.0),
        ("wait", "waits for the other ranks", 5.5, 1.5),
        ("work", "update", 7.0, 1.0),
        ("wait", "waits for the other ranks", 8.0, 1.0),
    ]
    assert second[0].cause == BUBBLE
    assert second[1].source == "forward of microbatch 0 on stage 1"
    sent = [one for one in drawn.slices if one.track == "dcn pp 1 to 0"]
    assert [(one.name, one.start_s, one.seconds) for one in sent] == [
        ("B0@1", 4.5, 0.5),
        ("B1@1", 5.5, 0.5),
    ]
    assert drawn.step_s == 9.0


def test_the_trace_has_the_ranks_in_order() -> None:
    schedule = make_schedule("1f1b", num_ranks=12, num_microbatches=12)
    drawn = draw_pipeline(schedule, work(12, [1.0], 0.5, [1.0]))
    assert drawn.tracks[:12] == tuple(f"rank {rank}" for rank in range(12))
    events = json.loads(trace_json(drawn, name="a plan"))["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "thread_name"][2] == "rank 2"
    assert {one["ph"] for one in events} == {"M", "X"}
