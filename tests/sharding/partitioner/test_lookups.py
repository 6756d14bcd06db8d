"""What is gathered or reduced around a gather and a scatter: the cases that steps have."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from automesh.sharding.partitioner.lookups import LookupSplit, PartitionedLookup, way_of
from automesh.sharding.partitioner.parts import Part, PartitionedArray, Parts

DP, FSDP, TP = (Part(axis=axis, before=1, size=2) for axis in ("dp", "fsdp", "tp"))
HALF_OF_TP = Part(axis="tp", before=1, size=2)
# A table of 4,096 rows of 128 numbers, looked up 16,384 times.
ROWS, SLICES, INDICES = 4096 * 128 * 4.0, 16_384 * 128 * 4.0, 16_384 * 4.0


def gather(
    operand: tuple[Parts, Parts],
    indices: Parts,
    result: tuple[Parts, Parts],
    *,
    devices: Parts,
    scatters: bool = False,
) -> LookupSplit:
    return way_of(
        PartitionedLookup(
            operand=PartitionedArray(factors=("k", "j"), parts=operand, bytes=ROWS),
            indices=PartitionedArray(factors=("i", "l"), parts=(indices, ()), bytes=INDICES),
            slices=PartitionedArray(factors=("i", "j"), parts=result, bytes=SLICES),
            looked_up=("k",),
            scatters=scatters,
            devices=devices,
        )
    )


def test_a_table_is_gathered_where_rows_and_indices_are_split_over_the_same_axis() -> None:
    found = gather(((FSDP,), ()), (FSDP,), ((FSDP,), ()), devices=(FSDP,))
    assert found.operand == ((), ())
    assert found.slices == ((FSDP,), ())


def test_a_table_moves_to_devices_that_only_repeat_it() -> None:
    tp = Part(axis="tp", before=1, size=4)
    found = gather(((DP,), ()), (DP,), ((DP,), ()), devices=(DP, tp))
    assert found.operand == ((HALF_OF_TP,), ())
    assert found.indices == ((DP,), ())
    assert found.slices == ((DP,), ())


def test_every_device_looks_into_its_part_of_a_table_that_is_split_over_another_axis() -> None:
    found = gather(((TP,), ()), (DP,), ((DP,), ()), devices=(DP, TP))
    assert found.operand == ((TP,), ())
    assert found.slices == ((DP,), ())


def test_what_every_slice_has_whole_stays_split() -> None:
    found = gather(((), (TP,)), (DP,), ((DP,), (TP,)), devices=(DP, TP))
    assert found.operand == ((), (TP,))
    assert found.slices == ((DP,), (TP,))


def test_a_scatter_adds_up_what_the_groups_of_updates_give() -> None:
    found = gather(((FSDP,), ()), (FSDP,), ((FSDP,), ()), devices=(FSDP,), scatters=True)
    assert found.operand == ((), ())
    assert found.slices == ((FSDP,), ())


def test_a_dimension_that_all_three_share_comes_first() -> None:
    found = way_of(
        PartitionedLookup(
            operand=PartitionedArray(factors=("b", "k"), parts=((DP,), (TP,)), bytes=ROWS),
            indices=PartitionedArray(factors=("b", "i", "l"), parts=((DP,), (), ()), bytes=INDICES),
            slices=PartitionedArray(factors=("b", "i"), parts=((DP,), ()), bytes=SLICES),
            looked_up=("k",),
            scatters=False,
            devices=(DP, TP),
        )
    )
    assert found.operand == ((DP,), (TP,))
    assert found.indices == ((DP,), (), ())
    assert found.slices == ((DP,), ())


def test_arrays_that_nobody_splits_stay_whole() -> None:
    found = gather(((), ()), (), ((), ()), devices=(DP, TP))
    assert found == LookupSplit(operand=((), ()), indices=((), ()), slices=((), ()))


SPLITS: tuple[Parts, ...] = ((), (DP,), (FSDP,), (TP,), (DP, FSDP))


@given(*([st.sampled_from(SPLITS)] * 4), st.booleans())
def test_what_is_found_can_be_computed(
    rows: Parts, width: Parts, indices: Parts, slices: Parts, scatters: bool
) -> None:
    """Equal splits along what two arrays share, no device digit twice in one array."""
    assume(not ({*rows} & {*width} or {*slices} & {*width}))
    found = gather(
        (rows, width), indices, (slices, width), devices=(DP, FSDP, TP), scatters=scatters
    )
    assert found.operand[1] == found.slices[1]
    assert found.indices[0] == found.slices[0]
    for parts in (found.operand, found.indices, found.slices):
        every = [one for each in parts for one in each]
        assert len(set(every)) == len(every)
