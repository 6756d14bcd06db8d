"""What searches predicted of the plans that they then measured, beside the record of a device."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.units import format_change, format_seconds
from benchmarks.attached.compare import errors_of, order_of
from benchmarks.attached.record import Record

_KNOBS = ("remat", "microbatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One plan of a search; seconds of a step.

    Attributes:
      step: the first part of the name of the file, `STEP_trials.csv`.
      predicted_s: of the program that the attached compiler made, replayed.
      recorded_s: what the record has of the same plan of the same step; 0 if it has none.
    """

    step: str
    plan: str
    verdict: str
    measured_s: float
    predicted_s: float
    recorded_s: float

    @property
    def error(self) -> float:
        """Of the prediction against what was measured, relative, with its sign."""
        return self.predicted_s / self.measured_s - 1


def searched_in(folder: Path, record: Record) -> list[Searched]:
    """The measured plans of every `*_trials.csv` of a folder, as searches write them."""
    recorded = {(row.step, row.plan): row.step_s for row in record.rows if row.rounds_s}
    found: list[Searched] = []
    for path in sorted(folder.glob("*_trials.csv")):
        step = path.name.removesuffix("_trials.csv")
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if not row["step_s"] or not row["predicted_s"]:
                    continue
                knobs = [f"{name}={value}" for name in _KNOBS if (value := row.get(f"knob.{name}"))]
                plan = " ".join([row["mesh"], *knobs])
                found.append(
                    Searched(
                        step=step,
                        plan=plan,
                        verdict=row["verdict"],
                        measured_s=float(row["step_s"]),
                        predicted_s=float(row["predicted_s"]),
                        recorded_s=recorded.get((step, plan), 0.0),
                    )
                )
    return found


def figures_of(found: Sequence[Searched]) -> dict[str, Any]:
    """Errors of the predictions, pairs in order, and how far the record is from the searches."""
    if not found:
        return {}
    apart = [abs(one.recorded_s / one.measured_s - 1) for one in found if one.recorded_s]
    return {
        **errors_of([one.error for one in found]),
        **order_of([(one.step, one.measured_s, one.predicted_s) for one in found]),
        "record_apart": round(max(apart, default=0.0), 4),
    }


def lines_of(found: Sequence[Searched]) -> list[str]:
    """What a reader sees of them, one line for each plan."""
    lines = ["searches, and what they had predicted of the compiled programs:"] if found else []
    for one in found:
        recorded = f", recorded {format_seconds(one.recorded_s)}" if one.recorded_s else ""
        lines.append(
            f"  {one.step} {one.plan}: {one.verdict}, measured {format_seconds(one.measured_s)}, "
            f"predicted {format_change(one.predicted_s / one.measured_s)}{recorded}"
        )
    return lines
