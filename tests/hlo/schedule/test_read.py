"""Schedules: what starts where, what waits for it, what is computed between, loops and lanes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.hlo.count import count_schedule
from automesh.hlo.schedule.nouns import (
    Branch,
    Compute,
    DeviceTransfer,
    Done,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledProgram,
    Start,
)
from automesh.hlo.schedule.totals import tally_of
from tests.support.hlo_text import ADD, EIGHT, GPU, WHOLE, flattened, schedule, spelled

GATHER_WITH_WORK = """  p = f32[64]{0} parameter(0)
  x = f32[8,8]{1,0} parameter(1)
  g = (f32[64]{0}, f32[256]{0}) all-gather-start(p), channel_id=1,
    replica_groups=[2,4]<=[8], use_global_device_ids=true, dimensions={0}, CONFIG
  d = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  gd = f32[256]{0} all-gather-done(g)
  ROOT t = (f32[256]{0}, f32[8,8]{1,0}) tuple(gd, d)"""


def test_what_stands_between_start_and_done_can_hide_the_transfer() -> None:
    plan = schedule(GATHER_WITH_WORK.replace("CONFIG", GPU.replace("SYNC", "false")), axes=EIGHT)
    assert spelled(plan.body) == ["start all-gather g", "matrix d", "done g"]
    (start, *_) = plan.body.operations
    assert isinstance(start, Start)
    assert start.transfer == DeviceTransfer(
        name="g",
        kind="all-gather",
        medium="fabric",
        axes=("tp",),
        groups=((0, 1, 2, 3), (4, 5, 6, 7)),
        group_size=4,
        payload_bytes=4 * WHOLE,
        wire_bytes=3 * WHOLE,
        hbm_bytes=5 * WHOLE,
    )


def test_a_gpu_collective_marked_synchronous_is_waited_for_at_once() -> None:
    plan = schedule(GATHER_WITH_WORK.replace("CONFIG", GPU.replace("SYNC", "true")), axes=EIGHT)
    assert spelled(plan.body) == ["start all-gather g", "done g", "matrix d"]
    assert plan.platform == "gpu"


def test_groups_are_always_spelled_out() -> None:
    entry = """  p = f32[64]{0} parameter(0)
  ROOT r = f32[64]{0} all-reduce(p), channel_id=2, replica_groups={}, use_global_device_ids=true,
    to_apply=add"""
    (start, _) = schedule(entry, ADD, axes=EIGHT).body.operations
    assert isinstance(start, Start)
    assert start.transfer.groups == (tuple(range(8)),)
    assert start.transfer.synchronous


def test_a_collective_among_one_device_is_only_memory_traffic() -> None:
    entry = """  p = f32[64]{0} parameter(0)
  ROOT r = f32[64]{0} all-reduce(p), channel_id=2, replica_groups=[8,1]<=[8],
    use_global_device_ids=true, to_apply=add"""
    plan = schedule(entry, ADD, axes=EIGHT)
    assert spelled(plan.body) == ["memory r"]
    assert count_schedule(plan).hbm_bytes == 2 * WHOLE


# Copies between memories.

TPU = 'backend_config={"window_config":{"estimated_cycles":"77"}}'


def test_a_prefetch_into_the_chip_is_a_transfer_between_memories() -> None:
    entry = f"""  p = f32[64]{{0}} parameter(0)
  c = (f32[64]{{0:S(1)}}, f32[64]{{0}}, u32[]) copy-start(p)
  n = f32[64]{{0}} negate(p), {TPU}
  d = f32[64]{{0:S(1)}} copy-done(c)
  ROOT r = f32[64]{{0}} add(d, n)"""
    plan = schedule(entry)
    assert spelled(plan.body) == ["start copy c", "memory n", "done c", "memory r"]
    start, negate, _, add = plan.body.operations
    assert isinstance(start, Start)
    assert isinstance(negate, Compute)
    assert isinstance(add, Compute)
    assert (start.transfer.medium, start.transfer.payload_bytes) == ("memory", WHOLE)
    assert start.transfer.hbm_bytes == WHOLE
    assert (negate.cycles, negate.hbm_bytes, negate.onchip_bytes) == (77, 2 * WHOLE, 0)
    assert (add.hbm_bytes, add.onchip_bytes) == (2 * WHOLE, WHOLE)


def test_offloading_is_a_transfer_to_the_host() -> None:
    entry = f"""  p = f32[64]{{0}} parameter(0)
  n = f32[64]{{0}} negate(p), {TPU}
  c = (f32[64]{{0:S(5)}}, f32[64]{{0}}, u32[]) copy-start(n)
  ROOT d = f32[64]{{0:S(5)}} copy-done(c)"""
    _, start, done = schedule(entry).body.operations
    assert isinstance(start, Start)
    assert isinstance(done, Done)
    assert (start.transfer.medium, start.transfer.payload_bytes) == ("host", WHOLE)
    assert start.transfer.hbm_bytes == WHOLE


def test_a_slice_into_the_chip_moves_what_it_takes() -> None:
    body = """taken {
  x = f32[1024]{0} parameter(0)
  ROOT s = f32[64]{0:S(1)} slice(x), slice={[64:128]}
}"""
    entry = f"""  p = f32[1024]{{0}} parameter(0)
  n = f32[1024]{{0}} negate(p), {TPU}
  a = ((f32[1024]{{0}}), f32[64]{{0:S(1)}}, u32[]) async-start(n), calls=taken
  ROOT d = f32[64]{{0:S(1)}} async-done(a)"""
    _, start, done = schedule(entry, body).body.operations
    assert isinstance(start, Start)
    assert isinstance(done, Done)
    assert (start.transfer.medium, start.transfer.payload_bytes) == ("memory", WHOLE)
    assert start.lane == done.lane


# Lanes through loops.

CARRIED = """cond {
  s = (s32[], f32[64]{0}, (f32[64]{0}, f32[64]{0})) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  limit = s32[] constant(TRIPS)
  ROOT c = pred[] compare(i, limit), direction=LT
}
body {
  s = (s32[], f32[64]{0}, (f32[64]{0}, f32[64]{0})) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[64]{0} get-tuple-element(s), index=1
  h = (f32[64]{0}, f32[64]{0}) get-tuple-element(s), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  d = f32[64]{0} collective-permute-done(h)
  y = f32[64]{0} add(d, x)
  again = (f32[64]{0}, f32[64]{0}) collective-permute-start(y), channel_id=2,
    source_target_pairs={{0,1},{1,0}}
  ROOT t = (s32[], f32[64]{0}, (f32[64]{0}, f32[64]{0})) tuple(next, y, again)
}"""
CARRYING = """  p = f32[64]{0} parameter(0)
  zero = s32[] constant(0)
  first = (f32[64]{0}, f32[64]{0}) collective-permute-start(p), channel_id=1,
    source_target_pairs={{0,1},{1,0}}
  t = (s32[], f32[64]{0}, (f32[64]{0}, f32[64]{0})) tuple(zero, p, first)
  w = (s32[], f32[64]{0}, (f32[64]{0}, f32[64]{0})) while(t), condition=cond, body=body
  h = (f32[64]{0}, f32[64]{0}) get-tuple-element(w), index=2
  ROOT last = f32[64]{0} collective-permute-done(h)"""


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_a_transfer_carried_through_a_loop_keeps_its_lane(trips: int) -> None:
    bodies = CARRIED.replace("TRIPS", str(trips))
    plan = schedule(CARRYING, bodies, axes=(("dp", 2),))
    seen = [one for one in spelled(plan.body) if not one.startswith("memory")]
    (lane,) = {one.split()[-1] for one in seen}
    start, done = f"start collective-permute {lane}", f"done {lane}"
    assert seen == [start, *[done, start] * trips, done]


# Sums over schedules.

SMALL = st.integers(0, 5)


def computed(flops: int, size: int) -> Compute:
    return Compute(name="c", kind="memory", opcode="add", flops=flops, hbm_bytes=size)


def moved(payload: int) -> Start:
    transfer = DeviceTransfer(
        name="g",
        kind="all-gather",
        medium="fabric",
        axes=("tp",),
        groups=((0, 1),),
        group_size=2,
        payload_bytes=2 * payload,
        wire_bytes=payload,
    )
    return Start(transfer=transfer, lane="g")


LEAVES: st.SearchStrategy[Operation] = st.one_of(
    st.builds(computed, SMALL, SMALL), st.builds(moved, SMALL), st.just(Done(name="d", lane="g"))
)
OPERATIONS: st.SearchStrategy[Operation] = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda trips, operations: ScheduledLoop(
            name="w",
            trips=trips,
            body=ScheduledBlock(operations=tuple(operations)),
            uncounted="a loop",
        ),
        st.integers(0, 3),
        st.lists(inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.lists(OPERATIONS, max_size=5))
def test_sums_are_those_of_the_operations_written_out(operations: list[Operation]) -> None:
    block = ScheduledBlock(operations=tuple(operations))
    tally = tally_of(block)
    every = flattened(block)
    computes = [one for one in every if isinstance(one, Compute)]
    starts = [one.transfer for one in every if isinstance(one, Start)]
    assert tally.flops == sum(one.flops for one in computes)
    assert tally.hbm_bytes == sum(one.hbm_bytes for one in computes)
    assert sum(one.count for one in tally.collectives.values()) == len(starts)
    assert sum(one.wire_bytes for one in tally.collectives.values()) == sum(
        one.wire_bytes for one in starts
    )


@given(st.lists(st.builds(computed, SMALL, SMALL), min_size=1, max_size=4))
def test_the_costliest_block_of_a_branch_counts(computes: list[Compute]) -> None:
    blocks = tuple(ScheduledBlock(operations=(one,)) for one in computes)
    tally = tally_of(ScheduledBlock(operations=(Branch(name="b", blocks=blocks),)))
    assert (tally.flops, tally.hbm_bytes) == max((one.flops, one.hbm_bytes) for one in computes)


@given(st.permutations(range(4)), st.integers(1, 3))
def test_counts_do_not_depend_on_the_order_of_operations(order: list[int], trips: int) -> None:
    listed: list[Operation] = [
        computed(3, 5),
        moved(7),
        Done(name="d", lane="g"),
        ScheduledLoop(name="w", trips=trips, body=ScheduledBlock(operations=(computed(1, 1),))),
    ]
    counts = {
        count_schedule(
            ScheduledProgram(
                platform="cpu",
                axes=EIGHT,
                body=ScheduledBlock(operations=tuple(listed[index] for index in chosen)),
            )
        )
        for chosen in itertools.chain([order], [range(4)])
    }
    assert len(counts) == 1


def test_branches_that_move_different_bytes_are_named() -> None:
    blocks = """yes {
  y = f32[1024]{0} parameter(0)
  ROOT n = f32[1024]{0} negate(y)
}
no {
  z = f32[1024]{0} parameter(0)
  ROOT b = f32[1024]{0} bitcast(z)
}"""
    entry = """  p = f32[1024]{0} parameter(0)
  c = pred[] parameter(1)
  ROOT q = f32[1024]{0} conditional(c, p, p), true_computation=yes, false_computation=no"""
    (remark,) = schedule(entry, blocks).uncounted
    assert remark == "conditional `q` counted as its costliest branch"
