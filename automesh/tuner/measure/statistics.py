"""Intervals and tests over the rounds of a race; plain functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from automesh.units import format_change

Floats = NDArray[np.float64]
_TRIM = 0.2  # share cut from each end: Wilcox, "Introduction to Robust Estimation", recommends 20 %
_FEWEST_TO_CUT = 8
_FEWEST_OF_A_MEAN = 5
# The assumed correlation of neighbouring values: that of means of four visits each, if neighbouring
# visits have a correlation of 0.5.
_CORRELATION = 0.2
_REACH = 3.25  # in robust deviations: of normal visits, one in a thousand is further out
_POOLED_FREEDOM = 6
_ROUNDING = 1e-20  # a variance of logarithms below this is rounding
# Correlations of neighbouring rounds, and their prior weights.
_CORRELATIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PRIOR = (3.0, 1.5, 1.5, 1.2, 1.0, 1.0, 1.0, 1.5, 3.0, 6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The ratio of two times, with its interval; 1.1 means 10 % slower."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"{format_change(self.value)}, from a single round"
        low, high = format_change(self.low), format_change(self.high)
        return f"{format_change(self.value)} ({low} to {high})"


def median_interval(rounds_s: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns an interval of the median round time; it contains the median of the given rounds.

    Args:
      rounds_s: one value per round, at least one. A single round bounds nothing: (0, inf).
    """
    if len(rounds_s) < 2:
        return 0.0, math.inf
    low, high = trimmed_mean(np.log(np.asarray(rounds_s))).interval(confidence)
    middle = float(np.median(rounds_s))
    return min(math.exp(low), middle), max(math.exp(high), middle)


def middle_mean(samples_s: Sequence[float]) -> float:
    """Returns the mean of the samples of a plan that was sampled in turns, without the extreme
    fifths.

    For fifteen undisturbed samples it scatters an eighth less than the median, and like the median
    it tolerates some disturbed ones. For fewer than five samples it is the median.

    Args:
      samples_s: seconds per step, at least one.
    """
    if len(samples_s) < _FEWEST_OF_A_MEAN:
        return float(np.median(samples_s))
    cut = int(_TRIM * len(samples_s))
    ordered = sorted(samples_s)
    return float(np.mean(ordered[cut : len(ordered) - cut]))


def paired_ratio(
    rounds_s: Sequence[float], reference_s: Sequence[float], *, confidence: float = 0.95
) -> Ratio:
    """Returns the ratio to a reference that was visited in the same rounds: from the mean logarithm
    of the ratios of each round.

    Args:
      rounds_s: values of the plan; only rounds that both have are used.
      reference_s: values of the reference, round by round.

    Raises:
      ValueError: they have no round in common.
    """
    common = min(len(rounds_s), len(reference_s))
    if common == 0:
        raise ValueError("no round in common")
    logs = np.log(np.asarray(rounds_s[:common]) / np.asarray(reference_s[:common]))
    if common == 1:
        return Ratio(value=float(np.exp(logs[0])), low=0.0, high=math.inf)
    mean = trimmed_mean(logs)
    low, high = mean.interval(confidence)
    return Ratio(value=math.exp(mean.mean), low=math.exp(low), high=math.exp(high))


def t_limit(above: float, freedom: float) -> float:
    """Returns the value that Student's t exceeds with a probability of `above`, below a half."""
    # Imported here because SciPy is slow to import, and a search that measures nothing does not
    # need it.
    from scipy import special

    return -float(special.stdtrit(freedom, above))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean:
    """A trimmed mean, its standard error from the winsorized variance, and the degrees of freedom.

    Tukey and McLaughlin, Sankhya A 25 (1963): (mean - mu) / error is nearly Student's t.
    """

    mean: float
    error: float
    freedom: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """Returns a two-sided interval of the true mean."""
        reach = t_limit((1 - confidence) / 2, self.freedom) * self.error
        return self.mean - reach, self.mean + reach


