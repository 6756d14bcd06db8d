"""Which operand of a product is gathered, and what is reduced: the cases that steps have."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from automesh.sharding.partitioner.parts import Part, PartitionedArray, Parts, count
from automesh.sharding.partitioner.products import PartitionedProduct, ProductSplit, way_of

DP, FSDP, TP = (Part(axis=axis, before=1, size=2) for axis in ("dp", "fsdp", "tp"))
DEVICES = (DP, FSDP, TP)
BATCH = (DP, FSDP)


def split(factors: str, *parts: Parts, size: float = 1e6) -> PartitionedArray:
    return PartitionedArray(factors=tuple(factors), parts=parts, bytes=size)


def way(
    left: PartitionedArray,
    right: PartitionedArray,
    result: PartitionedArray,
    devices: Parts = DEVICES,
) -> ProductSplit:
    return way_of(PartitionedProduct(left=left, right=right, result=result, devices=devices))


def test_weights_are_gathered_where_rows_and_weights_are_split_over_the_same_axis() -> None:
    found = way(
        split("bk", BATCH, ()), split("kn", (FSDP,), (TP,)), split("bn", BATCH, (TP,), size=1e7)
    )
    assert found.left == (BATCH, ())
    assert found.right == ((), (TP,))
    assert found.result == (BATCH, (TP,))


def test_a_contracted_dimension_that_both_split_is_reduced() -> None:
    found = way(split("bk", (DP,), (TP,)), split("kn", (TP,), ()), split("bn", (DP,), ()))
    assert found.left == ((DP,), (TP,))
    assert found.right == ((TP,), ())
    assert found.result == ((DP,), ())


def test_gradients_of_weights_are_reduced_whole_before_they_are_sliced() -> None:
    found = way(split("bk", BATCH, ()), split("bn", BATCH, (TP,)), split("kn", (FSDP,), (TP,)))
    assert found.left == (BATCH, ())
    assert found.right == (BATCH, (TP,))
    assert found.result == ((), (TP,))


def test_operands_that_nobody_splits_follow_a_result_that_is_split_along_one_of_them() -> None:
    found = way(split("bk", (), ()), split("kn", (), ()), split("bn", (), (TP,)))
    assert found.right == ((), (TP,))
    assert found.result == ((), (TP,))


def test_operands_that_nobody_splits_follow_a_result_that_is_split_along_both() -> None:
    found = way(split("bk", (), ()), split("kn", (), ()), split("bn", (DP,), (TP,)))
    assert found.left == ((DP,), ())
    assert found.right == ((), (TP,))
    assert found.result == ((DP,), (TP,))


def test_a_batch_dimension_keeps_every_product_on_its_device() -> None:
    found = way(
        split("hbk", (TP,), BATCH, ()), split("hkn", (TP,), (), ()), split("hbn", (TP,), BATCH, ())
    )
    assert found.left == ((TP,), BATCH, ())
    assert found.right == ((TP,), (), ())


def test_weights_are_gathered_even_where_devices_are_free_to_keep_parts_of_them() -> None:
    wide = Part(axis="tp", before=1, size=4)
    found = way(split("bk", (FSDP,), ()), split("kn", (FSDP,), ()),
                split("bn", (FSDP,), (), size=1e7), devices=(FSDP, wide))  # fmt: skip
    # Inside a group of four devices each could keep a quarter of the weights, but the rows are not
    # split along k: they are gathered there.
    assert found.left == ((FSDP,), ())
    assert found.right == ((), ())


EP = Part(axis="ep", before=1, size=4)


def test_an_operand_that_would_need_too_many_devices_for_the_batch_follows_the_result() -> None:
    # All devices split g of the left operand, and there are none left to split e as well.
    found = way(
        split("gek", (DP, EP), (), ()), split("gen", (DP,), (EP,), ()), split("ekn", (EP,), (), ()),
        devices=(DP, EP),
    )  # fmt: skip
    assert found.left == ((), (EP,), ())
    assert found.right == ((), (EP,), ())
    assert found.result == ((EP,), (), ())


def test_devices_that_split_contracted_dimensions_are_used_for_the_batch() -> None:
    found = way(
        split("gek", (EP,), (), ()), split("gen", (), (EP,), ()), split("ekn", (EP,), (), ()),
        devices=(EP,),
    )  # fmt: skip
    assert found.left == ((), (EP,), ())
    assert found.right == ((), (EP,), ())


def test_a_result_that_fits_no_group_is_added_up_whole() -> None:
    found = way(
        split("bk", (EP,), ()), split("bn", (EP,), (DP,)), split("kn", (EP, DP), ()),
        devices=(EP, DP),
    )  # fmt: skip
    assert found.left == ((EP,), ())
    assert found.right == ((EP,), ())
    assert found.result == ((), ())


def test_a_result_that_is_cut_further_than_an_operand_is_added_up_as_the_operand_is_split() -> None:
    major, minor = replace(EP, size=2), Part(axis="ep", before=2, size=2)
    found = way(
        split("bk", (minor,), ()), split("bn", (minor,), (major,)), split("kn", (), (EP,)),
        devices=(EP,),
    )  # fmt: skip
    assert found.right == ((minor,), (major,))
    assert found.result == ((), (major,))


def test_a_convolution_that_fits_no_group_is_gathered() -> None:
    product = PartitionedProduct(
        left=split("bk", (), (DP,)), right=split("kn", (), ()), result=split("bn", (TP,), (FSDP,)),
        devices=(DP, FSDP, TP), is_convolution=True,
    )  # fmt: skip
    found = way_of(product)
    assert (*found.left, *found.right, *found.result) == ((),) * 6
    follows = way_of(replace(product, is_convolution=False))
    assert follows.result == ((TP,), (FSDP,))


SPLITS: tuple[Parts, ...] = ((), (DP,), (FSDP,), (TP,), (DP, FSDP))


@given(*([st.sampled_from(SPLITS)] * 4))
def test_what_is_found_can_be_computed(
    rows: Parts, inner: Parts, columns: Parts, wanted: Parts
) -> None:
    """Equal splits along what two arrays share, no device digit twice in one array."""
    assume(not ({*rows} & {*inner} or {*inner} & {*columns} or {*wanted} & {*columns}))
    found = way(split("bk", rows, inner), split("kn", inner, columns), split("bn", wanted, columns))
    (b, k), (k_right, n) = found.left, found.right
    assert k == k_right
    assert (b, n) == found.result or count(found.result[0]) * count(found.result[1]) == 1
    for parts in (found.left, found.right, found.result):
        every = [one for each in parts for one in each]
        assert len(set(every)) == len(every)
