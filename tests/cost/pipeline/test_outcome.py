"""What compiled stages say of the whole step, in numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.cost.pipeline.outcome import (
    UPDATE,
    busiest_counts,
    neighbours,
    schedule_of,
    work_of,
    worst_memory,
)
from automesh.cost.pipeline.step import STAYS, Move, Spent, price_pipeline
from automesh.hardware import chip_for
from automesh.outcomes import (
    Collective,
    Compiled,
    Counts,
    Memory,
    PipelineOutcome,
    StageOutcome,
    StageProgram,
)
from automesh.pipeline import make_schedule
from automesh.report.predicted import stages_sentence
from automesh.tuner.compile.pipelines import predict_pipeline

MEMORY = Memory(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0, peak_bytes=0)
GATHER = Collective(
    kind="all-gather", axes=("fsdp",), group_size=4, count=3, payload_bytes=400, wire_bytes=300
)
CHIP = replace(
    chip_for("cpu", "cpu"),
    peak_flops_per_s=(("bf16", 1e3),),
    link_bytes_per_s=1e2,
    link_latency_s=0.0,
)


def program(stage: int, action: str, flops: int, *collectives: Collective) -> StageProgram:
    counts = Counts(flops=flops, hbm_bytes=0, collectives=collectives)
    return StageProgram(stage=stage, action=action, memory=MEMORY, counts=counts)


def compiled(name: str, *, ranks: int = 2, microbatches: int = 4, stages: int = 2) -> Compiled:
    schedule = make_schedule(
        name, num_ranks=ranks, num_microbatches=microbatches, num_stages=stages
    )
    each = [
        StageOutcome(
            rank=schedule.homes[stage],
            lasting_bytes=1000 + stage,
            activation_bytes=10,
            working_bytes=100,
            finishing_bytes=50,
            next_bytes=100 if stage < stages - 1 else 0,
            previous_bytes=100 if stage else 0,
            peak_bytes=4096 - stage,
        )
        for stage in range(stages)
    ]
    programs = [
        one
        for stage in range(stages)
        for one in (
            program(stage, "F", 1000, GATHER),
            program(stage, "B", 2000),
            program(stage, UPDATE, 500),
        )
    ]
    pipeline = PipelineOutcome(
        axis="pp",
        schedule=name,
        actions=tuple(str(schedule).splitlines()),
        stages=tuple(each),
        programs=tuple(programs),
    )
    return Compiled(
        fingerprint="",
        memory=MEMORY,
        counts=Counts(flops=0, hbm_bytes=0, collectives=()),
        step_s=0.0,
        compile_s=1.0,
        pipeline=pipeline,
    )


def stages(one: Compiled) -> PipelineOutcome:
    assert one.pipeline is not None
    return one.pipeline


def test_the_schedule_is_kept_whole() -> None:
    schedule = make_schedule("interleaved", num_ranks=2, num_microbatches=4, num_stages=4)
    assert schedule_of(stages(compiled("interleaved", stages=4))) == schedule


def test_counts_are_those_of_all_runs_of_one_rank() -> None:
    counts = busiest_counts(stages(compiled("1f1b")))
    assert counts.flops == 4 * (1000 + 2000) + 500
    (gather,) = counts.collectives
    assert (gather.count, gather.payload_bytes, gather.wire_bytes) == (12, 1600, 1200)
    twice = busiest_counts(stages(compiled("interleaved", stages=4)))
    assert twice.flops == 2 * counts.flops


def test_the_worst_device_holds_what_lasts_of_all_stages_of_its_rank() -> None:
    memory = worst_memory(stages(compiled("interleaved", stages=4)))
    assert memory.peak_bytes == 4096
    assert memory.argument_bytes == 1000 + 1002  # stages 0 and 2
    assert memory.temporary_bytes == 4096 - 2002


def test_a_step_is_its_makespan_and_the_slowest_update() -> None:
    each = Spent(step_s=1.0, lower_s=1.0, upper_s=1.0, causes=(("compute", 1.0),))
    one = stages(compiled("1f1b"))
    spent = {(program.stage, program.action): each for program in one.programs}
    schedule = schedule_of(one)
    work = work_of(one, spent, to_next=[STAYS] * 2, to_previous=[STAYS] * 2)
    found = price_pipeline(schedule, work)
    assert found.step_s == (4 + 2 - 1) * 2 + 1
    far = Move(seconds=0.25, cause="dcn pp")
    slower = price_pipeline(
        schedule, work_of(one, spent, to_next=[far, STAYS], to_previous=[STAYS, far])
    )
    assert slower.step_s > found.step_s
    assert dict(slower.causes)["dcn pp"] == pytest.approx(slower.step_s - found.step_s)


def test_without_a_replay_programs_take_what_they_do_at_the_chips_speed() -> None:
    one = compiled("gpipe")
    found = predict_pipeline(one, stages(one), CHIP)
    # F: 1 s and 3 s of its collective; B: 2 s; update: 0.5 s; a transfer each way: 1 s.
    forward, backward, update, sent = 4.0, 2.0, 0.5, 1.0
    makespan = (4 + 1) * (forward + backward) + 2 * sent
    assert found.step_s == pytest.approx(makespan + update)
    assert stages(found).bubble == pytest.approx(1 - 4 * (forward + backward) / makespan)
    assert replace(found, step_s=0.0, pipeline=one.pipeline) == one


def test_stages_on_one_rank_send_each_other_nothing() -> None:
    one = compiled("interleaved", ranks=1, stages=2)
    found = predict_pipeline(one, stages(one), CHIP)
    assert found.step_s == pytest.approx(4 * 2 * 6.0 + 2 * 0.5)


def test_neighbours() -> None:
    schedule = make_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert neighbours(schedule, forward=True) == (1, 2, -1)
    assert neighbours(schedule, forward=False) == (-1, 0, 1)


def test_stages_in_words() -> None:
    one = stages(compiled("1f1b"))
    assert stages_sentence(one) == "1f1b, 2 stages of 4.00 KiB each a device by the compiler"
    other = (one.stages[0], replace(one.stages[1], peak_bytes=2048))
    said = stages_sentence(replace(one, stages=other, bubble=0.25))
    assert said == (
        "1f1b, 2 stages of 4.00 KiB, 2.00 KiB a device by the compiler; simulated, ranks do "
        "nothing for 25 % of a step"
    )
