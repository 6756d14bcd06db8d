"""All candidates of a search as a table: `trials.csv` and a pandas DataFrame.

One row per candidate, best first. Plan columns come first: `mesh`, `axis.NAME` (devices along the
axis, both networks), `dcn.NAME` (the part between granules), `mapping.NAME` (mesh axes of a logical
axis), `knob.NAME`, `option.NAME`. What does not apply is empty. Seconds, bytes and FLOPs are per
step and per device.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automesh.errors import unwritable
from automesh.files import write_whole
from automesh.mesh.axes import MAPPING, Plan, Scalar
from automesh.mesh.mapping import format_axes
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Measured,
    OutOfMemory,
    ReplayOutcome,
    TimedOut,
)
from automesh.report import words
from automesh.report.estimates import Estimates
from automesh.report.predicted import exposed_s
from automesh.report.result import Candidate, SearchResult
from automesh.texts.terminal import clean, clean_lines

# Pandas takes its time to import, which a dry run does without.
if TYPE_CHECKING:
    import pandas as pd

Cell = Scalar | None

# Nullable types, so that a count stays a whole number in a column with gaps.
_TYPES: Mapping[str, str] = {
    "rank": "Int64",
    "kind": "string",
    "verdict": "string",
    "is_baseline": "boolean",
    "step_s": "Float64",
    "step_low_s": "Float64",
    "step_high_s": "Float64",
    "ratio": "Float64",
    "ratio_low": "Float64",
    "ratio_high": "Float64",
    "predicted_s": "Float64",
    "exposed_s": "Float64",
    "mfu": "Float64",
    "estimated_s": "Float64",
    "tokens_per_s": "Float64",
    "bound_by": "string",
    "peak_bytes": "Int64",
    "compiled_peak_bytes": "Int64",
    "flops": "Int64",
    "hbm_bytes": "Int64",
    "collectives": "Int64",
    "collective_payload_bytes": "Int64",
    "collective_wire_bytes": "Int64",
    "uncounted": "string",
    "compile_s": "Float64",
    "effort": "string",
    "fingerprint": "string",
    "same_as": "string",
    "rounds": "Int64",
    "raced_out": "boolean",
    "confirmed": "boolean",
    "values": "string",
    "numerics": "string",
    "stage": "string",
    "needed_bytes": "Int64",
    "limit_bytes": "Int64",
    "reserve_bytes": "Int64",
    "limit_s": "Float64",
    "reason": "string",
}


def dataframe(result: SearchResult) -> pd.DataFrame:
    """Makes a row per candidate with the columns of `trials.csv`; `rank` is empty for failures."""
    import pandas as pd

    rows: list[dict[str, Cell]] = []
    rank = 0
    for candidate in result.candidates:
        rank += words.is_ranked(candidate)
        rows.append(_row(candidate, rank, result.facts.searched.tokens_per_step))
    plan_columns = dict.fromkeys(
        [
            "mesh",
            *(f"{part}.{name}" for part in ("axis", "dcn") for name in result.facts.searched.axes),
        ]
    )
    for prefix in ("axis.", "dcn.", MAPPING, "knob.", "option."):
        plan_columns |= dict.fromkeys(
            name for row in rows for name in row if name.startswith(prefix)
        )
    names = [*plan_columns, *_TYPES]
    table = {name: _series(name, [row.get(name) for row in rows]) for name in names}
    return pd.DataFrame(table, columns=names)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Writes a table so that a reader sees the old file or the new one, never a part.

    Raises:
      UsageError: the folder cannot be written.
    """
    _write_csv(table.to_csv(index=False, lineterminator="\n"), path)


def _write_csv(text: str, path: Path) -> None:
    write_text(clean_lines(text), path, hint="name a folder that you may write to with --results")


