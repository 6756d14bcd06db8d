"""Which plan is exported: what a race and its confirmation say, and what they do not."""

from __future__ import annotations

import pytest

from automesh.errors import UsageError
from automesh.ladder.closing import decide
from automesh.ladder.confirm import Confirmation, Figure
from automesh.ladder.ranking import Comparison
from automesh.ladder.refusal import refuse_to_blame
from automesh.ladder.statistics import Ratio
from automesh.ladder.verdict import RaceVerdict
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, Measured
from tests.test_search_ranking import measured, plan

WINNER, BASELINE = plan("tp:4"), plan("dp:4")


def figure(which: Plan, step_s: float) -> Figure:
    return Figure(plan=which, rounds_s=(step_s,) * 3, step_s=step_s, interval_s=(step_s, step_s))


def decided(ratio: Ratio, race_verdict: str):
    comparison = Comparison(plan=BASELINE, verdict=race_verdict, ratio=3.0, interval=(2.9, 3.1))
    verdict = RaceVerdict(winner=WINNER, comparisons=(comparison,), sentence="")
    confirmation = Confirmation(
        winner=figure(WINNER, 1.0),
        baseline=figure(BASELINE, 3.0),
        to_winner=ratio,
        ended="all processes",
    )
    confirmed: dict[Plan, Measured] = {
        WINNER: measured(1.0, rounds_s=(1.0, 1.0, 1.0), confirmed=True),
        BASELINE: measured(3.0, confirmed=True),
    }
    return decide(verdict, confirmation, confirmed, baseline=[BASELINE])


@pytest.mark.parametrize("race_verdict", ["tie", "slower"])
def test_fresh_processes_decide_whatever_the_race_could_tell_apart(race_verdict: str) -> None:
    clear = Ratio(value=1.26, low=1.12, high=1.57)
    found = decided(clear, race_verdict)
    assert found.winner == WINNER
    assert not found.verification.is_tie
    assert found.verification.baseline == str(BASELINE)
    assert found.verification.processes == 3


@pytest.mark.parametrize("race_verdict", ["tie", "slower"])
def test_the_baseline_stays_while_fresh_processes_leave_it_open(race_verdict: str) -> None:
    found = decided(Ratio(value=1.01, low=0.98, high=1.04), race_verdict)
    assert found.winner == BASELINE
    assert found.verification.is_tie


def test_a_worker_that_cannot_start_is_no_plans_fault() -> None:
    refuse_to_blame(Failed(stage="build", reason="no"))
    with pytest.raises(UsageError, match="the disk is full"):
        refuse_to_blame(Failed(stage="start", reason="the disk is full"))
