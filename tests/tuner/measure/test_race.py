"""The race as pure logic, on simulated machines: error, power, ties, disturbances, resuming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from automesh.tuner.measure.race import Race, RaceRules, Standing
from automesh.tuner.measure.statistics import (
    Floats,
    means_of,
    median_interval,
    middle_mean,
    paired_ratio,
    trimmed_mean,
)

RULES = RaceRules()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Noise of a simulated machine, per visit unless it says otherwise."""

    noise: float
    correlation: float = 0.0
    disturbed: float = 0.0
    drift: float = 0.0

    def rounds(self, rng: np.random.Generator, true_s: Sequence[float]) -> Floats:
        """Values of shape (finalists, rounds)."""
        shape = (len(true_s), RULES.max_rounds)
        noise = rng.standard_normal(shape)
        for index in range(1, shape[1]):
            fresh = math.sqrt(1 - self.correlation**2) * noise[:, index]
            noise[:, index] = self.correlation * noise[:, index - 1] + fresh
        drift = np.cumsum(rng.standard_normal(shape[1]) * self.drift)
        disturbed = 1 + 0.5 * (rng.random(shape) < self.disturbed)
        base = np.asarray(true_s, dtype=np.float64)[:, None]
        return base * np.exp(self.noise * noise + drift) * disturbed


QUIET = Machine(noise=0.02)
SHARED = Machine(noise=0.03, correlation=0.3, disturbed=0.05, drift=0.02)
NOISY = Machine(noise=0.05, correlation=0.3, disturbed=0.05, drift=0.02)


def run(values: Floats, seed: int = 0) -> Race[int]:
    race = Race(range(len(values)), rules=RULES, seed=seed)
    while (visit := race.next_visit()) is not None:
        race.record(visit.finalist, float(values[visit.finalist, visit.round_index]))
    return race


def races(machine: Machine, true_s: Sequence[float], count: int) -> list[Race[int]]:
    rng = np.random.default_rng(len(true_s))
    return [run(machine.rounds(rng, true_s), seed) for seed in range(count)]


def verdicts(race: Race[int]) -> list[str]:
    return [standing.state for standing in race.standings()]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("machine", [QUIET, SHARED, NOISY])
@pytest.mark.parametrize("finalists", [2, 5])
def test_identical_finalists_are_rarely_called_slower(machine: Machine, finalists: int) -> None:
    """At most 5 % of the races may err."""
    wrong = sum(len(race.survivors) < finalists for race in races(machine, [1.0] * finalists, 150))
    assert wrong <= 0.05 * 150


@pytest.mark.parametrize("machine", [QUIET, SHARED, Machine(noise=0.05)])
def test_ten_percent_slower_is_found(machine: Machine) -> None:
    found = races(machine, [1.0, 1.0, 1.0, 1.0, 1.1], 100)
    losers = [race for race in found if 4 not in race.survivors]
    assert len(losers) >= 95
    assert np.mean([len(race.values_of(4)) for race in losers]) <= 20


def test_ten_percent_slower_is_found_on_a_noisy_disturbed_drifting_machine() -> None:
    found = races(NOISY, [1.0, 1.0, 1.0, 1.0, 1.1], 120)
    assert sum(4 not in race.survivors for race in found) >= 102


def test_the_hopeless_leave_at_the_first_looks() -> None:
    found = races(SHARED, [1.0, 2.0, 1.0], 50)
    assert np.mean([len(race.values_of(1)) for race in found]) <= 7
    assert all(1 not in race.survivors for race in found)


def test_a_disturbed_machine_does_not_make_the_fast_one_slow() -> None:
    """Some disturbed visits to the fastest neither drop it nor hide the loser."""
    rng = np.random.default_rng(3)
    values = QUIET.rounds(rng, [1.0, 1.1])
    values[0, [1, 6, 11]] *= 3.0
    race = run(values)
    assert verdicts(race) == ["winner", "slower"]
    slower = race.standings()[1].to_winner
    assert slower is not None
    assert 1.05 < slower.value < 1.15


