"""The columns of the ranking: which ones it has, their contents, and how they fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from automesh.mesh.axes import format_setting
from automesh.mesh.mapping import NONE
from automesh.report import words
from automesh.report.blocks.columns import GLUE, Column, text_column
from automesh.report.blocks.nouns import Table
from automesh.report.comparison import EXPORTED
from automesh.report.predicted import exposed_s, replay_of
from automesh.report.result import Candidate
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_count, format_percent, format_seconds

# What a narrow terminal does without, in this order. Mesh, knobs and step time always stay.
_DROPPED = ("tokens/s", "mfu", "bound by", "exposed", "memory", "bracket", "\u00b1")


def ranking_table(
    rows: Sequence[Candidate], knobs: tuple[str, ...], *, tokens_per_step: int
) -> Table:
    """Makes a row for each plan; a narrow terminal leaves out the least important columns."""
    # Too narrow for a column of knobs beside the mesh: they follow it in the same cell.
    plans = [" ".join([mesh_cell(row), *knob_cells(row, knobs)]) for row in rows]
    return Table(
        columns=tuple(_columns(rows, knobs, tokens_per_step)),
        dropped=_DROPPED,
        narrow=(text_column("mesh", map(clean, plans), most=8),),
    )


def varying_knobs(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Lists axes, knobs and options in which candidates differ, in the order of the space."""
    settings = [words.settings_shown(candidate) for candidate in candidates]
    names = dict.fromkeys(name for setting in settings for name in setting)
    return tuple(
        name for name in names if len({setting.get(name, "default") for setting in settings}) > 1
    )


def absent(row: Candidate) -> str:
    """Returns the text of a cell for a setting that a plan does not have."""
    return "default" if row.is_scripts else NONE


def _columns(
    rows: Sequence[Candidate], knobs: tuple[str, ...], tokens_per_step: int
) -> list[Column]:
    predicted = [words.evidence(row) in ("compiled", "estimated") for row in rows]
    seconds = [words.step_s(row) or 0.0 for row in rows]
    columns = [text_column("mesh", [clean(mesh_cell(row)) for row in rows], most=20)]
    if len(knobs) == 1:
        values = [words.settings_shown(row).get(knobs[0], absent(row)) for row in rows]
        header = clean(knobs[0])
        columns.append(text_column(header, map(clean, values), most=12, name="knobs"))
    elif knobs:
        values = [" ".join(knob_cells(row, knobs)) for row in rows]
        columns.append(text_column("knobs", map(clean, values), most=16))
    times = [
        f"{'> ' if row.partly_counted else ''}{format_seconds(step_s)}"
        for row, step_s in zip(rows, seconds, strict=True)
    ]
    columns.append(_figures("step time", times, predicted))
    spread = tuple(words.half_interval(row) for row in rows)
    if any(spread):
        columns.append(Column(name="\u00b1", header="", cells=spread))
    # A bracket of a prediction does not compare with a measured time.
    brackets = ["" if row.standing.step_s else words.bracket(row.outcome) for row in rows]
    if any(brackets):
        columns.append(_figures("bracket", brackets, predicted))
    marks = [row.standing.verdict for row in rows if row.standing.verdict in EXPORTED]
    versus = [words.versus_exported(row) for row in rows]
    columns.append(_figures(f"vs {marks[0] if marks else 'best'}", versus, predicted))
    replays = [replay_of(row.outcome) for row in rows]
    if any(replays):
        exposed = [format_seconds(exposed_s(replay)) if replay else "" for replay in replays]
        columns.append(_figures("exposed", exposed, predicted))
    if any(row.peak_bytes for row in rows):
        memory = [format_bytes(row.peak_bytes) if row.peak_bytes else "" for row in rows]
        columns.append(
            _figures("memory", memory, [not words.peak_is_measured(row) for row in rows])
        )
    if any(row.bound_by for row in rows):
        causes = [clean(row.bound_by, 24) for row in rows]
        columns.append(_figures("bound by", causes, [True] * len(rows), justify="left"))
    if any(replay and replay.mfu > 0 for replay in replays):
        shares = [
            format_percent(replay.mfu) if replay and replay.mfu > 0 else "" for replay in replays
        ]
        columns.append(_figures("mfu", shares, predicted))
    if tokens_per_step:
        rates = [format_count(tokens_per_step / step_s) if step_s > 0 else "" for step_s in seconds]
        columns.append(_figures("tokens/s", rates, predicted))
    return columns


def mesh_cell(row: Candidate) -> str:
    """Returns the mesh, marked if it is the script's own."""
    whose = "script" if row.is_scripts else "baseline"
    return row.plan.mesh + (f" ({whose})" if row.is_baseline else "")


def knob_cells(row: Candidate, knobs: tuple[str, ...]) -> list[str]:
    """Returns `name=value`, or `name:axes`, for those of `knobs` that the plan sets."""
    settings = words.settings_shown(row)
    return [format_setting(name, settings[name]) for name in knobs if name in settings]


def _figures(
    name: str,
    cells: Sequence[str],
    predicted: Sequence[bool],
    *,
    justify: Literal["left", "right"] = "right",
) -> Column:
    """Marks predicted figures with `*`: the header if all of them are, else each such cell."""
    said = [mark for cell, mark in zip(cells, predicted, strict=True) if cell]
    if all(said):
        header = f"{name} *" if said else name
        return Column(name=name, header=header, cells=tuple(cells), justify=justify)
    marks = [
        (" *" if mark and cell else GLUE * 2) if any(said) else ""
        for cell, mark in zip(cells, predicted, strict=True)
    ]
    marked = tuple(cell + mark for cell, mark in zip(cells, marks, strict=True))
    return Column(name=name, header=name + GLUE * 2 * any(said), cells=marked, justify=justify)
