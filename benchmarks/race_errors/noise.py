"""Races on simulated machines: how often a race errs, what it finds, how many rounds it takes.

Three methods: the race of the package; the former one, kept here for comparison; and the
textbook's, a fixed number of rounds and one test of each finalist at the end.

Noise comes in two ways. Of a `machine` it goes along with time, and hits whoever runs then: the
race samples its finalists in turns of a hundredth of a second, as a search does where memory
suffices, the others visit them one after the other, as all did before. Noise of a `plan` is a
series of each finalist's own, which nothing but more rounds can average: the worst case, in which
all methods see the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.statistics import Floats, trimmed_mean

RULES = RaceRules()
FIXED_ROUNDS = 20
NOISES = ("independent", "correlated", "strongly correlated", "bimodal", "one in twenty", "drift")
_CORRELATIONS = {"correlated": 0.5, "strongly correlated": 0.8}
IN_TIME = NOISES[:-1]  # a drift of one plan alone is not the machine's
PROCESSES = (5, 6, 8, 12)
_VISITS = 4  # of a plan in one fresh process
_TURNS = 15  # of a finalist in a round, of a hundredth of a second each: as long as a visit
_SAMPLES = 3  # of a visit
_MEDIAN_OF_THREE = 0.6701  # standard deviation of the median of three standard normal numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How one race of one method ended.

    Attributes:
      slower: finalists that were called slower, with the rounds that each of them ran.
      visits: of all finalists.
    """

    slower: dict[int, int]
    visits: int


Method = Callable[[Floats], Finish]
Sampling = Literal["own", "turns", "visits"]


def noise(kind: str, rng: np.random.Generator, finalists: int, rounds: int, size: float) -> Floats:
    """Logarithms of what a machine adds to each visit, shape (finalists, rounds).

    Args:
      kind: one of `NOISES`. Series are a finalist's own: what all share, rounds take out.
      size: standard deviation of a visit; of `drift` of a random walk's step.
    """
    normal = rng.standard_normal((finalists, rounds))
    match kind:
        case "independent":
            return size * normal
        case "correlated" | "strongly correlated":
            return size * _series(normal, _CORRELATIONS[kind])
        case "bimodal":
            return 0.3 * size * normal + 2 * size * (rng.random(normal.shape) < 0.5)
        case "one in twenty":
            return 0.5 * size * normal + math.log(1.5) * (rng.random(normal.shape) < 0.05)
        case "drift":
            return 0.3 * size * np.cumsum(normal, axis=1) + size * rng.standard_normal(normal.shape)
        case _:
            raise ValueError(f"no noise is called {kind}")