def test_drift_is_shared_within_a_round() -> None:
    """The machine slows down tenfold during the race; rounds are compared with themselves."""
    values = QUIET.rounds(np.random.default_rng(4), [1.0, 1.1, 1.0])
    race = run(values * np.geomspace(1, 10, RULES.max_rounds))
    assert race.standings()[1].state == "slower"
    assert {race.standings()[0].state, race.standings()[2].state} == {"winner", "open"}


def test_equally_fast_finalists_end_the_race_early_and_stay_open() -> None:
    race = run(Machine(noise=0.002).rounds(np.random.default_rng(5), [1.0, 1.0, 1.005]))
    assert race.ending == "equivalent"
    assert race.rounds_completed < 10
    assert sorted(verdicts(race)) == ["open", "open", "winner"]


def test_less_than_the_margin_is_never_slower() -> None:
    """A clock without noise: 0.9 % apart stays open, 1.1 % apart is slower, both for certain."""
    near = run(np.outer([1.0, 1.009], np.ones(RULES.max_rounds)))
    far = run(np.outer([1.0, 1.011], np.ones(RULES.max_rounds)))
    assert verdicts(near) == ["winner", "open"]
    assert verdicts(far) == ["winner", "slower"]
    assert far.ending == "few left"
    assert far.rounds_completed == 5  # the first look after which 1.1 % may be called slower
    assert str(far.standings()[1].to_winner) == "+1.1 % (+1.1 % to +1.1 %)"


def test_a_race_ends_when_as_few_are_left_as_are_wanted() -> None:
    values = np.outer([1.0, 1.004, 1.2, 1.3, 1.004], np.ones(RULES.max_rounds))
    race = Race(range(5), rules=RaceRules(keep=3), seed=0)
    while (visit := race.next_visit()) is not None:
        race.record(visit.finalist, float(values[visit.finalist, visit.round_index]))
    assert race.ending == "few left"
    assert race.survivors == (0, 1, 4)
    assert race.rounds_completed == 5


def test_those_that_are_few_from_the_beginning_run_one_round() -> None:
    race = Race("abc", rules=RaceRules(keep=3), seed=0)
    for _ in range(3):
        visit = race.next_visit()
        assert visit is not None
        race.record(visit.finalist, 1.0)
    assert race.ending == "few left"


def test_a_finalist_alone_still_gets_an_interval() -> None:
    race = run(QUIET.rounds(np.random.default_rng(6), [1.0]))
    assert race.ending == "few left"
    (standing,) = race.standings()
    assert standing.state == "winner"
    assert 0 < standing.interval_s[0] <= standing.step_s <= standing.interval_s[1] < math.inf


def test_looks_become_rarer_and_end_with_the_last_round() -> None:
    assert RULES.looks == (*range(4, 13), 14, 16, 18, 21, 24, 28, 32, 37, 40)
    assert RaceRules(max_rounds=4).looks == (4,)
    assert RaceRules(max_rounds=6).looks == (4, 5, 6)


@given(st.integers(2, 80))
def test_all_looks_together_spend_the_error_and_not_more(max_rounds: int) -> None:
    rules = RaceRules(max_rounds=max_rounds)
    spent = [rules.allowed(look) for look in rules.looks]
    assert min(spent) > 0.0
    assert sum(spent) <= rules.error * (1 + 1e-9)
    if max_rounds >= 5:
        assert sum(spent) == pytest.approx(rules.error, rel=0.03)


def test_every_round_visits_all_survivors_once_in_changing_order() -> None:
    race = Race("abcde", rules=RULES, seed=1)
    orders: list[str] = []
    for index in range(3):
        order = ""
        for _ in range(5):
            visit = race.next_visit()
            assert visit is not None
            assert visit.round_index == index
            order += visit.finalist
            race.record(visit.finalist, 1.0)
        orders.append(order)
    assert [sorted(order) for order in orders] == [list("abcde")] * 3
    assert len(set(orders)) == 3


def test_who_fails_leaves_and_the_round_goes_on() -> None:
    race = Race("abc", rules=RULES, seed=1)
    for _ in range(4):
        visit = race.next_visit()
        assert visit is not None
        race.record(visit.finalist, 1.0)
    visit = race.next_visit()
    assert visit is not None
    race.leave(visit.finalist)
    assert race.next_visit() is not None
    assert visit.finalist not in race.survivors
    standing = race.standings()["abc".index(visit.finalist)]
    assert standing.state == "left"
    assert len(standing.rounds_s) == 1


