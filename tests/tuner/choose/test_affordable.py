"""What a budget cannot buy is told with the budget that can."""

from __future__ import annotations

from dataclasses import replace

from automesh.program.capture.nouns import Capture, ScriptMesh, ScriptStep, SourceLine
from automesh.program.nouns import Entry
from automesh.tuner.choose.affordable import rule_s, short_budget_notice, short_compiles_notice

ENTRY = Entry(kind="script", location="/home/me/train.py")


def test_a_slow_start_is_told_with_the_budget_that_a_rule_needs() -> None:
    said = short_budget_notice(ENTRY, start_s=18.0, left_s=42.0, used_s=18.0)
    assert said.startswith(
        "a fresh process takes 18 s here: a confirmed rule needs about 2 min; give --budget 3m"
    )


def test_nothing_is_told_where_the_budget_suffices_or_starts_are_quick() -> None:
    assert short_budget_notice(ENTRY, start_s=18.0, left_s=rule_s(18.0), used_s=0.0) == ""
    assert short_budget_notice(ENTRY, start_s=4.9, left_s=20.0, used_s=0.0) == ""
    assert short_budget_notice(ENTRY, start_s=5.0, left_s=20.0, used_s=0.0)


def test_a_carried_script_needs_one_more_start() -> None:
    step = ScriptStep(
        name="step", defined_at=SourceLine(), called_at=SourceLine(), argument_bytes=0
    )
    mesh = ScriptMesh(axes=(("data", 8),), axis_types=("auto",), made_at=SourceLine())
    capture = Capture(mesh=mesh, step=step, carried_by="trace")
    entry = replace(ENTRY, capture=capture)
    assert short_budget_notice(entry, start_s=18.0, left_s=60.0, used_s=40.0) == ""
    again = replace(ENTRY, capture=replace(capture, carried_by=""))
    assert "give --budget" in short_budget_notice(again, start_s=18.0, left_s=60.0, used_s=40.0)


def test_compiles_that_the_budget_is_too_short_for_are_told_after_the_first_one() -> None:
    said = short_compiles_notice(95.0, at_once=2, left=9, left_s=100.0, used_s=140.0)
    assert said == (
        "a compile takes 2 min here, and 2 at a time: the budget is enough for about 4 of 9 more "
        "plans that promise much; give --budget 13m, or the same command again goes on with the "
        "others"
    )


def test_no_compiles_are_told_where_the_budget_suffices_or_they_are_quick() -> None:
    assert short_compiles_notice(95.0, at_once=2, left=9, left_s=400.0, used_s=140.0) == ""
    assert short_compiles_notice(4.0, at_once=1, left=9, left_s=1.0, used_s=140.0) == ""
    assert short_compiles_notice(95.0, at_once=1, left=0, left_s=0.0, used_s=140.0) == ""
