"""Do our terms order published layouts with pipelines as they came out? What `published` prints.

For every group of `data/published_pipelines.json` each layout's stages are lowered and propagated
for virtual devices, priced on the group's machines and simulated (1F1B, as all of them ran). What
the publication does once per step is priced once per step; see `pricing`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.units import format_bytes, format_seconds
from benchmarks.published.groups import figures
from benchmarks.published.layouts import Layout, LayoutGroup
from benchmarks.published.pricing import Priced, devices_of, priced
from benchmarks.published.stages import start, terms_of

_TOP = 5
_SHOWN = 4
_APART = 1.25  # a layout priced so much otherwise than the rest is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout with both times."""

    layout: Layout
    priced: Priced

    @property
    def ours_s(self) -> float:
        return self.priced.cost.step_s


def rows_of(group: LayoutGroup, folder: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Prices the layouts of a group; those that cannot be, with reasons, come second."""
    start()
    absent = devices_of(group)
    rows: list[Row] = []
    left_out = [*group.left_out]
    for layout in group.layouts:
        made = terms_of(
            group.shape,
            layout.stages,
            remat=layout.remat,
            splits=layout.tp > 1,
            rows=group.most_rows,
            folder=folder,
        )
        try:
            rows.append(Row(layout=layout, priced=priced(layout, group, made, absent)))
        except ValueError as reason:
            left_out.append((layout.id, str(reason)))
    return rows, left_out


def regret(measured_s: Sequence[float], predicted_s: Sequence[float], top: int) -> float:
    """How much slower than the fastest the best of those is that are predicted as the `top` best.

    >>> regret([1.0, 1.2, 1.1], [3.0, 1.0, 2.0], 2)
    0.10000000000000009
    """
    order = sorted(range(len(measured_s)), key=lambda place: predicted_s[place])
    return min(measured_s[place] for place in order[:top]) / min(measured_s) - 1.0


def summary_of(rows: Sequence[Row], left_out: int) -> dict[str, Any]:
    """The figures of one group; those on memory only where it is on record what ran out of it."""
    timed = [row for row in rows if row.layout.measured_s]
    measured = [row.layout.measured_s for row in timed]
    ours = [row.ours_s for row in timed]
    theirs = [row.layout.theirs_s for row in timed]
    found = figures(measured, ours)
    summary: dict[str, Any] = {
        "configs": found.configs,
        "kendall_tau": round(found.kendall_tau, 4),
        "top1_regret": round(regret(measured, ours, 1), 4),
        "top5_regret": round(regret(measured, ours, _TOP), 4),
        "median_time_error": round(found.median_time_error, 4),
        "left_out": left_out,
        "evidence": "estimated",
    }
    if all(theirs):
        summary["their_kendall_tau"] = round(figures(measured, theirs).kendall_tau, 4)
        summary["their_top1_regret"] = round(regret(measured, theirs, 1), 4)
        summary["their_top5_regret"] = round(regret(measured, theirs, _TOP), 4)
    return summary | _memory(rows)


def _memory(rows: Sequence[Row]) -> dict[str, Any]:
    known = [row for row in rows if row.layout.ran_out is not None]
    said = [row for row in known if not row.priced.fits]
    ran_out = [row for row in known if row.layout.ran_out]
    right = sum(bool(row.layout.ran_out) for row in said)
    found: dict[str, Any] = {
        "oom": len(ran_out),
        "oom_said": len(said),
        # Out of memory or of time, or crashed: it is not on record which.
        "failed_otherwise": len(rows) - len(known),
    }
    if ran_out:
        found["oom_recall"] = round(right / len(ran_out), 4)
        if said:
            found["oom_precision"] = round(right / len(said), 4)
    return found


def described(group: LayoutGroup, rows: Sequence[Row]) -> list[str]:
    """The lines of one group, the fastest first."""
    lines = [f"{group.name} on {group.trainer.cluster}-{group.devices}: {group.shape}"]
    lines += [f"  but: {remark}" for remark in group.remarks]
    lines.append(f"  {'layout':<46}{'measured':>10}{'ours':>10}{'error':>8}{'memory':>11}")
    for row in sorted(rows, key=lambda row: row.layout.measured_s or float("inf")):
        lines += _lines(row)
    return lines


def _lines(row: Row) -> list[str]:
    layout, cost = row.layout, row.priced.cost
    measured = format_seconds(layout.measured_s) if layout.measured_s else "-"
    error = f"{row.ours_s / layout.measured_s - 1.0:+.0%}" if layout.measured_s else ""
    wrong = layout.ran_out is not None and layout.ran_out is row.priced.fits
    memory = f"{format_bytes(cost.memory_bytes)}{'!' if wrong else ' '}"
    causes = ", ".join(f"{cause} {format_seconds(s)}" for cause, s in cost.causes[:_SHOWN])
    return [
        f"  {layout!s:<46}{measured:>10}{format_seconds(row.ours_s):>10}{error:>8}{memory:>11}",
        f"    {causes}",
    ]


def missed(rows: Sequence[Row]) -> str:
    """Why a group is ordered otherwise than it came out: the layout that was picked, if it is
    priced otherwise than the rest, and the cause whose share of our time goes with the error."""
    timed = [row for row in rows if row.layout.measured_s]
    if len(timed) < 3:
        return "too few layouts to say why"
    errors = [row.ours_s / row.layout.measured_s for row in timed]
    usual = statistics.median(errors)
    best = min(range(len(timed)), key=lambda place: timed[place].ours_s)
    said = ""
    if not 1 / _APART < errors[best] / usual < _APART:
        layout = timed[best].layout
        said = (
            f"`{layout}` is predicted fastest, priced {errors[best] - 1:+.0%} where the median is "
            f"{usual - 1:+.0%}; "
        )
    return said + _cause(timed, errors)


def _cause(timed: Sequence[Row], errors: Sequence[float]) -> str:
    names = dict.fromkeys(cause for row in timed for cause, _ in row.priced.cost.causes)
    found: list[tuple[float, str]] = []
    for name in names:
        shares = [dict(row.priced.cost.causes).get(name, 0.0) / row.ours_s for row in timed]
        if max(shares) - min(shares) > 0.02 and max(errors) > min(errors):
            found.append((statistics.correlation(shares, errors), name))
    if not found:
        return "no cause goes with the error"
    how, name = max(found, key=lambda one: abs(one[0]))
    direction = "too slow" if how > 0 else "too fast"
    return f"layouts with a larger part of `{name}` are priced {direction} (correlation {how:+.2f})"