@pytest.mark.parametrize(("rounds", "ending"), [(5, "few left"), (3, "")])
def test_one_that_is_left_alone_runs_no_further_round_than_its_figure_needs(
    rounds: int, ending: str
) -> None:
    race = Race("ab", rules=RULES, seed=1, rounds={"a": [1.0] * rounds, "b": [1.0] * rounds})
    race.leave("a")
    assert race.ending == ending
    assert (race.next_visit() is None) is bool(ending)


def test_nobody_left() -> None:
    race = Race("ab", rules=RULES, seed=1)
    race.leave("a")
    race.leave("b")
    assert race.ending == "none left"
    assert race.next_visit() is None
    assert [standing.state for standing in race.standings()] == ["left", "left"]


def test_the_beaten_are_open_again_once_their_victor_has_failed() -> None:
    """Slower than a finalist that then crashed says nothing about those that remain."""
    values = np.outer([1.0, 1.1, 1.005], np.ones(RULES.max_rounds))
    race = Race(range(3), rules=RaceRules(equivalence=0.001), seed=0)
    while len(race.survivors) == 3:
        visit = race.next_visit()
        assert visit is not None
        race.record(visit.finalist, float(values[visit.finalist, visit.round_index]))
    assert verdicts(race) == ["winner", "slower", "open"]
    race.leave(0)
    assert verdicts(race) == ["left", "open", "winner"]


@given(
    true_s=st.lists(st.sampled_from([1.0, 1.0, 1.03, 1.1, 2.0]), min_size=1, max_size=5),
    visits=st.integers(min_value=0, max_value=150),
    failing=st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(0, 12))),
    seed=st.integers(min_value=0, max_value=1000),
)
@example(true_s=[1.0, 1.0], visits=10, failing=(0, 4), seed=2)
@settings(max_examples=40, deadline=None)
def test_a_resumed_race_goes_on_as_if_never_stopped(
    true_s: list[float], visits: int, failing: tuple[int, int] | None, seed: int
) -> None:
    values = SHARED.rounds(np.random.default_rng(seed), true_s)

    def advance(race: Race[int], limit: int) -> None:
        for _ in range(limit):
            visit = race.next_visit()
            if visit is None:
                break
            if (visit.finalist, visit.round_index) == failing:
                race.leave(visit.finalist)
            else:
                race.record(visit.finalist, float(values[visit.finalist, visit.round_index]))

    whole = Race(range(len(true_s)), rules=RULES, seed=seed)
    advance(whole, 10_000)
    cut = Race(range(len(true_s)), rules=RULES, seed=seed)
    advance(cut, visits)
    resumed = Race(
        range(len(true_s)),
        rules=RULES,
        seed=seed,
        rounds={key: cut.values_of(key) for key in range(len(true_s))},
        left={one.finalist for one in cut.standings() if one.state == "left"},
    )
    assert resumed.next_visit() == cut.next_visit()
    assert resumed.survivors == cut.survivors
    advance(resumed, 10_000)
    assert resumed.ending == whole.ending
    assert resumed.standings() == whole.standings()


def test_rounds_that_are_no_race_are_refused() -> None:
    with pytest.raises(ValueError, match="already has a value"):
        Race("ab", rules=RULES, seed=0, rounds={"a": [1.0, 1.0, 1.0], "b": [1.0]})
    for no_time_s in (math.nan, math.inf, 0.0, -0.5):
        with pytest.raises(ValueError, match="positive time"):
            Race("ab", rules=RULES, seed=0, rounds={"a": [no_time_s]})
    with pytest.raises(ValueError, match="different"):
        Race("aa", rules=RULES, seed=0)
    with pytest.raises(ValueError, match="different"):
        Race("", rules=RULES, seed=0)


