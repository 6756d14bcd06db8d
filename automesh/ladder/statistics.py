"""Intervals and tests over the rounds of a race; plain functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from automesh.units import format_change

Floats = NDArray[np.float64]
_TRIM = 0.2  # share cut from each end: Wilcox, "Introduction to Robust Estimation", recommends 20 %
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as slow as another one thing is, with its interval; 1.1 is 10 % slower."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"{format_change(self.value)}, from a single round"
        low, high = format_change(self.low), format_change(self.high)
        return f"{format_change(self.value)} ({low} to {high})"


def median_interval(rounds_s: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median over rounds, from resampling whole rounds (percentile bootstrap).

    Args:
      rounds_s: one value per round, at least one. A single round bounds nothing: (0, inf).
    """
    if len(rounds_s) < 2:
        return 0.0, math.inf
    # Seeded, so that a resumed search prints the figure that it printed before.
    found = stats.bootstrap(
        (np.asarray(rounds_s, dtype=np.float64),),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def paired_ratio(
    rounds_s: Sequence[float], reference_s: Sequence[float], *, confidence: float = 0.95
) -> Ratio:
    """Ratio to a reference visited in the same rounds: median of the ratios of each round.

    Args:
      rounds_s: values of the one; only the rounds that both have are used.
      reference_s: values of the other, round by round.

    Raises:
      ValueError: no round in common.
    """
    common = min(len(rounds_s), len(reference_s))
    if common == 0:
        raise ValueError("no round in common")
    ratios = [mine / other for mine, other in zip(rounds_s[:common], reference_s[:common])]
    low, high = median_interval(ratios, confidence=confidence)
    return Ratio(value=float(np.median(ratios)), low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean:
    """A 20 % trimmed mean, its standard error from the winsorized variance, degrees of freedom.

    Tukey and McLaughlin, Sankhya A 25 (1963): (mean - mu) / error is nearly Student's t.
    """

    mean: float
    error: float
    freedom: int

    def p_greater(self, than: float) -> float:
        """One-sided p-value of "the true mean is at most `than`"."""
        distance = self.mean - than
        if self.error == 0.0:
            return 0.0 if distance > 0 else 1.0
        return float(stats.t.sf(distance / self.error, self.freedom))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided interval of the true mean."""
        reach = float(stats.t.isf((1 - confidence) / 2, self.freedom)) * self.error
        return self.mean - reach, self.mean + reach


def trimmed_mean(values: Floats, *, autocorrelation: float = 0.0) -> TrimmedMean:
    """Trimmed mean of a series of rounds.

    Args:
      values: at least two, in order of time.
      autocorrelation: r of neighbouring rounds, in [0, 1): widens the error by
        sqrt((1 + r) / (1 - r)), the factor of a first-order autoregressive series.
    """
    count = len(values)
    if count < 2:
        raise ValueError("a spread needs at least two rounds")
    cut = int(_TRIM * count)
    kept = count - 2 * cut
    ordered = np.sort(values)
    winsorized = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    variance = float(np.var(winsorized, ddof=1)) * (count - 1) / (kept * (kept - 1))
    widening = (1 + autocorrelation) / (1 - autocorrelation)
    return TrimmedMean(
        mean=float(np.mean(ordered[cut : count - cut])),
        error=math.sqrt(variance * widening),
        freedom=kept - 1,
    )


def pooled_autocorrelation(logs: Floats) -> float:
    """Correlation of a finalist's neighbouring rounds, once what a round shares is taken out.

    Args:
      logs: shape (finalists, rounds), logarithms of round values.

    Returns:
      Estimate in [0, 0.8]: the moment estimate plus its own bias of -(1 + 3 r) / rounds (Kendall,
      Biometrika 41, 1954), never negative, since luck must not narrow an interval.
    """
    rounds = logs.shape[1]
    residuals = logs - np.median(logs, axis=0)
    residuals = residuals - np.median(residuals, axis=1, keepdims=True)
    # A disturbed round is no correlation, yet would fill the denominator: clip at 2.5 deviations.
    reach = 2.5 * 1.4826 * float(np.median(np.abs(residuals)))
    residuals = np.clip(residuals, -reach, reach)
    residuals = residuals - residuals.mean(axis=1, keepdims=True)
    power = float(np.sum(residuals**2))
    if power == 0.0:
        return 0.0
    moment = float(np.sum(residuals[:, 1:] * residuals[:, :-1])) / power
    return min(max(moment + (1 + 3 * moment) / rounds, 0.0), 0.8)
