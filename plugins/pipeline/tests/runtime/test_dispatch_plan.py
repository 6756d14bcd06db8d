"""The plan of dispatches: everything once, after what it reads, dropped after its last use."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.pipeline import SCHEDULES, Schedule, make_schedule
from automesh_pipeline.runtime.dispatch_plan import (
    Drop,
    Load,
    PipelineSlots,
    Run,
    Send,
    Slot,
    StageSlots,
    plan_steps,
)


def chain_wiring(schedule: Schedule, *, saves: bool, skip: bool) -> PipelineSlots:
    """Value s goes from stage s to s + 1, and with `skip` value 0 to the last stage, too."""
    count, homes = schedule.num_stages, schedule.homes

    def inputs(stage: int) -> dict[int, int]:
        values = {stage - 1} if stage else set()
        if skip and stage == count - 1 and stage:
            values.add(0)
        return dict.fromkeys(sorted(values), homes[stage])

    return PipelineSlots(
        stages=tuple(
            StageSlots(
                batch={0: homes[stage]} if stage in (0, count - 1) else {},
                inputs=inputs(stage),
                outputs={stage: homes[stage]} if stage < count - 1 else {},
                with_gradient=frozenset(inputs(stage)),
                has_weights=True,
                is_last=stage == count - 1,
                skips_forward=stage == count - 1 and not saves,
                saves=saves,
            )
            for stage in range(count)
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    ranks=st.integers(2, 4),
    rounds=st.integers(2, 3),
    saves=st.booleans(),
    skip=st.booleans(),
)
def test_every_plan_can_be_run_and_holds_nothing_in_the_end(name, ranks, rounds, saves, skip):
    several = name in ("interleaved", "kimi_k2", "wavefront")
    schedule = make_schedule(
        name,
        num_ranks=ranks,
        num_microbatches=ranks * rounds,
        num_stages=2 * ranks if several else None,
    )
    slots = chain_wiring(schedule, saves=saves, skip=skip)
    held: set[Slot] = set()
    sends: Counter[Slot] = Counter()
    ran = []
    for step in plan_steps(schedule, slots):
        match step:
            case Load():
                assert step.slot not in held
                held.add(step.slot)
            case Send():
                assert step.source in held
                assert step.target not in held
                sends[step.target] += 1
                held.add(step.target)
            case Run():
                assert held.issuperset(step.reads)
                assert held.isdisjoint(step.makes)
                held.update(step.makes)
                ran.append(step.action)
            case Drop():
                assert held.issuperset(step.slots)
                held.difference_update(step.slots)
    losses = {Slot("loss", schedule.num_stages - 1, m, 0) for m in range(ranks * rounds)}
    assert held == losses
    assert set(sends.values()) <= {1}
    assert_all_done(schedule, slots, ran)


def assert_all_done(schedule, slots, ran):
    def is_run(action):
        stage = slots.stages[action.stage]
        if action.kind == "F":
            return not stage.skips_forward
        return action.kind != "I" or bool(stage.with_gradient) or stage.skips_forward

    assert ran == [action for _, action in schedule.order if is_run(action)]


def test_a_value_is_sent_once_to_each_place_that_reads_it():
    schedule = make_schedule("gpipe", num_ranks=3, num_microbatches=1)
    steps = plan_steps(schedule, chain_wiring(schedule, saves=False, skip=True))
    values = [
        step.target for step in steps if isinstance(step, Send) and step.target.kind == "value"
    ]
    assert [(slot.number, slot.place) for slot in values] == [(0, 1), (0, 2), (1, 2)]
    gradients = [
        (step.target.number, step.target.reader, step.target.place)
        for step in steps
        if isinstance(step, Send) and step.target.kind == "gradient"
    ]
    assert gradients == [(0, 2, 0), (1, 2, 1), (0, 1, 0)]


def test_stages_on_one_rank_send_nothing_between_them():
    schedule = make_schedule("dualpipe_v", num_ranks=2, num_microbatches=4)
    steps = plan_steps(schedule, chain_wiring(schedule, saves=False, skip=False))
    # Stages 1 and 2 are both on rank 1: what goes between them stays where it is.
    sent = {step.source.number for step in steps if isinstance(step, Send)}
    assert sent == {0, 2}
