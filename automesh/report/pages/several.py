"""Searches for several targets as one result: a summary of what each has found."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.report import words
from automesh.report.blocks.columns import GLUE, Column, figures_column, text_column
from automesh.report.blocks.nouns import Note, Report, Section, Table, lines_of
from automesh.report.files.json import facts_of
from automesh.report.result import Candidate, SearchResult
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The result for one target.

    Attributes:
      target: as it was written.
      result: None if the search did not get as far as a result.
      reason: why there is no rule, a sentence; empty if there is one.
      hint: what to do about that.
    """

    target: str
    result: SearchResult | None
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """Searches for several targets, in the order in which they were named.

    Attributes:
      interrupted: True if the last one was stopped, and those after it were not begun.
    """

    searches: tuple[Sought, ...]
    interrupted: bool = False

    @property
    def not_found(self) -> tuple[Sought, ...]:
        """The targets without an answer."""
        return tuple(search for search in self.searches if search.reason)


def report_of(several: Several) -> Report:
    """Makes a line for each target, then says what was not found and why.

    Facts:
      `schema`, `searches` (each as for one target), `not_found` ({target, reason, hint}),
      `interrupted`.
    """
    columns = _columns(several.searches)
    starred = any("*" in cell for column in columns for cell in column.cells)
    note = Note(mark="*", text="predicted or estimated, not measured")
    table = Table(columns=columns, dropped=("bound by", "memory"), notes=(note,) if starred else ())
    missing = lines_of(*(("not found", _why(one)) for one in several.not_found))
    return Report(
        title=_title(several),
        sections=(Section(blocks=(table, missing)),),
        facts=lambda: {
            "schema": SCHEMA,
            "searches": [facts_of(search.result) for search in several.searches if search.result],
            "not_found": [
                {"target": one.target, "reason": one.reason, "hint": one.hint or None}
                for one in several.not_found
            ],
            "interrupted": several.interrupted,
        },
    )


def _title(several: Several) -> str:
    found = len(several.searches) - len(several.not_found)
    all_of_them = words.count(len(several.searches), "target")
    text = f"{found} of {all_of_them} found" if several.not_found else f"{all_of_them}, all found"
    return text + (", interrupted" if several.interrupted else "")


def _why(one: Sought) -> str:
    hint = f" ({clean(one.hint)})" if one.hint else ""
    return f"{clean(one.target)}: {clean(one.reason)}{hint}"


def _columns(searches: tuple[Sought, ...]) -> tuple[Column, ...]:
    rows = [(search, _best(search)) for search in searches]
    plans = [clean(str(best.plan)) if best else "-" for _, best in rows]
    causes = [clean(best.bound_by, 24) if best else "" for _, best in rows]
    return (
        text_column("target", [clean(one.target) for one, _ in rows], most=12),
        text_column("plan", plans, most=16),
        figures_column("step time", [_time(best) for _, best in rows]),
        figures_column("memory", [_memory(best) for _, best in rows]),
        figures_column("bound by", causes, justify="left"),
    )


def _best(one: Sought) -> Candidate | None:
    return words.best_of(one.result) if one.result is not None and not one.reason else None


def _time(best: Candidate | None) -> str:
    seconds = words.step_s(best) if best else None
    if best is None or seconds is None:
        return ""
    return format_seconds(seconds) + (GLUE * 2 if words.evidence(best) == "measured" else " *")


def _memory(best: Candidate | None) -> str:
    return format_bytes(best.peak_bytes) if best and best.peak_bytes else ""