def machine_noise(
    kind: str, rng: np.random.Generator, finalists: int, rounds: int, size: float, *, turns: bool
) -> Floats:
    """Logarithms of what a machine adds to a finalist's value of each round, which goes along with
    time; shape (finalists, rounds).

    Args:
      kind: one of `IN_TIME`. What lasts does so for about a visit, 0.15 s: a correlation is that of
        one visit and the next, a mode or a disturbance changes after each. Independent noise
        changes with every turn, of a hundredth of a second.
      size: standard deviation of a visit.
      turns: finalists take turns, forwards and backwards, and the extreme fifths of a finalist's
        samples are left out; else each is visited by itself in a shuffled order, for the median of
        three samples.
    """
    slots = _slots(kind, rng, finalists * rounds * _TURNS, size)
    if turns:
        taken = slots.reshape(rounds, _TURNS, finalists)
        taken[:, 1::2] = taken[:, 1::2, ::-1]
        kept = np.sort(taken, axis=1)[:, _TURNS // 5 : _TURNS - _TURNS // 5]
        return kept.mean(axis=1).T
    samples = slots.reshape(rounds, finalists, _SAMPLES, _TURNS // _SAMPLES).mean(axis=3)
    return rng.permuted(np.median(samples, axis=2), axis=1).T


def _slots(kind: str, rng: np.random.Generator, count: int, size: float) -> Floats:
    """Logarithms of what a machine adds to each hundredth of a second."""
    normal = rng.standard_normal(count)
    # So that the median of three means of five has the standard deviation `size`.
    white = normal * size * math.sqrt(_TURNS / _SAMPLES) / _MEDIAN_OF_THREE
    visits = count // _TURNS + 2

    def lasting(values: Floats) -> Floats:
        """One value per visit, from anywhere in the first one on."""
        return np.repeat(values, _TURNS)[int(rng.integers(_TURNS)) :][:count]

    match kind:
        case "independent":
            return white
        case "correlated" | "strongly correlated":
            correlation = _CORRELATIONS[kind] ** (1 / _TURNS)
            return size * _series(normal[None, :], correlation)[0]
        case "bimodal":
            return 0.3 * white + 2 * size * lasting(1.0 * (rng.random(visits) < 0.5))
        case "one in twenty":
            return 0.5 * white + math.log(1.5) * lasting(1.0 * (rng.random(visits) < 0.05))
        case _:
            raise ValueError(f"no noise of a machine is called {kind}")


def race(values: Floats) -> Finish:
    """The race of the package."""
    found = Race(range(len(values)), rules=RULES, seed=0)
    while (visit := found.next_visit()) is not None:
        found.record(visit.finalist, float(values[visit.finalist, visit.round_index]))
    lengths = [len(found.values_of(finalist)) for finalist in range(len(values))]
    beaten = {one.finalist for one in found.standings() if one.state == "slower"}
    return Finish(slower={one: lengths[one] for one in beaten}, visits=sum(lengths))


def former_race(values: Floats) -> Finish:
    """The former race: a trimmed t for each pair by itself, all ordered pairs paid for."""
    looks = (4, 6, 9, 12, 16, 22, 30, 40)
    count, slower, visits, previous = len(values), dict[int, int](), 0, 0
    left = list(range(count))
    for done in looks:
        visits += len(left) * (done - previous)
        allowed = RULES.error * (done - previous) / looks[-1] / (count * (count - 1))
        previous = done
        logs = np.log(values[left, :done])
        correlation = _autocorrelation(logs)
        best = int(np.argmin(np.median(logs - np.median(logs, axis=0), axis=1)))
        gaps = {one: logs[row] - logs[best] for row, one in enumerate(left) if row != best}
        spans: list[tuple[float, float]] = []
        for one, gap in gaps.items():
            mean, error, freedom = _trimmed(gap, correlation)
            distance = mean - math.log1p(RULES.margin)
            if distance > 0 and stats.t.sf(distance / error, freedom) <= allowed:
                slower[one] = done
                continue
            reach = float(stats.t.isf(0.025, freedom)) * error
            spans.append((mean - reach, mean + reach))
        left = [one for one in left if one not in slower]
        near = math.log1p(RULES.equivalence)
        if len(left) < 2 or (done >= 6 and all(-near <= a and b <= near for a, b in spans)):
            break
    return Finish(slower=slower, visits=visits)


def fixed_sample(values: Floats) -> Finish:
    """Twenty rounds of everybody, then a paired t of each against the best (Bonferroni)."""
    count = len(values)
    logs = np.log(values[:, :FIXED_ROUNDS])
    best = int(np.argmin(logs.mean(axis=1)))
    allowed = RULES.error / (count * (count - 1))
    slower = {
        one: FIXED_ROUNDS
        for one in range(count)
        if one != best
        and stats.ttest_1samp(
            logs[one] - logs[best], math.log1p(RULES.margin), alternative="greater"
        ).pvalue
        <= allowed
    }
    return Finish(slower=slower, visits=count * FIXED_ROUNDS)


METHODS: dict[str, Method] = {"race": race, "former": former_race, "fixed": fixed_sample}
# How each samples finalists where the noise is a machine's.
SAMPLINGS: dict[str, tuple[str, Sampling]] = {
    "race": ("race", "turns"),
    "race, apart": ("race", "visits"),
    "former": ("former", "visits"),
    "fixed": ("fixed", "visits"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a method did under one noise.

    Attributes:
      wrong: share of races of equals in which anybody was called slower.
      found: share of races in which the slower one was, by how much it is slower.
      rounds: that the slower one ran, on average.
      visits: of a whole race with a slower one, on average.
    """

    wrong: float
    found: dict[str, float]
    rounds: dict[str, float]
    visits: dict[str, float]


def rates(
    method: Method,
    kind: str,
    *,
    races: int,
    finalists: int,
    size: float,
    slower: Sequence[float],
    seed: int,
    sampling: Sampling = "own",
    equals: int = 1,
) -> Rates:
    """Runs races of equals, and races in which the last one is slower.

    Args:
      slower: how much, 0.1 for 10 %.
      sampling: `own` gives each finalist a noise of its own; of a machine's noise, finalists are
        sampled in `turns` or by `visits`.
      equals: times as many races of equals as with a slower one: an error of 5 % is rare.
    """
    rng = np.random.default_rng(seed)

    def logs() -> Floats:
        shape = finalists, RULES.max_rounds
        if sampling == "own":
            return noise(kind, rng, *shape, size)
        return machine_noise(kind, rng, *shape, size, turns=sampling == "turns")

    def finishes(extra: float, count: int) -> list[Finish]:
        true_s = np.ones((finalists, 1))
        true_s[-1] += extra
        return [method(true_s * np.exp(logs())) for _ in range(count)]

    last = finalists - 1
    of = {f"{extra:.0%}": finishes(extra, races) for extra in slower}
    return Rates(
        wrong=float(np.mean([bool(one.slower) for one in finishes(0.0, equals * races)])),
        found={
            name: float(np.mean([last in one.slower for one in ran])) for name, ran in of.items()
        },
        rounds={
            name: float(np.mean([one.slower.get(last, RULES.max_rounds) for one in ran]))
            for name, ran in of.items()
        },
        visits={name: float(np.mean([one.visits for one in ran])) for name, ran in of.items()},
    )


def coverage(kind: str, *, processes: int, draws: int, size: float, seed: int) -> float:
    """How often the 95 % interval of a ratio holds the truth.

    Two equal plans are visited four times each in every fresh process; a process's value is their
    mean. A noise that hangs together does so over all visits, also from one process to the next.
    """
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(draws):
        logs = noise(kind, rng, 2, _VISITS * processes, size)
        means = logs.reshape(2, processes, _VISITS).mean(axis=2)
        low, high = trimmed_mean(means[0] - means[1]).interval(0.95)
        hits += low <= 0.0 <= high
    return hits / draws


def _series(normal: Floats, correlation: float) -> Floats:
    series = normal.copy()
    for index in range(1, normal.shape[1]):
        fresh = math.sqrt(1 - correlation**2) * normal[:, index]
        series[:, index] = correlation * series[:, index - 1] + fresh
    return series


def _trimmed(gap: Floats, correlation: float) -> tuple[float, float, int]:
    count = len(gap)
    cut = int(0.2 * count)
    kept = count - 2 * cut
    ordered = np.sort(gap)
    winsorized = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    variance = float(np.var(winsorized, ddof=1)) * (count - 1) / (kept * (kept - 1))
    widening = (1 + correlation) / (1 - correlation)
    return float(np.mean(ordered[cut : count - cut])), math.sqrt(variance * widening), kept - 1


def _autocorrelation(logs: Floats) -> float:
    residuals = logs - np.median(logs, axis=0)
    residuals = residuals - np.median(residuals, axis=1, keepdims=True)
    reach = 2.5 * 1.4826 * float(np.median(np.abs(residuals)))
    residuals = np.clip(residuals, -reach, reach)
    residuals = residuals - residuals.mean(axis=1, keepdims=True)
    power = float(np.sum(residuals**2))
    moment = float(np.sum(residuals[:, 1:] * residuals[:, :-1])) / power if power else 0.0
    return min(max(moment + (1 + 3 * moment) / logs.shape[1], 0.0), 0.8)