def test_values_are_taken_only_from_those_who_are_due() -> None:
    race = Race("ab", rules=RULES, seed=0)
    race.record("a", 1.0)
    with pytest.raises(ValueError, match="already has a value"):
        race.record("a", 1.0)
    race.leave("a")
    with pytest.raises(ValueError, match="not in the race"):
        race.record("a", 1.0)
    with pytest.raises(ValueError, match="not in the race"):
        race.leave("a")
    over = run(np.ones((2, RULES.max_rounds)))
    with pytest.raises(ValueError, match="race is over"):
        over.record(0, 1.0)


def test_standings_before_and_after_the_first_round() -> None:
    race = Race("ab", rules=RULES, seed=0)
    assert [(one.state, one.step_s) for one in race.standings()] == [("open", 0.0)] * 2
    assert race.leader is None
    race.record("a", 1.0)
    assert [one.to_winner for one in race.standings()] == [None, None]
    race.record("b", 2.0)
    winner, other = race.standings()
    assert (winner.state, other.state) == ("winner", "open")
    assert race.leader == "a"
    assert str(other.to_winner) == "+100.0 %, from a single round"


def covered(standing: Standing[int], true_s: float) -> bool:
    return standing.interval_s[0] <= true_s <= standing.interval_s[1]


@pytest.mark.parametrize("rounds", [6, 12, 30])
def test_intervals_cover_the_median_as_often_as_they_say(rounds: int) -> None:
    """95 % intervals over rounds with one-sided disturbances, whose median is known."""
    rng = np.random.default_rng(rounds)
    disturbed, draws = 0.05, 400
    hits = 0
    # Median of the mixture 0.95 N(0, s) + 0.05 N(log 1.5, s): the normal quantile of 0.5 / 0.95.
    median = math.exp(0.03 * stats.norm.ppf(0.5 / (1 - disturbed)))
    for _ in range(draws):
        values = np.exp(0.03 * rng.standard_normal(rounds))
        values *= 1 + 0.5 * (rng.random(rounds) < disturbed)
        low, high = median_interval(values.tolist())
        hits += low <= median <= high
    assert stats.binomtest(hits, draws, 0.95, alternative="less").pvalue > 0.001


def test_the_ratio_interval_covers_the_ratio_under_drift() -> None:
    rng = np.random.default_rng(8)
    machine = Machine(noise=0.03, drift=0.05, disturbed=0.05)
    hits = 0
    for _ in range(200):
        values = machine.rounds(rng, [1.0, 1.2])
        ratio = paired_ratio(values[1].tolist(), values[0].tolist())
        hits += ratio.low <= 1.2 <= ratio.high
    assert stats.binomtest(hits, 200, 0.95, alternative="less").pvalue > 0.001


def test_one_round_bounds_nothing() -> None:
    assert median_interval([1.0]) == (0.0, math.inf)
    with pytest.raises(ValueError, match="no round in common"):
        paired_ratio([], [1.0])


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=40))
def test_an_interval_holds_the_median_and_is_scale_free(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= float(np.median(values)) <= high
    scaled = median_interval([4 * value for value in values])
    assert scaled == pytest.approx((4 * low, 4 * high), rel=1e-9)


@given(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=7))
def test_the_mean_of_few_values_is_students_with_a_wider_error(values: list[float]) -> None:
    """Below eight values nothing is cut, and scipy knows the answer."""
    got = trimmed_mean(np.asarray(values))
    if np.std(values) > 1e-6:
        expected = stats.ttest_1samp(values, 0.0)
        assert got.mean == pytest.approx(np.mean(values))
        widening = math.sqrt(1.2 / 0.8)
        assert got.mean / got.error * widening == pytest.approx(float(expected.statistic))
        assert got.freedom == len(values) - 1


def test_the_trimmed_error_agrees_with_scipys() -> None:
    """Against its own mirror image, Yuen's two-sample statistic is sqrt(2) mean / error."""
    values = 0.5 + np.random.default_rng(9).standard_normal(20)
    got = trimmed_mean(values)
    expected = stats.ttest_ind(values, -values, trim=0.2, equal_var=False)
    known = got.mean / got.error * math.sqrt(1.2 / 0.8)
    assert known == pytest.approx(float(expected.statistic) / math.sqrt(2))
    assert got.mean == pytest.approx(stats.trim_mean(values, 0.2))


