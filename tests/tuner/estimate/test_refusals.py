"""Which refusals of a step are concluded from others."""

from __future__ import annotations

from automesh.cost.terms import DivisibilityGuard
from automesh.tuner.estimate.propagations import Need
from automesh.tuner.estimate.refusals import Refusals

HEADS = DivisibilityGuard(size=4, axes=("tp",))
ROWS = DivisibilityGuard(size=48, axes=("dp", "fsdp"))


def need(
    *parts: tuple[DivisibilityGuard, int],
    knobs: int = 0,
    only: bool = True,
    dp: int = 2,
    active: tuple[str, ...] = ("dp",),
) -> Need:
    return Need(
        call=((), (("k", knobs),)),
        active=active,
        sizes=(("dp", dp),),
        probes=(),
        spare=(("dp", dp),),
        members=(0,),
        exact=True,
        uneven=frozenset(parts),
        is_only_uneven=only,
    )


def test_each_way_to_divide_unevenly_is_tried_alone_before_others_that_include_it() -> None:
    heads, rows = need((HEADS, 8)), need((ROWS, 32))
    again, more = need((HEADS, 8), dp=4), need((HEADS, 16))
    both, even = need((HEADS, 8), (ROWS, 32)), need()
    refusals = Refusals()
    now, later = refusals.next_round([both, more, even, heads, again, rows])
    assert now == [even, heads, rows]
    assert later == [both, more, again]
    refusals.note(heads, "the step refuses it: 4 by 8")
    # The same heads, by the same number or a multiple of it, whatever else is divided.
    assert all("4 by 8 (seen at `dp:2`" in refusals.why(one) for one in (both, more, again))
    assert refusals.why(heads) == refusals.why(rows) == refusals.why(even) == ""


def test_what_is_accepted_lets_all_like_it_be_tried() -> None:
    heads, again, both = need((HEADS, 8)), need((HEADS, 8), dp=4), need((HEADS, 8), (ROWS, 32))
    refusals = Refusals()
    assert refusals.next_round([heads, again, both]) == ([heads], [again, both])
    assert refusals.next_round([again, both]) == ([again, both], [])


def test_nothing_is_concluded_for_other_knobs_or_from_what_has_other_causes() -> None:
    refusals = Refusals()
    refusals.note(need((HEADS, 8), only=False), "no")
    refusals.note(need(), "no")
    assert not refusals.refused
    refusals.note(need((HEADS, 8)), "no")
    assert refusals.why(need((HEADS, 8), dp=4))
    assert not refusals.why(need((HEADS, 8), knobs=1))
    assert not refusals.why(need((HEADS, 12)))
    assert not refusals.why(need((HEADS, 8), active=("tp",)))
    assert refusals.why(need((HEADS, 8), active=("dp", "tp")))
    assert not refusals.why(need((DivisibilityGuard(size=4, axes=("sp",)), 8)))
