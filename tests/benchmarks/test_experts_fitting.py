"""The benchmark of expert presets, where one does not fit as published: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from automesh.errors import UsageError
from benchmarks.experts.command import PRESETS, described, summary
from benchmarks.experts.fitting import accumulated, fitted
from benchmarks.experts.presets import Expert, read_presets, sort_out
from benchmarks.experts.study import Row, Side

BY_ID = {one.id: one for one in sort_out(read_presets(PRESETS))[0]}


def studying(fits: Callable[[int], bool], seen: list[int]) -> Callable[[Expert], Row]:
    """Stands for the compiles: which numbers of microbatches fit."""

    def study(expert: Expert) -> Row:
        seen.append(expert.microbatches)
        good = fits(expert.microbatches)
        side = Side(
            plan=expert.baseline,
            step_s=1.0 if good else 0.0,
            verdict="fits: 1 of 2" if good else f"does not fit: {9 - expert.microbatches} of 2",
        )
        return Row(
            id=expert.id,
            legal=4,
            excluded=(),
            rank=int(good),
            compiled=1,
            expert=side,
            ours=side,
            ratio=1.0 if good else 0.0,
        )

    return study


def test_what_fits_is_compared_as_published() -> None:
    seen: list[int] = []
    row = fitted(BY_ID["p239"], studying(lambda _: True, seen))
    assert (seen, row.accumulated, row.id) == ([1], "", "p239")


def test_what_does_not_is_accumulated_until_it_does() -> None:
    seen: list[int] = []
    # 24 rows over fsdp:8 are 3 each: 2 microbatches would split a row.
    row = fitted(BY_ID["p243"], studying(lambda microbatches: microbatches > 2, seen))
    assert seen == [1, 3]
    assert (row.id, row.ratio, row.rank) == ("p243", 1.0, 1)
    text = "\n".join(described(BY_ID["p243"], row))
    assert "with microbatches=1 the expert's mesh does not fit: 8 of 2" in text
    assert "here 3 microbatches are accumulated, by both" in text
    assert "fsdp:8 remat=full microbatches=3" in text


def test_what_never_does_stays_as_published() -> None:
    seen: list[int] = []
    row = fitted(BY_ID["p243"], studying(lambda _: False, seen))
    assert seen == [1, 3]
    assert row.expert.plan.endswith("microbatches=1") and not row.rank
    assert row.accumulated.endswith("nor does it with 3: does not fit: 6 of 2")
    found = summary([row, fitted(BY_ID["p243"], studying(lambda one: one > 2, []))])
    assert (found["expert_does_not_fit"], found["accumulated"]) == (1, 1)


def test_a_failure_of_more_microbatches_does_not_lose_the_published_row() -> None:
    usual = studying(lambda _: False, [])

    def study(expert: Expert) -> Row:
        if expert.microbatches > 1:
            raise UsageError("the worker died")
        return usual(expert)

    row = fitted(BY_ID["p243"], study)
    assert row.expert.plan.endswith("microbatches=1")
    assert row.accumulated.endswith("does not fit: 8 of 2; 3 cannot be compared: the worker died")


def test_presets_of_other_files_keep_their_names_apart() -> None:
    one = replace(BY_ID["p239"], id="ours-8b", argv=("--size", "x", "--rows", "64"))
    twice = accumulated(one, most=8)
    assert twice and twice.id == "ours-8b-m2"
    again = accumulated(twice, most=8)
    assert again and again.id == "ours-8b-m4"


def test_rows_that_the_mesh_has_one_of_each_cannot_be_split() -> None:
    one_each = replace(BY_ID["p243"], argv=("--size", "x", "--rows", "8"))
    assert accumulated(one_each, most=8) is None


@pytest.mark.parametrize("one", BY_ID.values(), ids=lambda one: one.id)
def test_more_microbatches_divide_the_rows_of_every_preset(one: Expert) -> None:
    more = accumulated(one, most=8 * one.microbatches)
    if more is None:
        return
    assert 2 * one.microbatches <= more.microbatches <= 8 * one.microbatches
    assert f"microbatches={more.microbatches}" in more.baseline
    assert f"microbatches = [{more.microbatches}]" in more.space
    again = accumulated(more, most=64 * one.microbatches)
    assert again is None or again.id.count("-m") == 1
