"""What the visits of a sweep say: losses, what lies over DCN, and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from automesh.mesh.axes import Plan
from automesh.tuner.measure.statistics import median_interval, paired_ratio
from benchmarks.dcn_sweep.sweep import RULES, Case, Row, Table, alone_of, by_sizes

TOLERANCE = 1e-5
"""Largest relative difference of losses in float32."""


def over_dcn(plan: Plan) -> tuple[str, ...]:
    """The axes of a plan that lie over DCN."""
    return tuple(axis.name for axis in plan.axes if axis.dcn > 1)


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite if one is no number, or they are not as many.

    >>> difference((2.0, 4.0), (2.0, 4.4)), difference((2.0,), ())
    (0.1, inf)
    """
    if not losses or len(losses) != len(others) or not np.isfinite([*losses, *others]).all():
        return math.inf
    return round(
        max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(losses, others, strict=True)),
        12,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A mesh with an axis over DCN against one of equal sizes with that axis inside.

    Attributes:
      ratio: how many times as long a step of the former takes.
      low, high: 95 % interval.
    """

    over: str
    inside: str
    ratio: float
    low: float
    high: float


def prices(rows: Sequence[Row], axis: str) -> list[Price]:
    """What an axis costs over DCN, for every two plans that differ in nothing else."""
    found: list[Price] = []
    for group in by_sizes(rows).values():
        timed = [row for row in group if row.rounds_s]
        for over in (row for row in timed if axis in over_dcn(row.plan)):
            for inside in timed:
                if axis in over_dcn(inside.plan) or inside.plan.sizes[axis] == 1:
                    continue
                ratio = paired_ratio(over.rounds_s, inside.rounds_s)
                found.append(
                    Price(
                        over=over.plan.mesh,
                        inside=inside.plan.mesh,
                        ratio=ratio.value,
                        low=ratio.low,
                        high=ratio.high,
                    )
                )
    return found


def noise(rows: Sequence[Row]) -> float:
    """How far rounds of one plan are from each other: the standard deviation of their logarithms,
    in the median of all plans; 0 if no plan has two."""
    spreads = [np.std(np.log(row.rounds_s), ddof=1) for row in rows if len(row.rounds_s) > 1]
    return float(np.median(spreads)) if spreads else 0.0


def summary(case: Case, table: Table, *, is_whole: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The figures of a case, and what is not as it should be, in words.

    Args:
      is_whole: all plans were wanted.
    """
    rows = list(table.rows.values())
    faults = [f"{row.plan} failed: {row.failure}" for row in rows if row.failure]
    splits = Counter(name for row in rows if row.rounds_s for name in over_dcn(row.plan))
    if is_whole:
        faults += [f"{name} was never measured over DCN" for name in case.over if not splits[name]]
    apart: dict[str, float] = {}
    for row in rows:
        if row.first is None:
            continue
        losses = table.alone.get(str(alone_of(row.plan)), ())
        apart[str(row.plan)] = far = difference(row.first.first.losses, losses)
        if far > TOLERANCE:
            faults.append(f"the losses of {row.plan} are {far:.1e} from those of one process")
        if row.first.first.loss_dtype != "float32":
            faults.append(f"{row.plan} computes in {row.first.first.loss_dtype}, not in float32")
    paid = prices(rows, case.asked)
    if case.is_slower:
        faults += [
            f"{one.over} was not shown to be slower than {one.inside}: {one.ratio:.2f} "
            f"({one.low:.2f} to {one.high:.2f})"
            for one in paid
            if one.low <= 1.0
        ]
    ratios = [one.ratio for one in paid]
    figures = {
        "plans": len(rows),
        "over_dcn": dict(sorted(splits.items())),
        "failed": sum(bool(row.failure) for row in rows),
        "losses_equal": sum(far <= TOLERANCE for far in apart.values()),
        "largest_loss_difference": _finite(max(apart.values(), default=math.inf), places=12),
        "noise_of_a_round": round(noise(rows), 4),
        "rounds": min((len(row.rounds_s) for row in rows if not row.failure), default=0),
        "asked": case.asked,
        "pairs": len(paid),
        "slower": sum(one.low > 1.0 for one in paid),
        "faster": sum(one.high < 1.0 for one in paid),
        "ratio_min": round(min(ratios), 3) if ratios else None,
        "ratio_median": round(float(np.median(ratios)), 3) if ratios else None,
        "ratio_max": round(max(ratios), 3) if ratios else None,
        "ratios": [
            {name: _finite(value) if isinstance(value, float) else value for name, value in pair}
            for pair in (asdict(one).items() for one in paid)
        ],
        "step_ms": {
            str(row.plan): [_finite(one * 1e3) for one in _middle(row)]
            for row in sorted(rows, key=lambda row: _middle(row)[0])
            if row.rounds_s
        },
        "steps_of_losses": RULES.loss_steps,
    }
    return figures, faults


def _middle(row: Row) -> tuple[float, float, float]:
    """Median of the rounds, and its 95 % interval; infinite without rounds."""
    if not row.rounds_s:
        return math.inf, math.inf, math.inf
    return (float(np.median(row.rounds_s)), *median_interval(row.rounds_s))


def _finite(value: float, *, places: int = 3) -> float | None:
    """Rounded; None for what JSON has no number for."""
    return round(value, places) if math.isfinite(value) else None
