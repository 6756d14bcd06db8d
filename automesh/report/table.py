"""A search on the terminal: the ranking, the plans that fell out and why, the answer in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from automesh.outcomes import Estimated, Measured
from automesh.report import words
from automesh.report.columns import (
    GAP,
    Column,
    knob_cells,
    mesh_cell,
    ranking_columns,
    varying_knobs,
    wrapped,
)
from automesh.report.comparison import EXPORTED
from automesh.report.drawing import MIN_WIDTH, draw, footnotes, glued, labelled, tabulated
from automesh.report.estimates import ESTIMATES
from automesh.report.predicted import predicted_lines, replay_of, stages_of, stages_sentence
from automesh.report.result import NOT_ENDED, Candidate, SearchResult
from automesh.texts.storage_url import masked
from automesh.texts.terminal import clean
from automesh.units import format_count

_STYLES = {
    **dict.fromkeys(EXPORTED, "bold green"),
    "equal": "green",
    "undecided": "yellow",
    "not_measured": "dim",
}


def render(
    result: SearchResult, *, top: int, width: int, colour: bool, verbose: bool = False
) -> str:
    """Draws the result of a search.

    Args:
      top: rows of the ranking, and of the plans that fell out; the script's mesh is always shown.
      width: columns of the terminal; no line is longer (fewer than 40 are treated as 40).
      colour: write colours as ANSI codes; the text is the same without them.
      verbose: say how the estimates were made, too.

    Returns:
      Lines that end in a line feed.
    """
    width = max(width, MIN_WIDTH)
    ranked = [candidate for candidate in result.candidates if words.is_ranked(candidate)]
    # Beside replays, estimates would look like times of the same kind.
    estimated = [one for one in ranked if result.is_ahead and isinstance(one.outcome, Estimated)]
    if len(estimated) < len(ranked):
        ranked = [one for one in ranked if one not in estimated]
    else:
        estimated = []
    own = [one for one in ranked if one.is_baseline or not words.is_duplicate(one)]
    fallen = [candidate for candidate in result.candidates if not words.is_ranked(candidate)]
    shown, dropped = _first(own, top), _first(fallen, top)
    knobs = varying_knobs(result.candidates)
    parts: list[RenderableType] = [Text(glued(_title(result)))]
    if shown:
        in_rows = varying_knobs(shown) if len(shown) > 1 else knobs
        columns = ranking_columns(
            shown, in_rows, tokens_per_step=result.facts.searched.tokens_per_step, width=width
        )
        parts += [Text(), _ranking(shown, columns, width)]
        notes = _marks(shown, columns, made_up=result.facts.searched.made_up)
        in_all = tuple(name for name in knobs if name not in in_rows)
        if cells := knob_cells(shown[0], in_all):
            notes.append(("", f"{clean(' '.join(cells))} in every row"))
        # Of estimates a study keeps the first, and a summary counts them all.
        is_all_estimated = all(isinstance(one.outcome, Estimated) for one in own)
        known = max(len(own), result.funnel.estimated if is_all_estimated else 0)
        if known > len(shown):
            notes.append(("", f"and {words.count(known - len(shown), 'more plan')} behind these"))
        if len(ranked) > len(own):
            same = words.count(len(ranked) - len(own), "plan")
            notes.append(("", f"and {same} with a program that another plan has"))
        if estimated:
            low = words.count(len(estimated), "plan")
            notes.append(("", f"and {low} compiled at low effort only, in trials.csv"))
        parts.append(footnotes(notes))
    if dropped:
        parts += [Text(), _fallen(dropped, knobs, width, more=len(fallen) - len(dropped))]
    parts += [Text(), _summary(result, verbose=verbose)]
    return draw(parts, width=width, colour=colour)


def _first(candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    head = list(candidates[:top])
    return head + [candidate for candidate in candidates[top:] if candidate.is_baseline]


def _title(result: SearchResult) -> str:
    tokens = result.facts.searched.tokens_per_step
    text = words.title(result) + (f", {format_count(tokens)} tokens/step" if tokens else "")
    return text + (", interrupted" if result.footer.interrupted else "")


def _ranking(rows: Sequence[Candidate], columns: Sequence[Column], width: int) -> Table:
    styles = [_STYLES.get(row.standing.verdict, "") for row in rows]
    return tabulated(columns, width=width, styles=styles)


def _marks(
    rows: Sequence[Candidate], columns: Sequence[Column], *, made_up: Sequence[str]
) -> list[tuple[str, str]]:
    """What the marks in the columns that are shown mean."""
    notes: list[tuple[str, str]] = []
    names = {column.name for column in columns}
    measured = [row.outcome for row in rows if isinstance(row.outcome, Measured)]
    if "\u00b1" in names:
        notes.append(("\u00b1", "measured, the longer side of the 95 % interval"))
        if any(row.standing.step_s for row in rows):
            notes.append(("", "(of the ratio to the exported plan, by which rows are compared)"))
    elif measured:
        notes.append(("", "step times without a mark are measured"))
    if any(outcome.values == "synthetic" for outcome in measured):
        which = ", ".join(clean(name) for name in made_up)
        notes.append(("", f"measured on made-up arguments{f': {which}' if which else ''}"))
    if any("*" in text for column in columns for text in (column.header, *column.cells)):
        kinds = {words.evidence(row) for row in rows}
        if "bracket" in names and any(replay_of(row.outcome) for row in rows):
            notes.append(("*", "predicted, not measured: the compiled program, replayed on the"))
            notes.append(("", "links of the target; the bracket is what its busiest part needs"))
            notes.append(("", "alone, and the time if nothing overlaps"))
        elif "compiled" in kinds or "measured" in kinds:
            notes.append(("*", "predicted from the compiled program, not measured"))
        if "estimated" in kinds:
            notes.append(("*", "estimated from the lowered program, not compiled; the bracket is"))
            notes.append(("", "the time if all that can overlap does, and if nothing does"))
    if any(row.partly_counted for row in rows):
        notes.append((">", "not all of its work has a price, and that of the others has"))
    return notes


def _fallen(rows: Sequence[Candidate], knobs: tuple[str, ...], width: int, *, more: int) -> Table:
    plans = [" ".join([mesh_cell(row), *knob_cells(row, knobs)]) for row in rows]
    plans = [clean(plan) for plan in plans]
    size = min(max(cell_len(plan) for plan in plans), width * 2 // 5)
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(width=size, overflow="fold")
    grid.add_column(overflow="fold")
    for plan, row in zip(plans, rows, strict=True):
        why = clean(words.reason(row), 240)
        grid.add_row(Text(wrapped(plan, size)), Text(glued(why), style="red"))
    if more:
        grid.add_row(Text(), Text(f"and {more} more of these in trials.csv"))
    return grid


def _summary(result: SearchResult, *, verbose: bool) -> Table:
    return labelled(summary_lines(result, verbose=verbose))


def _estimates_file(result: SearchResult) -> str:
    """Where all estimates are, while there is nothing better."""
    funnel = result.funnel
    if (
        not result.facts.provenance.results_dir
        or not funnel.estimated
        or funnel.legal > funnel.waiting
    ):
        return ""
    if result.footer.stop_reason == NOT_ENDED:  # The file is written when all of them are there.
        return ""
    return f"{result.facts.provenance.results_dir}/{ESTIMATES} (all {funnel.estimated} estimates)"


def summary_lines(result: SearchResult, *, verbose: bool = False) -> list[tuple[str, str]]:
    """The answer in words: a label and a sentence each, empty ones left out."""
    rule = (
        f"{result.footer.rules_path} (rule for {result.facts.devices.target})"
        if result.footer.rules_path
        else ""
    )
    stages = stages_of(words.best_of(result))
    lines = [
        (words.best_label(result), words.best_sentence(result)),
        ("undecided", words.undecided_sentence(result)),
        ("command", result.best_command),
        *predicted_lines(result, words.best_of(result)),
        ("stages", stages_sentence(stages) if stages is not None else ""),
        ("tried", words.funnel_sentence(result.funnel)),
        ("ruled out", words.ruled_out_sentence(result.funnel)),
        ("numerics", words.numerics_sentence(result)),
        ("stopped", result.footer.stop_reason),
        ("bound", result.footer.certificate),
        ("model", result.footer.belief),
        ("speeds", result.facts.provenance.speeds),
        *(("note", notice) for notice in result.notices),
        *(("detail", detail) for detail in result.facts.details if verbose),
        ("saved", rule),
        ("saved", _estimates_file(result)),
        ("" if rule else "saved", masked(result.facts.provenance.location)),
        ("next", masked(result.command)),
    ]
    return [(label, clean(text)) for label, text in lines if text]
