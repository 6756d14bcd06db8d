"""How the benchmark of the race counts, without running it."""

from __future__ import annotations

import numpy as np
import pytest

from automesh.mesh.axes import Plan
from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.racing import RaceReport
from benchmarks.race_errors import command as race_errors
from benchmarks.race_errors import finals
from benchmarks.race_errors.command import EXTRA, FINALISTS, Tally, count, plan, summary
from benchmarks.race_errors.noise import IN_TIME, METHODS, NOISES, machine_noise, noise

EVERYONE = [plan(copy, 0) for copy in range(FINALISTS)]
SLOW, LITTLE = plan(0, EXTRA), plan(0, race_errors.LITTLE)


def report(step_s: dict[Plan, float]) -> RaceReport:
    """A race on a clock without noise."""
    race = Race(tuple(step_s), rules=RaceRules(), seed=0)
    while (visit := race.next_visit()) is not None:
        race.record(visit.finalist, step_s[visit.finalist])
    assert race.ending
    return RaceReport(ended=race.ending, standings=race.standings(), failures=())


def test_errors_and_finds_are_counted() -> None:
    tally = Tally()
    count(tally, report(dict.fromkeys(EVERYONE, 1.0)), None)
    count(tally, report({**dict.fromkeys(EVERYONE, 1.0), EVERYONE[3]: 1.1}), None)
    count(tally, report({**dict.fromkeys(EVERYONE[1:], 1.0), SLOW: 1.1}), SLOW)
    count(tally, report({**dict.fromkeys(EVERYONE[1:], 1.0), SLOW: 1.0}), SLOW)
    found = summary(tally, 9.6)
    assert (found["comparisons"], found["wrongly_different"], found["races_wrong"]) == (10, 1, 1)
    assert found["false_positive_rate"] == 0.1
    assert found["detection_rate"] == 0.5
    assert found["detection_rate_5_percent"] == 0.0
    assert found["slower_measured"] == 1.1
    assert found["rounds_until_found_mean"] == 5  # the first look of more than the hopeless
    count(tally, report({**dict.fromkeys(EVERYONE[1:], 1.0), LITTLE: 1.05}), LITTLE)
    assert summary(tally, 9.6)["detection_rate_5_percent"] == 1.0
    assert summary(tally, 9.6)["detection_rate"] == 0.5


@pytest.mark.parametrize(("wrong", "upper"), [(0, 0.0188), (3, 0.0432), (4, 0.0503)])
def test_the_upper_bound_is_wilsons(wrong: int, upper: float) -> None:
    """For no error by hand: z^2 / (200 + z^2). Three errors pass a bound of 5 %, four do not."""
    tally = Tally(slower=[1] * wrong + [0] * (40 - wrong), found=[True], rounds=[30])
    assert summary(tally, 1.0)["false_positive_upper"] == pytest.approx(upper, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_calls_the_slower_one_slower_on_a_clock_without_noise(method: str) -> None:
    values = np.ones((4, RaceRules().max_rounds))
    values[2] = 1.2
    values *= np.exp(1e-6 * np.random.default_rng(0).standard_normal(values.shape))
    found = METHODS[method](values)
    assert set(found.slower) == {2}
    assert found.visits < values.size


@pytest.mark.parametrize("kind", NOISES)
def test_noise_has_the_size_that_is_asked_for(kind: str) -> None:
    logs = noise(kind, np.random.default_rng(1), 50, 40, 0.05)
    assert logs.shape == (50, 40)
    assert 0.02 < np.std(np.diff(logs, axis=1)) < 0.2


@pytest.mark.parametrize("kind", IN_TIME)
def test_noise_of_a_machine_has_the_size_that_is_asked_for_and_turns_share_what_lasts(
    kind: str,
) -> None:
    """Seen between finalists of one round; what changes at once does not become less by turns."""
    apart, turns = (
        machine_noise(kind, np.random.default_rng(1), 8, 400, 0.05, turns=is_turns)
        for is_turns in (False, True)
    )
    assert apart.shape == turns.shape == (8, 400)
    assert 0.02 < np.std(apart) < 0.2
    within = [float(np.median(np.std(logs, axis=0))) for logs in (apart, turns)]
    assert within[1] < (1.15 if kind == "independent" else 0.9) * within[0]


def test_the_summary_takes_the_worst_case_and_all_rounds() -> None:
    found = race_errors.summary_of(
        {"machine, a, race": 0.01, "plan, b, race": 0.04, "plan, drift, race": 0.8},
        {
            "machine, a": {"race": 5.0, "race, apart": 7.0, "former": 10.0},
            "machine, c": {"race": 4.0, "race, apart": 5.0, "former": 5.0},
            "plan, b": {"race": 40.0, "former": 20.0},
        },
    )
    assert found["wrong_at_most"] == 0.04
    assert found["wrong_under_drift_of_a_plan"] == 0.8
    assert found["rounds_to_former"] == 0.6
    assert found["rounds_to_former_apart"] == 0.8
    assert found["rounds_to_former_by_case"] == {"machine, a": 0.5, "machine, c": 0.8}


@pytest.mark.parametrize("method", finals.METHODS)
def test_finals_without_noise_adopt_what_is_faster_alone(method: str) -> None:
    run = finals.METHODS[method]
    quiet = 1e-9 * np.random.default_rng(0).standard_normal((3, finals.MOST))
    true = np.array([0.0, -0.1, 0.0])
    ended = run(true[:, None] + quiet, true)
    assert (ended.adopted, ended.settled) == (1, True)
    assert ended.processes <= finals.FIXED
    equal = run(quiet, np.zeros(3))
    assert equal.settled


def test_finals_err_as_seldom_and_hold_the_truth_as_often_as_they_say() -> None:
    """The figures of the whole benchmark, of fewer finals: at least 94 % and at most 5 %."""
    for kind in ("independent", "correlated", "bimodal", "one in twenty"):
        found = finals.figures(finals.sequential, kind, finals=30, size=0.05, faster=0.0, seed=2)
        assert found["covered"] >= 0.94
        assert found["adopted"] <= 0.05