@pytest.mark.parametrize("processes", [5, 6, 8, 12])
@pytest.mark.parametrize("noise", ["normal", "bimodal", "one in twenty", "correlated"])
def test_the_interval_of_a_ratio_covers(noise: str, processes: int) -> None:
    """95 % intervals over fresh processes hold the truth in 94 % of cases or more."""
    rng = np.random.default_rng(processes)
    shape = (2000, 2, processes)
    if noise == "normal":
        logs = 0.05 * rng.standard_normal(shape)
    elif noise == "bimodal":
        logs = 0.015 * rng.standard_normal(shape) + 0.1 * (rng.random(shape) < 0.5)
    elif noise == "one in twenty":
        logs = 0.02 * rng.standard_normal(shape) + math.log(1.5) * (rng.random(shape) < 0.05)
    else:  # Means of four visits of a series in which neighbours are correlated by 0.5.
        visits = rng.standard_normal((*shape[:2], 4 * processes))
        for index in range(1, 4 * processes):
            fresh = math.sqrt(0.75) * visits[:, :, index]
            visits[:, :, index] = 0.5 * visits[:, :, index - 1] + fresh
        logs = 0.05 * visits.reshape(*shape, 4).mean(axis=3)
    gaps = logs[:, 0] - logs[:, 1]
    found = [trimmed_mean(gap).interval(0.95) for gap in gaps]
    covered = np.mean([low <= 0.0 <= high for low, high in found])
    assert covered >= 0.94


def test_a_spread_that_all_show_is_known_after_few_rounds() -> None:
    """Of ten finalists after four rounds: the error of a difference, against its true size."""
    rng = np.random.default_rng(11)
    errors: list[float] = []
    for _ in range(100):
        means = means_of(0.05 * rng.standard_normal((10, 4)))
        errors.append(math.sqrt(2) * means.error(0, 1))
    true = 0.05 * math.sqrt(2 / 4)
    # Wider, since four rounds may be correlated; rarely far off.
    assert true < np.median(errors) < 2 * true
    assert np.quantile(errors, 0.9) < 3 * np.quantile(errors, 0.1)


def test_rounds_that_hang_together_widen_the_error() -> None:
    rng = np.random.default_rng(12)
    plain, correlated = (
        np.mean(
            [
                means_of(np.log(machine.rounds(rng, [1.0] * 5))).error(0, 1)
                for machine in [Machine(noise=0.05, correlation=correlation)] * 50
            ]
        )
        for correlation in (0.0, 0.5)
    )
    # The standard error of a mean grows by sqrt((1 + r) / (1 - r)).
    assert 1.4 < correlated / plain < 2.0


def test_means_of_a_clock_without_noise_have_no_error() -> None:
    means = means_of(np.log(np.outer([1.0, 1.02], np.ones(5))))
    assert means.error(0, 1) == 0.0
    assert means.is_above(1, 0, margin=0.01, allowed=0.01, among=2)
    assert not means.is_above(1, 0, margin=0.03, allowed=0.01, among=2)


def test_one_disturbed_visit_moves_a_mean_little() -> None:
    logs = 0.02 * np.random.default_rng(13).standard_normal((5, 8))
    disturbed = logs.copy()
    disturbed[2, 3] += math.log(3.0)
    assert abs(means_of(disturbed).values[2] - means_of(logs).values[2]) < 0.02


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30))
def test_the_middle_of_samples_in_turns_is_among_them(samples: list[float]) -> None:
    middle = middle_mean(samples)
    assert min(samples) * (1 - 1e-12) <= middle <= max(samples) * (1 + 1e-12)


def test_the_middle_of_samples_bears_disturbed_ones_and_scatters_less_than_the_median() -> None:
    samples = np.random.default_rng(7).normal(1.0, 0.01, (400, 15))
    middles = [middle_mean(row) for row in samples.tolist()]
    assert np.std(middles) < 0.95 * np.std(np.median(samples, axis=1))
    samples[:, [2, 7, 11]] *= 3.0
    assert abs(np.mean([middle_mean(row) for row in samples.tolist()]) - 1.0) < 0.01
    assert middle_mean([1.0, 9.0, 1.1]) == 1.1