def trimmed_mean(values: Floats) -> TrimmedMean:
    """Returns the trimmed mean of a series of rounds or of fresh processes, some of which may have
    been disturbed.

    A fifth is cut from each end if there are eight values or more. With fewer values nothing is
    cut: the lost degrees of freedom would cost more than a disturbed value, which only widens the
    interval. The error assumes that neighbouring values are correlated by `_CORRELATION`. How often
    intervals hold the truth, by simulation: `python -m benchmarks.race_errors`.

    Args:
      values: at least two, in order of time.
    """
    count = len(values)
    if count < 2:
        raise ValueError("a spread needs at least two rounds")
    cut = int(_TRIM * count) if count >= _FEWEST_TO_CUT else 0
    kept = count - 2 * cut
    ordered = np.sort(values)
    winsorized = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    variance = float(np.var(winsorized, ddof=1)) * (count - 1) / (kept * (kept - 1))
    widening = (1 + _CORRELATION) / (1 - _CORRELATION)
    return TrimmedMean(
        mean=float(np.mean(ordered[cut : count - cut])),
        error=math.sqrt(variance * widening),
        freedom=kept - 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Mean logarithms of the finalists of a race, and their possible errors.

    Attributes:
      values: one mean per finalist, after the level of each round was subtracted.
      variances: the variances of these means, including the correlation of neighbouring rounds.
      freedom: degrees of freedom of the variances.
    """

    values: Floats
    variances: Floats
    freedom: int

    def error(self, one: int, other: int) -> float:
        """Returns the standard error of a difference of two means divided by the square root of
        two, as the studentized range defines it."""
        return math.sqrt((self.variances[one] + self.variances[other]) / 2)

    def is_above(self, one: int, other: int, *, margin: float, allowed: float, among: int) -> bool:
        """Whether a mean is above another one by more than `margin`, for any two of the means.

        Tukey's studentized range allows for all pairs at once, and for a best one that the data
        chose.

        Args:
          allowed: chance of a wrong "yes" for any pair.
          among: number of finalists from which the two were chosen.
        """
        distance = float(self.values[one] - self.values[other]) - margin
        error = self.error(one, other)
        if error == 0.0 or distance <= 0.0:
            return distance > 0.0
        return distance / error >= _range_limit(allowed, among, self.freedom)

    def interval(self, one: int, other: int, confidence: float) -> tuple[float, float]:
        """Returns a two-sided interval of one difference of means, without regard to other
        pairs."""
        distance = float(self.values[one] - self.values[other])
        limit = t_limit((1 - confidence) / 2, self.freedom)
        reach = limit * math.sqrt(2) * self.error(one, other)
        return distance - reach, distance + reach


def means_of(logs: Floats) -> Means:
    """Returns the means of finalists over the rounds that all of them ran.

    The spread of visits depends more on the machine than on the plan, so the spread is pooled over
    all finalists: after three rounds of ten finalists it is estimated from 18 numbers instead of
    two. A finalist's own spread is weighted by its degrees of freedom, that of the pool by
    `_POOLED_FREEDOM`. Disturbed visits are limited to `_REACH` robust deviations from the median.

    Args:
      logs: shape (finalists, rounds), both at least 2: logarithms of round values.
    """
    finalists, rounds = logs.shape
    level = np.median(logs, axis=0) if finalists > 2 else logs.mean(axis=0)
    centred = logs - level
    medians = np.median(centred, axis=1, keepdims=True)
    residuals = centred - medians
    moved = np.abs(residuals[residuals != 0.0])
    reach = _REACH * 1.4826 * float(np.median(moved)) if moved.size else 0.0
    centred = medians + np.clip(residuals, -reach, reach)
    means = centred.mean(axis=1)
    residuals = centred - means[:, None]
    count = (finalists - 1) * (rounds - 1)
    pooled = float(np.sum(residuals**2)) / count
    if pooled < _ROUNDING:
        return Means(values=means, variances=np.zeros(finalists), freedom=count)
    own = np.sum(residuals**2, axis=1) / (rounds - 1)
    share = (_POOLED_FREEDOM + (rounds - 1) * own / pooled) / (_POOLED_FREEDOM + rounds - 1)
    return Means(
        values=means,
        variances=_variance_of_mean(residuals, count) * share,
        freedom=min(count, _POOLED_FREEDOM + rounds - 1),
    )


def _variance_of_mean(residuals: Floats, count: int) -> float:
    """Returns the variance of a mean over rounds whose neighbours have an unknown correlation.

    It is averaged over first-order autoregressive series of correlation 0 to 0.9, each weighted by
    its restricted likelihood (Patterson and Thompson, Biometrika 58, 1971) times `_PRIOR`: a few
    rounds determine the correlation poorly, and must not be treated as independent.
    """
    finalists, rounds = residuals.shape
    likelihoods: list[float] = []
    variances: list[float] = []
    for inverse, log_determinant, weight, spread in _series(rounds):
        weighted = residuals @ inverse
        squares = np.sum(weighted * residuals, axis=1) - np.sum(weighted, axis=1) ** 2 / weight
        scale = max(float(np.sum(squares)) / count, _ROUNDING)
        penalty = (finalists - 1) * (log_determinant + math.log(weight))
        likelihoods.append(-0.5 * (count * math.log(scale) + penalty))
        variances.append(scale * spread)
    chances = np.exp(np.asarray(likelihoods) - max(likelihoods)) * np.asarray(_PRIOR)
    return float(np.sum(chances * np.asarray(variances)) / np.sum(chances))


@cache
def _series(rounds: int) -> tuple[tuple[Floats, float, float, float], ...]:
    """Returns, for every correlation of `_CORRELATIONS` and so many rounds: the inverse of the
    correlation matrix, the logarithm of its determinant, the sum of the inverse, and the variance
    of a mean."""
    apart = np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    found: list[tuple[Floats, float, float, float]] = []
    for correlation in _CORRELATIONS:
        matrix = np.power(correlation, apart)
        inverse = np.linalg.inv(matrix)
        spread = float(matrix.sum()) / rounds**2
        found.append((inverse, float(np.linalg.slogdet(matrix)[1]), float(inverse.sum()), spread))
    return tuple(found)


@cache
def _range_limit(allowed: float, among: int, freedom: int) -> float:
    from scipy import stats  # The import takes half a second, and only a race needs it.

    return float(stats.studentized_range.isf(allowed, among, freedom))
