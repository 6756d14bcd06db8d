"""Recorded searches, replayed: what the bound and the model would have said at every moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from automesh.hardware import chip_for
from automesh.mesh.axes import Plan
from automesh.outcomes import Measured, Outcome
from automesh.tuner.choose.certificate import excluded_by_bound
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.choose.state import SearchState
from tests.regenerate.record_studies import FOLDER, Recorded, read

STUDIES = sorted(FOLDER.glob("*.json"))


def test_no_recorded_study_names_files_of_the_machine_that_made_it() -> None:
    for path in FOLDER.glob("*.json"):
        assert "Traceback" not in path.read_text(encoding="utf-8"), path.name


def test_there_are_recorded_studies() -> None:
    assert [path.stem for path in STUDIES] == ["dense_lm", "long_context", "moe_lm"]


@pytest.fixture(params=STUDIES, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    path: Path = request.param
    return read(path)


def measured_of(recorded: Recorded) -> dict[Plan, Measured]:
    found = {plan: one for plan, one in recorded.measured if may_be_exported(one)}
    return {plan: one for plan, one in found.items() if isinstance(one, Measured)}


def state_of(recorded: Recorded) -> SearchState:
    plans = [plan for plan, _ in recorded.compiled]
    return SearchState(
        plans=plans,
        estimates=dict(recorded.estimates),
        programs={},
        results={},
        baseline=(),
        usual=plans[0],
        chip=chip_for(recorded.device_kind, recorded.platform),
        top=6,
        device_memory_bytes=0,
    )


def test_the_bound_never_rules_out_the_measured_winner(recorded: Recorded) -> None:
    estimates, measured = dict(recorded.estimates), measured_of(recorded)
    fastest = min(measured, key=lambda plan: measured[plan].step_s)
    assert all(one.bound_s <= one.bracket_s[0] for one in estimates.values())
    draw = np.random.default_rng(0)
    for _ in range(200):
        others: list[Plan] = [plan for plan in measured if draw.random() < 0.5]
        known: dict[Plan, Outcome] = {plan: measured[plan] for plan in others if plan != fastest}
        assert fastest not in excluded_by_bound(estimates, known)


def test_no_plan_is_faster_than_its_bound(recorded: Recorded) -> None:
    estimates = dict(recorded.estimates)
    for plan, one in measured_of(recorded).items():
        if plan in estimates:
            assert estimates[plan].bound_s <= one.interval_s[1]


def test_measurements_bring_the_estimates_nearer(recorded: Recorded) -> None:
    measured, estimates = measured_of(recorded), dict(recorded.estimates)
    known = {plan: one for plan, one in measured.items() if plan in estimates}
    view = state_of(recorded).knowing(dict(recorded.compiled), dict(known)).view()
    assert view.refinement is not None and view.refinement.loo_error is not None
    raw = [np.log(estimates[plan].step_s / one.step_s) for plan, one in known.items()]
    refined = [np.log(view.step_s(plan) / one.step_s) for plan, one in known.items()]
    assert np.mean(np.square(refined)) < np.mean(np.square(raw))
    assert view.refinement.loo_error < 0.3


def test_the_sentences_of_the_end(recorded: Recorded) -> None:
    measured = dict(recorded.measured)
    state = state_of(recorded).knowing(dict(recorded.compiled), measured)
    best_s = state.best_s()
    assert best_s is not None
    certain, believed = state.certificate(best_s), state.belief(best_s)
    assert str(len(state.left())) in certain
    assert "no certificate" in certain  # CPU devices have no known peak
    assert f"over {len(measured)} measured plans" in believed
    for sentence in (certain, believed):
        assert ("bound" in sentence or "sound" in sentence) != ("leave-one-out" in sentence)
