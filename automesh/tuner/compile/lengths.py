"""Guesses how long compiles will take from the finished ones.

Parallel workers finish soonest if the longest compiles begin first (Graham 1969), but the length of
a compile is not known before. It depends on the axes that the mesh uses, on the knobs, and on the
number of collectives, which the estimate's latency counts. A ridge regression of the logarithm of
the seconds on these predicts the order well enough (`python -m benchmarks.fleet` prints how well,
on recorded searches).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated

LEAST = 4
"""The least number of finished compiles for a guess."""
_RIDGE = 1.0  # As strong as one compile per feature: one compile says little.
_NO_LATENCY_S = 1e-9
_ALIKE = 1e-6  # of logarithms: smaller differences may be rounding errors of sums


def expected_s(
    plans: Sequence[Plan], known_s: Mapping[Plan, float], estimates: Mapping[Plan, Estimated]
) -> dict[Plan, float]:
    """Returns the approximate seconds of each plan's compile; empty while too few compiles are
    known.

    Args:
      known_s: seconds of finished compiles, all above 0.
      estimates: estimates of plans; a plan without one gets the mean latency.
    """
    if len(known_s) < LEAST:
        return {}
    done = list(known_s)
    names = sorted({name for plan in done for name in _features(plan)})
    latencies = np.array([_latency(plan, estimates) for plan in (*done, *plans)])
    seen = latencies[: len(done)]
    usual = float(np.nanmean(seen)) if not np.isnan(seen).all() else 0.0
    spread = float(np.nanstd(seen)) if not np.isnan(seen).all() else 0.0
    scaled = np.nan_to_num((latencies - usual) / spread) if spread > _ALIKE else 0.0 * latencies
    rows = np.zeros((len(latencies), len(names) + 1))
    for row, plan in enumerate((*done, *plans)):
        own = _features(plan)
        rows[row, :-1] = [name in own for name in names]
    rows[:, -1] = np.nan_to_num(scaled)
    logs = np.log([known_s[plan] for plan in done])
    fitted, middle = rows[: len(done)], float(logs.mean())
    weights = np.linalg.solve(
        fitted.T @ fitted + _RIDGE * np.eye(rows.shape[1]), fitted.T @ (logs - middle)
    )
    guessed = np.exp(middle + rows[len(done) :] @ weights)
    return {plan: float(one) for plan, one in zip(plans, guessed, strict=True)}


def _features(plan: Plan) -> frozenset[str]:
    """Returns the features of a plan that may affect the length of its compile."""
    axes = [axis.name for axis in plan.axes if axis.size > 1]
    axes += [f"dcn.{axis.name}" for axis in plan.axes if axis.dcn > 1]
    chosen = [f"{name}={value}" for name, value in (*plan.knobs, *plan.compiler_options)]
    return frozenset((*axes, *chosen, f"mapping={plan.mapping}"))


def _latency(plan: Plan, estimates: Mapping[Plan, Estimated]) -> float:
    """Returns the logarithm of the latency in an estimate, in seconds; NaN without an estimate."""
    if (estimated := estimates.get(plan)) is None:
        return math.nan
    return math.log(max(dict(estimated.causes).get("latency", 0.0), _NO_LATENCY_S))
