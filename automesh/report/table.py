"""A search as a report: the ranking, the plans that fell out and why, the answer in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from automesh.outcomes import Compiled, Estimated, Measured
from automesh.report import words
from automesh.report.blocks.nouns import KeyValues, Note, Report, Section, Table, lines_of
from automesh.report.columns import knob_cells, mesh_cell, ranking_table, varying_knobs
from automesh.report.comparison import EXPORTED
from automesh.report.estimates import ESTIMATES
from automesh.report.files.json import facts_of
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

_REPLAYED = (
    "predicted, not measured: the compiled program, replayed on the",
    "links of the target; the bracket is what its busiest part needs",
    "alone, and the time if nothing overlaps",
)
_ESTIMATED = (
    "estimated from the lowered program, not compiled; the bracket is",
    "the time if all that can overlap does, and if nothing does",
)


def report_of(result: SearchResult, *, top: int, verbose: bool = False) -> Report:
    """Returns the result of a search.

    Args:
      top: rows of the ranking, and of the plans that fell out; the script's mesh is always shown.
      verbose: say how the estimates were made, too.
    """
    return Report(
        title=_title(result),
        sections=(
            Section(blocks=_ranking(result, top)),
            Section(blocks=(_fallen(result, top),)),
            Section(blocks=(summary(result, verbose=verbose),)),
        ),
        facts=lambda: facts_of(result),
    )


def _ranking(result: SearchResult, top: int) -> tuple[Table, ...]:
    ranked = [candidate for candidate in result.candidates if words.is_ranked(candidate)]
    # Beside replays, estimates would look like times of the same kind.
    estimated = [one for one in ranked if result.is_ahead and isinstance(one.outcome, Estimated)]
    if len(estimated) < len(ranked):
        ranked = [one for one in ranked if one not in estimated]
    else:
        estimated = []
    own = [one for one in ranked if one.is_baseline or not words.is_duplicate(one)]
    shown = _first(own, top)
    if not shown:
        return ()
    knobs = varying_knobs(result.candidates)
    in_rows = varying_knobs(shown) if len(shown) > 1 else knobs
    table = ranking_table(shown, in_rows, tokens_per_step=result.facts.searched.tokens_per_step)
    said: list[str] = []
    in_all = tuple(name for name in knobs if name not in in_rows)
    if cells := knob_cells(shown[0], in_all):
        said.append(f"{clean(' '.join(cells))} in every row")
    # Of estimates a study keeps the first, and a summary counts them all.
    is_all_estimated = all(isinstance(one.outcome, Estimated) for one in own)
    known = max(len(own), result.funnel.estimated if is_all_estimated else 0)
    if known > len(shown):
        said.append(f"and {words.count(known - len(shown), 'more plan')} behind these")
    if len(ranked) > len(own):
        same = words.count(len(ranked) - len(own), "plan")
        said.append(f"and {same} with a program that another plan has")
    if estimated:
        low = words.count(len(estimated), "plan")
        said.append(f"and {low} compiled at low effort only, in trials.csv")
    notes = (
        *_marks(shown, table, made_up=result.facts.searched.made_up),
        *(Note(mark="", text=text) for text in said),
    )
    styles = tuple(_STYLES.get(row.standing.verdict, "") for row in shown)
    return (replace(table, notes=notes, styles=styles),)


def _first(candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    head = list(candidates[:top])
    return head + [candidate for candidate in candidates[top:] if candidate.is_baseline]


def _title(result: SearchResult) -> str:
    tokens = result.facts.searched.tokens_per_step
    text = words.title(result) + (f", {format_count(tokens)} tokens/step" if tokens else "")
    return text + (", interrupted" if result.footer.interrupted else "")


def _marks(rows: Sequence[Candidate], table: Table, *, made_up: Sequence[str]) -> Iterator[Note]:
    """Explains the marks in the columns that are shown."""
    names = {column.name for column in table.columns}
    measured = [row.outcome for row in rows if isinstance(row.outcome, Measured)]
    if "\u00b1" in names:
        text = "measured, the longer side of the 95 % interval"
        yield Note(mark="\u00b1", text=text, shown_with=("\u00b1",))
        if any(row.standing.step_s and isinstance(row.outcome, Measured) for row in rows):
            text = "(of the ratio to the exported plan, by which rows are compared)"
            yield Note(mark="", text=text, shown_with=("\u00b1",))
    if measured:
        text = "step times without a mark are measured"
        yield Note(mark="", text=text, hidden_with=("\u00b1",))
    if any(outcome.values == "synthetic" for outcome in measured):
        which = ", ".join(clean(name) for name in made_up)
        yield Note(mark="", text=f"measured on made-up arguments{f': {which}' if which else ''}")
    starred = tuple(
        column.name
        for column in table.columns
        if any("*" in text for text in (column.header, *column.cells))
    )
    if starred:
        yield from _predicted(rows, starred)
    if any(row.partly_counted for row in rows):
        yield Note(mark=">", text="not all of its work has a price, and that of the others has")


def _predicted(rows: Sequence[Candidate], starred: tuple[str, ...]) -> Iterator[Note]:
    """Explains `*`, if one of the columns that have it is shown."""
    kinds = {words.evidence(row) for row in rows}
    replayed = any(replay_of(row.outcome) for row in rows)
    if replayed:
        for mark, text in zip(("*", "", ""), _REPLAYED, strict=True):
            yield Note(mark=mark, text=text, shown_with=("bracket",))
    if "compiled" in kinds or "measured" in kinds:
        text = "predicted from the compiled program, not measured"
        hidden = ("bracket",) if replayed else ()
        yield Note(mark="*", text=text, shown_with=starred, hidden_with=hidden)
        if any(row.standing.step_s and isinstance(row.outcome, Compiled) for row in rows):
            text = "(the best's measured time, times the ratio of both predictions)"
            yield Note(mark="", text=text, shown_with=starred)
    if "estimated" in kinds:
        for mark, text in zip(("*", ""), _ESTIMATED, strict=True):
            yield Note(mark=mark, text=text, shown_with=starred)


def _fallen(result: SearchResult, top: int) -> KeyValues:
    """Lists the plans that are not in the ranking, and why."""
    fallen = [candidate for candidate in result.candidates if not words.is_ranked(candidate)]
    shown = _first(fallen, top)
    knobs = varying_knobs(result.candidates)
    lines = [
        (clean(" ".join([mesh_cell(row), *knob_cells(row, knobs)])), clean(words.reason(row), 240))
        for row in shown
    ]
    if shown and len(shown) < len(fallen):
        lines.append(("", f"and {len(fallen) - len(shown)} more of these in trials.csv"))
    return KeyValues(lines=tuple(lines), labels="plans")


def _estimates_file(result: SearchResult) -> str:
    """Says where all estimates are, as long as there is nothing better."""
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


def summary(result: SearchResult, *, verbose: bool = False) -> KeyValues:
    """Returns the answer in words: a label and a sentence each, without empty ones."""
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
    return lines_of(*((label, clean(text)) for label, text in lines))
