"""The order in which plans are tried if there are no estimates.

Nothing is known of a command before it has run, so plans are chosen by their positions in the
space:
1. the baseline;
2. a spread: one plan more than there are axes, each as far as possible from all plans tried so far.
   The first of them is the first legal plan (all devices along the first axis);
3. then, in turn, a neighbour of the fastest so far, and a further plan of the spread: half of the
   runs are near good plans, half in unknown regions. Among several neighbours, the one around which
   plans were fastest is chosen, by a mean that is weighted with the inverse square of distances.
The distance of two plans is the number of doublings and halvings of sizes from one to the other,
plus one for each knob that differs. The choice only depends on the results so far, so a resumed
search tries the same plans as one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from automesh.mesh.axes import Plan


class PlanOrder:
    """The next plan to try.

    Args:
      plans: all plans, the legal ones in the order of the enumeration.
      baseline: one of `plans`; empty if there is none.
    """

    def __init__(self, plans: Sequence[Plan], baseline: Sequence[Plan]) -> None:
        self._plans = tuple(plans)
        self._baseline = tuple(baseline)
        self._row = {plan: row for row, plan in enumerate(self._plans)}
        self._sizes = np.array(
            [[size for axis in plan.axes for size in (axis.ici, axis.dcn)] for plan in plans]
        )
        self._sizes = np.log2(self._sizes)
        codes: dict[object, int] = {}
        # As texts, because True == 1.
        self._settings = np.array(
            [
                [codes.setdefault(repr(setting), len(codes)) for setting in plan.settings]
                for plan in plans
            ]
        )
        active = np.any(self._sizes > 0, axis=0)
        self._spread = int(active.sum()) + 1

    def next(self, seconds: Mapping[Plan, float | None]) -> Plan | None:
        """Returns the next plan; None when all were tried.

        Args:
          seconds: seconds per step of the plans that were tried; None for one that failed.
        """
        for plan in self._baseline:
            if plan not in seconds:
                return plan
        tried = [self._row[plan] for plan in seconds if plan in self._row]
        if not tried:
            return self._plans[0]
        is_left = np.ones(len(self._plans), np.bool_)
        is_left[tried] = False
        if not is_left.any():
            return None
        nearest = np.min([self._distances(row) for row in tried], axis=0)
        far = int(np.argmax(np.where(is_left, nearest, -1.0)))
        known = {plan: one for plan, one in seconds.items() if one is not None}
        known = {plan: one for plan, one in known.items() if plan in self._row}
        beyond = len(tried) - self._spread - len(self._baseline)
        if not known or beyond < 0 or beyond % 2:
            return self._plans[far]
        best = min(known, key=lambda plan: (known[plan], self._row[plan]))
        near = np.where(is_left, self._distances(self._row[best]), np.inf)
        neighbours = np.flatnonzero(near == near.min())
        return self._plans[int(neighbours[np.argmin(self._around(neighbours, known))])]

    def _around(self, rows: NDArray[np.int64], known: Mapping[Plan, float]) -> NDArray[np.float64]:
        """Returns, for some untried plans, the mean seconds of the tried plans around each of
        them."""
        seconds = np.array(list(known.values()))
        weights = np.stack([self._distances(self._row[plan])[rows] for plan in known]) ** -2.0
        return seconds @ weights / weights.sum(axis=0)

    def _distances(self, row: int) -> NDArray[np.float64]:
        steps = np.abs(self._sizes - self._sizes[row]).sum(axis=1)
        if self._settings.size:
            steps = steps + (self._settings != self._settings[row]).sum(axis=1)
        return steps
