"""Times that differ from process to process: no rule is made of them, and the machine is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.errors import NoFeasibleMesh
from automesh.outcomes import is_unsteady, is_wide
from automesh.report.files.rule import has_rule, rule_of
from automesh.report.result import SearchResult
from automesh.tuner.measure.final import LOOKS, Final, FinalRules
from automesh.tuner.measure.statistics import median_interval
from automesh.tuner.strategies import machine_load, search_run
from automesh.tuner.strategies.search_run import unsteady_time_notice
from tests.support.samples import results_samples
from tests.support.samples.results_samples import measured, plan

RESULT = results_samples.measured_search()
STEADY = (0.010, 0.0101, 0.0102)
FEW = (0.010, 0.0101, 0.0125)
UNSTEADY = (0.010, 0.011, 0.068)


def found(rounds_s: tuple[float, ...]) -> SearchResult:
    best, *others = RESULT.candidates
    outcome = measured(rounds_s[1], confirmed=True)
    outcome = replace(outcome, rounds_s=rounds_s, interval_s=median_interval(rounds_s))
    return replace(RESULT, candidates=(replace(best, outcome=outcome), *others))


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_run, "load_words", lambda: "the machine was busy (load 7.9)")


def test_a_time_that_processes_disagree_about_is_no_rule() -> None:
    result = found(UNSTEADY)
    assert not has_rule(result)
    with pytest.raises(NoFeasibleMesh, match=r"undecided: .* took 10.0 ms .* and 68.0 ms in") as no:
        rule_of(result)
    assert "run the same command again" in no.value.hint
    said = unsteady_time_notice(result)
    assert said.startswith("undecided: the machine was busy (load 7.9), and ")
    assert "no rule was written; the same command goes on" in said


def test_a_wide_interval_of_few_processes_that_agree_is_marked() -> None:
    result = found(FEW)
    assert has_rule(result)
    assert "is known to a factor of" in unsteady_time_notice(result)
    assert "the machine was busy (load 7.9)" in unsteady_time_notice(result)
    assert has_rule(found(STEADY)) and unsteady_time_notice(found(STEADY)) == ""
    unconfirmed = replace(RESULT.candidates[0], outcome=measured(1.0, confirmed=False))
    assert unsteady_time_notice(replace(RESULT, candidates=(unconfirmed,))) == ""


def test_the_same_command_goes_on_until_processes_agree() -> None:
    base, other = plan("dp:8"), plan("tp:8")

    def final(seconds: tuple[float, ...]) -> Final:
        rows = [{base: one, other: 2 * one} for one in seconds]
        return Final(rules=FinalRules(), baseline=(base,), incumbent=(), rows=rows, failed=set())

    assert final((0.01,) * LOOKS[0]).entrants([]) == ()
    assert final((0.01, 0.01, 0.011, 0.07, 0.05)).entrants([]) == (base,)
    assert final((0.01, 0.07) * (LOOKS[-1] // 2)).entrants([]) == ()


def test_the_load_is_told_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_others", lambda: ["ffmpeg 98 %"])
    monkeypatch.setattr(machine_load.os, "getloadavg", lambda: (7.94, 0.0, 0.0))
    said = machine_load.load_words()
    assert said.startswith("the machine was busy (load 7.9 on ")
    assert said.endswith("beside this search: ffmpeg 98 %)")
    monkeypatch.setattr(machine_load, "_others", list)
    monkeypatch.setattr(machine_load.os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    assert machine_load.load_words().startswith("the machine was not busy otherwise (load 0.1")


def test_wide_and_unsteady() -> None:
    outcomes = {one: found(one).candidates[0].outcome for one in (STEADY, FEW, UNSTEADY)}
    assert [is_wide(one) for one in outcomes.values()] == [False, True, True]  # pyright: ignore
    assert [is_unsteady(one) for one in outcomes.values()] == [False, False, True]  # pyright: ignore
