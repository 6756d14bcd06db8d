"""Prices of pipelines from prices of their programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.cost.pipeline.prices import price_pipeline_terms
from automesh.cost.pipeline.step import (
    STAYS,
    Move,
    PipelineWork,
    Spent,
    StageMemory,
    _held,
    price_pipeline,
    price_pipelines,
)
from automesh.cost.pipeline.terms import (
    PipelineTerms,
    ScheduleText,
    StageTerms,
    text_of_schedule,
)
from automesh.cost.pipeline.transfers import moves
from automesh.cost.terms import Kernel, Matmul, Monomial, Region, Terms
from automesh.hardware import parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.fabric.fabric import Layouts
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import MeshAxis
from automesh.mesh.plan_arrays import Batch
from automesh.pipeline import StageCost, make_schedule, parse_schedule, simulate
from automesh.pipeline.actions import ActionKind, parse_actions
from automesh.pipeline.schedule import Schedule

ABSENT = parse_target("gpu-h100-16", {}).absent
assert ABSENT is not None
FABRIC = ABSENT.fabric
SPEEDS = datasheet_speeds(FABRIC.chip, FABRIC)
ONCE = (Monomial(coefficient=1.0),)


def spent(seconds: float) -> Spent:
    return Spent(
        step_s=seconds,
        lower_s=seconds / 2,
        upper_s=2 * seconds,
        bound_s=seconds / 4,
        causes=(("compute", seconds * 0.75), ("memory", seconds * 0.25)),
    )


def work(
    schedule: Schedule,
    seconds: dict[ActionKind, float],
    *,
    slow: float = 1.0,
    transfer_s: float = 0.0,
    activation: int = 10,
    finish_s: float = 0.0,
) -> PipelineWork:
    """`slow` is what stage 0 takes, as a multiple of the others."""
    stages = range(schedule.num_stages)
    move = Move(seconds=transfer_s, cause="dcn pp") if transfer_s else STAYS
    return PipelineWork(
        programs={
            (stage, kind): spent(one * (slow if stage == 0 else 1.0))
            for stage in stages
            for kind, one in seconds.items()
        },
        to_next=[move] * len(stages),
        to_previous=[move] * len(stages),
        memory=[StageMemory(lasting=1000, activation=activation, working=0)] * len(stages),
        finish=[spent(finish_s * (1 + stage)) for stage in stages] if finish_s else (),
    )


UNITS: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
SCHEDULES = st.sampled_from(["gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "interleaved"])


@given(
    name=SCHEDULES,
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 3),
    slow=st.floats(1.0, 3.0),
    transfer_s=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=30, deadline=None)
def test_a_price_is_the_simulation_split_into_causes(
    name: str, ranks: int, rounds: int, slow: float, transfer_s: float
) -> None:
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=2 * ranks * rounds)
    cost = price_pipeline(schedule, work(schedule, UNITS, slow=slow, transfer_s=transfer_s))
    each = StageCost(to_next_s=transfer_s, to_previous_s=transfer_s, activation_bytes=10)
    first = replace(
        each,
        forward_s=slow,
        backward_s=2 * slow,
        input_gradient_s=slow,
        weight_gradient_s=slow,
    )
    played = simulate(schedule, [first] + [each] * (schedule.num_stages - 1))
    assert cost.step_s == pytest.approx(played.makespan_s)
    assert cost.bubble == pytest.approx(played.bubble)
    assert sum(seconds for _, seconds in cost.causes) == pytest.approx(cost.step_s)
    assert ("dcn pp" in dict(cost.causes)) <= (transfer_s > 0)
    assert cost.bracket_s[0] <= cost.step_s <= cost.bracket_s[1]
    assert cost.bound_s <= cost.bracket_s[0]
    per_rank = schedule.num_stages // schedule.num_ranks
    held = [played.peak_bytes[rank] for rank in schedule.homes]
    assert cost.stage_bytes == tuple(1000 * per_rank + one for one in held)


def test_many_plans_cost_what_each_costs_alone() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    works = [work(schedule, UNITS, slow=slow, transfer_s=slow / 4) for slow in (1.0, 2.0)]
    assert price_pipelines(schedule, works) == [price_pipeline(schedule, one) for one in works]


def test_what_follows_the_schedule_is_the_slowest_ranks() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    without = price_pipeline(schedule, work(schedule, UNITS))
    with_it = price_pipeline(schedule, work(schedule, UNITS, finish_s=1.0))
    assert with_it.step_s == pytest.approx(without.step_s + 2.0)
    assert dict(with_it.causes)["bubble"] == pytest.approx(dict(without.causes)["bubble"])


def test_an_activation_is_held_until_its_backward_pass_has_ended() -> None:
    """The one that goes lives beside the one that comes only while its own gradient is computed."""
    assert _held(parse_actions("F0 B0 F1 B1", rank=0), 1).tolist() == [[1]]
    assert _held(parse_actions("F0 F1 B0 B1", rank=0), 1).tolist() == [[1], [2]]
    assert _held(parse_actions("F0 I0 F1 W0 B1", rank=0), 1).tolist() == [[1], [2]]


def test_one_stage_waits_for_nothing() -> None:
    schedule = make_schedule("1f1b", num_ranks=1, num_microbatches=3)
    cost = price_pipeline(schedule, work(schedule, UNITS))
    assert cost.step_s == 9.0
    assert cost.bubble == 0.0
    assert "bubble" not in dict(cost.causes)


@pytest.mark.parametrize(
    ("axes", "causes"),
    [
        ((MeshAxis(name="pp", ici=4), MeshAxis(name="dp", ici=2, dcn=2)), ["ici pp"] * 3),
        ((MeshAxis(name="pp", dcn=2, ici=2), MeshAxis(name="dp", ici=4)), ["ici", "dcn", "ici"]),
        ((MeshAxis(name="pp", dcn=2), MeshAxis(name="dp", ici=8)), ["dcn pp"]),
    ],
)
def test_transfers_take_the_wires_between_neighbours(
    axes: tuple[MeshAxis, ...], causes: list[str]
) -> None:
    ranks = axes[0].size
    found = moves(
        [1e9] * ranks,
        [*range(1, ranks), -1],
        range(ranks),
        axes=axes,
        axis="pp",
        hardware=HardwareModel(
            fabric=FABRIC,
            layouts=Layouts(shapes=(tuple(one.ici for one in axes),), spans=((),)),
            speeds=SPEEDS,
        ),
    )
    assert found[-1] == STAYS
    assert [one.cause for one in found[:-1]] == [f"{cause[:3]} pp" for cause in causes]
    times = {one.cause: one.seconds for one in found[:-1]}
    if len(times) == 2:
        assert times["dcn pp"] > 2 * times["ici pp"] > 0


def test_stages_on_the_same_rank_send_nothing() -> None:
    found = moves(
        [1e9, 1e9],
        [1, -1],
        [0, 0],
        axes=(MeshAxis(name="pp"), MeshAxis(name="dp", ici=8, dcn=2)),
        axis="pp",
        hardware=HardwareModel(
            fabric=FABRIC, layouts=Layouts(shapes=((1, 8),), spans=((),)), speeds=SPEEDS
        ),
    )
    assert found == [STAYS, STAYS]


def program(flops_side: float) -> Terms:
    """One multiplication whose rows `dp` splits."""
    side = Monomial(coefficient=flops_side)
    rows = Monomial(coefficient=flops_side, powers=(("dp", -1),))
    return Terms(
        active=("dp",),
        sampled=(("dp", 2),),
        platform="gpu",
        regions=(Region(name="step", trips=ONCE),),
        kernels=(
            Kernel(
                region=0,
                count=ONCE,
                bytes=(rows,),
                matmuls=(
                    Matmul(batch=Monomial(coefficient=1.0), m=rows, n=side, k=side, dtype="bf16"),
                ),
            ),
        ),
        collectives=(),
        points=(),
        argument_bytes=(Monomial(coefficient=64.0),),
        output_bytes=(),
        alias_bytes=(),
    )


def two_stages(ranks: int, microbatches: int) -> tuple[PipelineTerms, Terms]:
    sent = (Monomial(coefficient=2.0**30, powers=(("dp", -1),)),)

    def stage(*, is_last: bool) -> StageTerms:
        return StageTerms(
            programs=(("F", program(8192)), ("B", program(16384))),
            finish=program(64),
            params_bytes=(Monomial(coefficient=100.0),),
            sums_bytes=(Monomial(coefficient=100.0),),
            state_bytes=(Monomial(coefficient=200.0),),
            inputs_bytes=sent,
            saved_bytes=(),
            outputs_bytes=() if is_last else sent,
            gradients_bytes=sent,
        )

    pipeline = PipelineTerms(
        axis="pp",
        schedule=ScheduleText(
            name="1f1b", num_ranks=ranks, num_microbatches=microbatches, num_stages=ranks
        ),
        kinds=(stage(is_last=False), stage(is_last=True)),
        stages=(0,) * (ranks - 1) + (1,),
    )
    frame = replace(
        program(1),
        active=("pp", "dp"),
        sampled=(("pp", ranks), ("dp", 2)),
        kernels=(),
        fixed=("pp",),
    )
    return pipeline, frame


def test_terms_of_stages_are_priced_on_every_mesh_with_as_many_ranks() -> None:
    pipeline, frame = two_stages(2, 4)
    batch = Batch(
        names=("pp", "dp"),
        ici=np.array([[2, 2], [1, 8], [4, 2], [1, 8]]),
        dcn=np.array([[1, 4], [2, 1], [1, 2], [4, 1]]),
    )
    found = price_pipeline_terms(
        pipeline,
        frame,
        batch,
        hardware=HardwareModel(
            fabric=FABRIC,
            layouts=Layouts(shapes=((2, 2), (1, 8), (4, 2)), spans=((), (), ())),
            speeds=SPEEDS,
        ),
    )
    assert found.needs_own.tolist() == [False, False, True, True]
    inside, between = (found.estimated(row) for row in (0, 1))
    # The same work on both; where the pipeline lies decides what transfers add.
    assert dict(inside.causes)["compute"] == dict(between.causes)["compute"]
    assert dict(inside.causes)["ici pp"] < dict(between.causes)["dcn pp"]
    assert inside.step_s < between.step_s
    # 400 bytes last, and as many inputs as 1F1B promises: two on the first stage.
    assert found.costs[0].stage_bytes[0] == 400 + 2 * 2**30 // 8 + 2**30 // 8
    assert inside.memory_bytes == max(found.costs[0].stage_bytes)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved"])
def test_a_schedule_by_name_is_kept_as_its_name(name: str) -> None:
    schedule = make_schedule(name, num_ranks=2, num_microbatches=4)
    text = text_of_schedule(schedule)
    assert not text.lines
    assert text.schedule() == schedule


def test_a_schedule_of_ones_own_is_kept_line_by_line() -> None:
    schedule = parse_schedule(["F0 F1 B1 B0", "F0 F1 B1 B0"], name="1f1b")
    text = text_of_schedule(schedule)
    assert len(text.lines) == 2
    assert text.schedule() == schedule
