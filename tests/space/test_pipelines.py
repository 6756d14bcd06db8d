"""Pipelines in the search space: which schedules and microbatches are legal, and why not others."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError
from automesh.pipeline import SCHEDULES, find_refusal, make_schedule
from automesh.space.legal import Enumeration, find_legal
from automesh.space.pipelines import numbers_of
from automesh.space.settings import StepFacts
from automesh.space.space import AxisRange, Constraint, Knob, SearchSpace
from automesh.space.spec import read_space

AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
STEP = StepFacts(
    facts=(("batch", 48), ("d_model", 64), ("num_kv_heads", 4), ("num_layers", 4)),
    used_axes=AXES,
    knobs=(("remat", "full"), ("microbatches", 1), ("schedule", "1f1b"), ("virtual_stages", 1)),
)


def enumerated(**knobs: tuple[int | str, ...]) -> Enumeration:
    space = SearchSpace(
        name="mine.toml",
        shipped=False,
        names=AXES,
        axes=(AxisRange(name="pp"), AxisRange(name="dp")),
        constraints=(
            Constraint(factors=("pp", "virtual_stages"), relation="divides", bound="num_layers"),
        ),
        knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items()),
    )
    return find_legal(space, STEP, num_devices=4, platform="cpu")


def test_all_knobs_of_pipelines_are_usual_where_there_is_none() -> None:
    found = enumerated(schedule=("gpipe", "1f1b"), virtual_stages=(2, 1), microbatches=(4, 8))
    alone = [dict(plan.knobs) for plan in found.legal if plan.sizes["pp"] == 1]
    assert {(one["schedule"], one["virtual_stages"]) for one in alone} == {("1f1b", 1)}
    assert {one["microbatches"] for one in alone} == {4, 8}


def test_the_first_value_stands_where_the_default_is_not_searched() -> None:
    found = enumerated(schedule=("gpipe", "zb_h1"), microbatches=(4,))
    alone = [dict(plan.knobs)["schedule"] for plan in found.legal if plan.sizes["pp"] == 1]
    assert alone == ["gpipe"]


def test_what_a_schedule_cannot_do_is_ruled_out_with_its_reason() -> None:
    found = enumerated(schedule=("1f1b", "zb_h1"), microbatches=(2, 4))
    plans = {
        (plan.sizes["pp"], dict(plan.knobs)["schedule"], dict(plan.knobs)["microbatches"])
        for plan in found.legal
    }
    assert (4, "zb_h1", 4) in plans
    assert (4, "zb_h1", 2) not in plans
    assert (2, "zb_h1", 2) in plans
    (why,) = [one for one in found.rejections if one.rule == "schedule for pp and microbatches"]
    assert why.detail == "`zb_h1` needs at least 4 microbatches for 4 ranks, got 2"
    assert [one.rule for one in found.reasons_against(why.example)] == [why.rule]


def test_several_stages_per_rank_are_for_schedules_that_take_them() -> None:
    found = enumerated(schedule=("1f1b", "interleaved"), microbatches=(4,), virtual_stages=(1, 2))
    dealt = [dict(plan.knobs) for plan in found.legal if dict(plan.knobs)["virtual_stages"] == 2]
    assert {one["schedule"] for one in dealt} == {"interleaved"}
    assert all(plan.sizes["pp"] * 2 <= 4 for plan in found.legal if plan.knobs[2][1] == 2)


def test_a_knob_called_schedule_may_be_of_another_kind() -> None:
    knobs = (("microbatches", 1), ("schedule", "cosine"))
    space = SearchSpace(
        name="mine.toml",
        shipped=False,
        names=AXES,
        axes=(AxisRange(name="pp"), AxisRange(name="dp")),
        knobs=(Knob(name="schedule", values=("cosine", "linear")),),
    )
    step = dataclasses.replace(STEP, knobs=knobs)
    found = find_legal(space, step, num_devices=4, platform="cpu")
    assert len(found.legal) == 6
    assert numbers_of(knobs) == {"microbatches": 1}


@pytest.mark.parametrize("name", ["dense_lm_pipeline", "moe_lm_pipeline"])
def test_shipped_spaces_have_the_pipeline_in_front_and_the_default_axes(name: str) -> None:
    space = read_space(name)
    assert space.names == AXES
    assert space.axes[0] == AxisRange(name="pp", maximum=16, dcn=True)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 12) | st.none(),
)
def test_a_schedule_is_refused_just_where_it_cannot_be_made(
    name: str, ranks: int, microbatches: int, stages: int | None
) -> None:
    why = find_refusal(name, num_ranks=ranks, num_microbatches=microbatches, num_stages=stages)
    try:
        make_schedule(name, num_ranks=ranks, num_microbatches=microbatches, num_stages=stages)
    except UsageError as error:
        assert why == error.message
    else:
        assert why == ""
