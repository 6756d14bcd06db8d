"""All estimates of a search as a table: `estimates.csv`, one row per legal plan, fastest first.

Plan columns as in `trials.csv`; `estimated_s` with its bracket (`low_s`: all that can overlap does,
`high_s`: nothing does); `bound_s`: no step can be faster, empty where nothing sound is known;
`memory_bytes` on one device; the causes in seconds, which sum to `estimated_s`; `not_estimated`:
why a plan has no estimate. Seconds and bytes are per step and per device. Plans that cannot be
built come last, with `ruled out` and the reason in `not_estimated`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from automesh.mesh.axes import Scalar
from automesh.outcomes import Estimated
from automesh.report.estimates import Estimates
from automesh.report.files.csv import plan_cells, write_table
from automesh.report.words import clean

Cell = Scalar | None
_FIGURES = ("estimated_s", "low_s", "high_s", "bound_s", "memory_bytes")


def estimates_frame(estimates: Estimates) -> pd.DataFrame:
    """One row per plan with the columns of `estimates.csv`."""
    ranked = sorted(estimates.found.items(), key=lambda item: item[1].step_s)
    rows = [
        {"rank": rank, **plan_cells(plan), **_cells(one)}
        for rank, (plan, one) in enumerate(ranked, start=1)
    ]
    rows += [
        {**plan_cells(plan), "not_estimated": clean(reason)}
        for plan, reason in estimates.missing.items()
    ]
    rows += [
        {**plan_cells(plan), "not_estimated": clean(f"ruled out by {why.rule}: {why.detail}")}
        for plan, why in estimates.refused.items()
    ]
    plans: dict[str, None] = {"rank": None}
    causes: dict[str, None] = {}
    for row in rows:
        names = [name for name in row if not _is_figure(name)]
        plans |= dict.fromkeys(name for name in names if not name.startswith("cause."))
        causes |= dict.fromkeys(name for name in names if name.startswith("cause."))
    names = [*plans, *_FIGURES, *sorted(causes), "own_propagation", "uncounted", "not_estimated"]
    return pd.DataFrame(rows, columns=names).astype({"rank": "Int64", "memory_bytes": "Int64"})


def write_estimates(estimates: Estimates, path: Path) -> None:
    """Writes `estimates.csv` whole or not at all.

    Raises:
      UsageError: the folder cannot be written.
    """
    write_table(estimates_frame(estimates), path)


def _is_figure(name: str) -> bool:
    return name in (*_FIGURES, "own_propagation", "uncounted", "not_estimated")


def _cells(one: Estimated) -> dict[str, Cell]:
    return {
        "estimated_s": one.step_s,
        "low_s": one.bracket_s[0],
        "high_s": one.bracket_s[1],
        "bound_s": one.bound_s or None,
        "memory_bytes": one.memory_bytes,
        **{f"cause.{cause}": seconds for cause, seconds in one.causes},
        "own_propagation": one.own_propagation,
        "uncounted": clean("; ".join(one.uncounted)) or None,
    }