def write_text(text: str, path: Path, *, hint: str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part.

    Args:
      hint: what to do if it cannot be written.

    Raises:
      UsageError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise unwritable(path, error, hint=hint) from None


def _series(name: str, cells: list[Cell]) -> pd.Series:
    import pandas as pd

    kind = "Int64" if name.startswith(("axis.", "dcn.")) else _TYPES.get(name, "object")
    if kind == "Int64" and any(isinstance(cell, int) and cell >= 2**63 for cell in cells):
        kind = "Float64"  # FLOPs of a very large step on few devices do not fit into 64 bits
    return pd.Series(cells, dtype=kind, name=name)


def _row(candidate: Candidate, rank: int, tokens_per_step: int) -> dict[str, Cell]:
    standing = candidate.standing
    seconds = words.step_s(candidate)
    row = plan_cells(candidate.plan)
    row |= {
        "kind": candidate.outcome.kind,
        "verdict": standing.verdict,
        "is_baseline": candidate.is_baseline,
        "step_s": seconds,
        "bound_by": clean(candidate.bound_by) or None,
        "peak_bytes": candidate.peak_bytes or None,
        "reason": words.reason(candidate) or None,
    }
    if words.is_ranked(candidate):
        row["rank"] = rank
        row["ratio"] = standing.ratio
        row["ratio_low"], row["ratio_high"] = standing.interval
    if tokens_per_step and seconds:
        row["tokens_per_s"] = tokens_per_step / seconds
    if candidate.estimated:
        row["estimated_s"] = candidate.estimated.step_s
    compiled = words.compiled_of(candidate)
    return row | (_compiled_cells(compiled) if compiled else {}) | _outcome_cells(candidate)


def plan_cells(plan: Plan) -> dict[str, Cell]:
    """Returns the columns that say which plan it is."""
    cells: dict[str, Cell] = {"mesh": plan.mesh}
    cells |= {f"axis.{axis.name}": axis.size for axis in plan.axes}
    cells |= {f"dcn.{axis.name}": axis.dcn for axis in plan.axes}
    cells |= {f"{MAPPING}{name}": format_axes(axes) for name, axes in plan.mapping}
    cells |= {f"knob.{name}": value for name, value in plan.knobs}
    return cells | {f"option.{name}": value for name, value in plan.compiler_options}


def _compiled_cells(compiled: Compiled) -> dict[str, Cell]:
    counts, replay = compiled.counts, compiled.replay
    return {
        # At low effort nothing would run as it was compiled.
        "predicted_s": compiled.step_s if compiled.effort == "default" else None,
        "exposed_s": exposed_s(replay) if replay else None,
        "mfu": replay.mfu or None if replay else None,
        "compiled_peak_bytes": compiled.memory.peak_bytes,
        "flops": counts.flops,
        "hbm_bytes": counts.hbm_bytes,
        "collectives": sum(collective.count for collective in counts.collectives),
        "collective_payload_bytes": sum(
            collective.payload_bytes for collective in counts.collectives
        ),
        "collective_wire_bytes": sum(collective.wire_bytes for collective in counts.collectives),
        "uncounted": clean("; ".join(counts.uncounted)) or None,
        "compile_s": compiled.compile_s,
        "effort": compiled.effort,
        "fingerprint": compiled.fingerprint,
        "same_as": compiled.same_as or None,
    }


def _outcome_cells(candidate: Candidate) -> dict[str, Cell]:
    match candidate.outcome:
        case Measured() as outcome:
            return {
                "step_low_s": outcome.interval_s[0],
                "step_high_s": outcome.interval_s[1],
                "rounds": len(outcome.rounds_s),
                "raced_out": outcome.raced_out,
                "confirmed": outcome.confirmed,
                "values": outcome.values,
                "numerics": outcome.numerics,
            }
        case Estimated() as outcome:
            return {
                "estimated_s": outcome.step_s,
                "step_low_s": outcome.bracket_s[0],
                "step_high_s": outcome.bracket_s[1],
                "uncounted": clean("; ".join(outcome.uncounted)) or None,
            }
        case OutOfMemory() as outcome:
            return {
                "stage": outcome.stage,
                "needed_bytes": outcome.needed_bytes,
                "limit_bytes": outcome.limit_bytes,
                "reserve_bytes": outcome.reserve_bytes or None,
            }
        case Compiled(replay=ReplayOutcome(bracket_s=(low, high))):
            return {"step_low_s": low, "step_high_s": high}
        case TimedOut() as outcome:
            return {"stage": outcome.stage, "limit_s": outcome.limit_s}
        case Failed() as outcome:
            return {"stage": outcome.stage}
        case _:
            return {}


# All estimates of a search as a table: `estimates.csv`, one row per legal plan, fastest first.
#
# Plan columns as in `trials.csv`; `estimated_s` with its bracket (`low_s`: all that can overlap
# does, `high_s`: nothing does); `bound_s`: no step can be faster, empty where nothing sound is
# known; `memory_bytes` on one device; the causes in seconds, which sum to `estimated_s`;
# `not_estimated`: why a plan has no estimate. Seconds and bytes are per step and per device. Plans
# that cannot be built come last, with `ruled out` and the reason in `not_estimated`.

_FIGURES = ("estimated_s", "low_s", "high_s", "bound_s", "memory_bytes")
_WHOLE = ("rank", "memory_bytes")


def write_estimates(estimates: Estimates, path: Path) -> None:
    """Writes `estimates.csv`: one row per plan.

    The text is what Pandas makes of the same rows: a column of whole numbers with gaps has the form
    of floats, except the columns in `_WHOLE`.

    Raises:
      UsageError: the folder cannot be written.
    """
    names, rows = estimates_rows(estimates)
    columns = [_as_text(name, [row.get(name) for row in rows]) for name in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*columns, strict=True))
    _write_csv(text.getvalue(), path)


def _as_text(name: str, cells: Sequence[Cell]) -> list[Cell]:
    present = [cell for cell in cells if cell is not None]
    are_numbers = all(type(cell) in (int, float) for cell in present)  # not bools
    has_floats = any(isinstance(cell, float) for cell in present) or len(present) < len(cells)
    if name in _WHOLE or not (are_numbers and has_floats):
        return list(cells)
    return [cell if cell is None else float(cell) for cell in cells]


def estimates_rows(estimates: Estimates) -> tuple[list[str], list[dict[str, Cell]]]:
    """Returns the columns of `estimates.csv`, and a row per plan, which may lack some of them."""
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
    return names, rows


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
