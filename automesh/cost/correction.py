"""Corrects the estimates of plans by those that were measured: a Bayesian linear model (no jax).

The model explains the logarithm of measured over predicted time by the shares of the causes in a
plan's time, and by its settings. Weights have a Gaussian prior around 0, so that few measurements
correct little; the width of the prior and the noise of the times are averaged over a grid, weighted
by evidence (MacKay, Neural Computation 4 (1992), 415-447).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from automesh.mesh.axes import Scalar

Floats = NDArray[np.float64]

# Prior: an estimate may be wrong by a factor of up to e**3 that all plans share.
_COMMON_STD = 3.0
_WEIGHT_STDS = (0.03, 0.1, 0.3, 1.0)
_NOISE_STDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
_MIN_SAMPLE = 3  # with fewer measurements, a leave-one-out error means nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan:
    """A plan as the model sees it.

    Attributes:
      predicted_s: time of a step, estimated, or predicted from the compiled program.
      causes: (cause, seconds) that sum to `predicted_s`.
      settings: knobs and compiler options.
      evidence: source of `predicted_s`: the two kinds have different systematic errors.
    """

    predicted_s: float
    causes: tuple[tuple[str, float], ...]
    settings: tuple[tuple[str, Scalar], ...] = ()
    evidence: Literal["estimated", "compiled"] = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refinement:
    """The model's prediction for all plans.

    Attributes:
      step_s: [plans] median of the refined time of a step.
      loo_error: median, over the measured plans, of the relative error if each is predicted from
        the others; None for fewer than three.
      sample: number of measured plans.
    """

    step_s: Floats
    loo_error: float | None
    sample: int
    _mean: Floats  # [grid, plans] of log seconds
    _std: Floats  # [grid, plans]
    _weight: Floats  # [grid]

    def chance_below(self, seconds: float) -> Floats:
        """Returns the probability that a step takes less than `seconds`: [plans]."""
        score = (math.log(seconds) - self._mean) / self._std
        return np.asarray(self._weight @ ndtr(score), np.float64)

    def interval_s(self, row: int, chance: float = 0.95) -> tuple[float, float]:
        """Returns the interval that contains one plan's time with probability `chance`."""
        low, high = (1 - chance) / 2, (1 + chance) / 2
        return self._quantile(row, low), self._quantile(row, high)

    def _quantile(self, row: int, chance: float) -> float:
        mean, std = self._mean[:, row], self._std[:, row]
        below, above = float((mean - 9 * std).min()), float((mean + 9 * std).max())
        for _ in range(60):
            middle = (below + above) / 2
            if float(self._weight @ ndtr((middle - mean) / std)) < chance:
                below = middle
            else:
                above = middle
        return math.exp((below + above) / 2)


def refine(subjects: Sequence[PredictedPlan], measured_s: Mapping[int, float]) -> Refinement:
    """Fits the model to the measured times and predicts every plan.

    Args:
      subjects: all plans, the measured ones among them.
      measured_s: index into `subjects` -> seconds per step.
    """
    features, prior = _features(subjects)
    predicted = np.log([subject.predicted_s for subject in subjects])
    rows = np.array(sorted(measured_s), np.int64)
    residual = np.log([measured_s[row] for row in rows.tolist()]) - predicted[rows]
    posterior = _fit(features[rows], residual, prior)
    mean, std = _predict(posterior, features)
    refined = np.exp(predicted + posterior.weight @ mean)
    return Refinement(
        step_s=refined,
        loo_error=_leave_one_out(features[rows], residual, prior),
        sample=len(rows),
        _mean=predicted + mean,
        _std=std,
        _weight=posterior.weight,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Posterior:
    """Per grid point: weights of the features, their covariance, the noise, the point's weight."""

    mean: Floats
    covariance: Floats
    noise: Floats
    weight: Floats


def _fit(features: Floats, residual: Floats, prior: Floats) -> _Posterior:
    means: list[Floats] = []
    covariances: list[Floats] = []
    noises: list[float] = []
    evidence: list[float] = []
    for width in _WEIGHT_STDS:
        variance = np.where(prior > 0, prior, width) ** 2
        for noise in _NOISE_STDS:
            precision = features.T @ features / noise**2 + np.diag(1 / variance)
            covariance = np.asarray(np.linalg.inv(precision), np.float64)
            covariances.append(covariance)
            means.append(covariance @ features.T @ residual / noise**2)
            noises.append(noise)
            spread = (features * variance) @ features.T + noise**2 * np.eye(len(residual))
            _, log_volume = np.linalg.slogdet(spread)
            misfit = float(residual @ np.linalg.solve(spread, residual)) if len(residual) else 0.0
            evidence.append(-0.5 * (misfit + float(log_volume)))
    relative = np.exp(np.array(evidence) - max(evidence))
    return _Posterior(
        mean=np.array(means),
        covariance=np.array(covariances),
        noise=np.array(noises),
        weight=relative / relative.sum(),
    )


def _predict(posterior: _Posterior, features: Floats) -> tuple[Floats, Floats]:
    """Computes mean and standard deviation of the log residual: [grid, plans] each."""
    mean = posterior.mean @ features.T
    variance = np.array(
        [np.einsum("ij,ij->i", features @ one, features) for one in posterior.covariance]
    )
    return mean, np.sqrt(np.maximum(variance, 0.0) + posterior.noise[:, None] ** 2)


def _leave_one_out(features: Floats, residual: Floats, prior: Floats) -> float | None:
    count = len(residual)
    if count < _MIN_SAMPLE:
        return None
    errors: list[float] = []
    for row in range(count):
        others = np.arange(count) != row
        posterior = _fit(features[others], residual[others], prior)
        mean, _ = _predict(posterior, features[row : row + 1])
        errors.append(abs(math.expm1(float(posterior.weight @ mean[:, 0]) - residual[row])))
    return float(np.median(errors))


def _features(subjects: Sequence[PredictedPlan]) -> tuple[Floats, Floats]:
    """Returns the features, [plans, features], and the width of each feature's prior; 0: still to
    be found.

    The columns: 1, the kind of evidence, the share of each kind of cause, each value of a setting
    that varies.
    """
    kinds = sorted({_kind(cause) for subject in subjects for cause, _ in subject.causes})
    values = [{name: repr(value) for name, value in subject.settings} for subject in subjects]
    levels = sorted({pair for settings in values for pair in settings.items()})
    constant = {pair for pair in levels if all(v.get(pair[0]) == pair[1] for v in values)}
    levels = [pair for pair in levels if pair not in constant]
    place = {key: index + 2 for index, key in enumerate([*kinds, *levels])}
    table = np.zeros((len(subjects), 2 + len(place)))
    table[:, 0] = 1.0
    for row, (subject, settings) in enumerate(zip(subjects, values, strict=True)):
        table[row, 1] = subject.evidence == "compiled"
        for cause, seconds in subject.causes:
            table[row, place[_kind(cause)]] += seconds / subject.predicted_s
        for pair in settings.items():
            if pair in place:
                table[row, place[pair]] = 1.0
    prior = np.zeros(table.shape[1])
    prior[:2] = _COMMON_STD
    return table, prior


def _kind(cause: str) -> str:
    """Returns the kind of a cause, without axes: few measurements cannot separate every axis."""
    return cause.split(" ")[0]
