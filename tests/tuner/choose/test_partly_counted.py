"""Plans with work that nobody counted never stand before others that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled, Counts, Estimated, Memory, open_ended
from automesh.report.words import versus_exported
from automesh.tuner.choose.partly_counted import partly_counted, wholly_counted
from automesh.tuner.choose.ranking import estimated_candidates, promising, rank_ahead

LOOP = "loop of unknown length (a.py:3): how often it runs depends on the data"
SORT = "arithmetic of `sort`: only its bytes are counted"
MEMORY = Memory(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=1, peak_bytes=3)


def plan(mesh: str, *, dynamic: bool = False) -> Plan:
    return Plan(axes=parse_mesh(mesh, ("dp", "tp")), knobs=(("dynamic", dynamic),))


def estimated(step_s: float, *uncounted: str) -> Estimated:
    return Estimated(
        step_s=step_s,
        bracket_s=(step_s, step_s),
        bound_s=0.0,
        memory_bytes=1,
        causes=(("compute", step_s),),
        uncounted=uncounted,
    )


def compiled(step_s: float, *uncounted: str) -> Compiled:
    return Compiled(
        fingerprint=str(step_s),
        memory=MEMORY,
        counts=Counts(flops=1, hbm_bytes=1, collectives=(), uncounted=uncounted),
        step_s=step_s,
        compile_s=1.0,
    )


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        (LOOP, True),
        ("loop `while.3` (a.py:3) of unknown length counted once (4 times)", True),
        ("custom call `mine`", True),
        ("custom call `mine` (2 times)", True),
        ("custom call mine: it states no cost: only its operands and results are counted", True),
        ("custom call mine: it states no cost: counted by its matrix products and blocks", False),
        ("`infeed`: the way to the host or to another program has no price", True),
        (SORT, False),
        ("conditional: which branch runs depends on the data", False),
    ],
)
def test_what_may_take_any_time(text: str, is_open: bool) -> None:
    assert bool(open_ended([text])) is is_open


def test_a_plan_is_no_winner_by_what_is_not_counted() -> None:
    quick, slow = plan("dp:8", dynamic=True), plan("dp:8")
    estimates = {quick: estimated(1e-5, LOOP), slow: estimated(2e-4)}
    rows = estimated_candidates(estimates, baseline=(), device_memory_bytes=0)
    assert [row.plan for row in rows] == [slow, quick]
    assert rows[0].standing.verdict == "best" and versus_exported(rows[1]) == "?"
    programs = {quick: compiled(1e-5, "loop `w` of unknown length counted once")}
    programs |= {slow: compiled(2e-4)}
    ahead = rank_ahead(compiled=programs, screened={}, estimates={}, baseline=())
    assert [row.plan for row in ahead] == [slow, quick]
    assert wholly_counted(estimates) == {slow: estimates[slow]}


def test_a_program_of_low_effort_is_ranked_by_its_estimate_or_not_at_all() -> None:
    low, without, full = plan("dp:8"), plan("dp:4,tp:2"), plan("tp:8")
    screened = {one: replace(compiled(1e-6), effort="low") for one in (low, without)}
    rows = rank_ahead(
        compiled={full: compiled(2e-4)},
        screened=screened,
        estimates={low: estimated(1e-4)},
        baseline=(),
    )
    assert {row.plan for row in rows} == {low, full}
    (of_low,) = (row for row in rows if row.plan == low)
    assert of_low.outcome == estimated(1e-4) and of_low.compiled == screened[low]


def test_what_every_plan_has_says_nothing_about_their_order() -> None:
    first, second = plan("dp:8"), plan("tp:8")
    both = {first: estimated(1.0, LOOP, SORT), second: estimated(2.0, LOOP)}
    assert partly_counted(both) == frozenset()
    other = replace(both[second], uncounted=(LOOP, LOOP.replace("a.py:3", "a.py:9")))
    assert partly_counted({**both, second: other}) == {second}


def test_one_of_them_is_raced_all_the_same() -> None:
    known = {plan(mesh): compiled(time) for mesh, time in (("dp:8", 1.0), ("tp:8", 2.0))}
    known[plan("dp:8", dynamic=True)] = compiled(0.1, "custom call `mine`")
    known[plan("tp:8", dynamic=True)] = compiled(0.2, "custom call `mine`")
    assert promising(known, first=(), limit=2) == (plan("dp:8"), plan("dp:8", dynamic=True))
    assert promising(known, first=(), limit=1) == (plan("dp:8"),)


@pytest.mark.parametrize(
    ("own_s", "is_first"), [(2e-4, True), (2e-4 * (1 + 1e-6), True), (2.001e-4, False)]
)
def test_the_scripts_own_plan_comes_before_others_of_the_same_time(
    own_s: float, is_first: bool
) -> None:
    own, other, slower = plan("tp:8"), plan("dp:8"), plan("dp:4,tp:2")
    expected = [own, other, slower] if is_first else [other, own, slower]
    estimates = {other: estimated(2e-4), own: estimated(own_s), slower: estimated(3e-4)}
    rows = estimated_candidates(estimates, baseline=[own], device_memory_bytes=0)
    assert [row.plan for row in rows] == expected
    assert rows[0].standing.verdict == "best"
    programs = {one: compiled(value.step_s) for one, value in estimates.items()}
    ahead = rank_ahead(compiled=programs, screened={}, estimates=estimates, baseline=[own])
    assert [row.plan for row in ahead] == expected
    # What nobody counted is no reason to keep it.
    open_ended = estimates | {own: estimated(own_s, LOOP)}
    rows = estimated_candidates(open_ended, baseline=[own], device_memory_bytes=0)
    assert [row.plan for row in rows] == [other, slower, own]
