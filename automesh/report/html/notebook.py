"""A result in a notebook: static HTML without scripts, so that it shows wherever notebooks do.

The whole page with its charts is a file, see `Result.report`: a notebook that held it would grow by
a megabyte for every result that is shown.
"""

from __future__ import annotations

import html

from automesh.errors import NoFeasibleMesh
from automesh.report import words
from automesh.report.blocks.columns import figures_column
from automesh.report.blocks.html import to_html
from automesh.report.blocks.nouns import Note, Report, Section, Sentence, Table, lines_of
from automesh.report.files.rule import rule_text
from automesh.report.html.document import plan_rows
from automesh.report.result import SearchResult
from automesh.units import format_bytes, format_seconds

_HEADS = ("rank", "plan", "evidence", "step time", "vs exported", "memory", "bound by")


def summary_html(result: SearchResult, *, top: int) -> str:
    """Writes the title, the answer, the best plans and the rule.

    Args:
      top: rows of the table.
    """
    rows = [row for row in plan_rows(result) if row["rank"]]
    shown = [*rows[:top], *(row for row in rows[top:] if row["is_baseline"])]
    cells = zip(*map(_cells, shown), strict=True)
    columns = [figures_column(head, column) for head, column in zip(_HEADS, cells)]
    more = Note(mark="", text=f"and {words.count(len(rows) - top, 'more plan')} behind these")
    verdict = words.best_sentence(result) or "nothing was tried"
    blocks = (
        lines_of((words.best_label(result), verdict)),
        Table(columns=tuple(columns), notes=(more,) if len(rows) > top else ()),
        Sentence(text=words.funnel_sentence(result.funnel)),
    )
    report = Report(title=words.title(result), sections=(Section(blocks=blocks),))
    return f"<div>{to_html(report)}{_rule(result)}</div>"


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    step_s, peak = row["step_s"], row["peak_bytes"]
    half = f" {row['half']}" if row["half"] else ""
    return (
        str(row["rank"]),
        f"{row['plan']} (script)" if row["is_baseline"] else str(row["plan"]),
        str(row["evidence"]),
        (format_seconds(step_s) if isinstance(step_s, float) else "") + half,
        str(row["versus"] or ""),
        format_bytes(peak) if isinstance(peak, int) else "",
        str(row["bound_by"] or ""),
    )


def _rule(result: SearchResult) -> str:
    try:
        text = rule_text(result)
    except NoFeasibleMesh as error:
        return f"<p>no rule: {html.escape(error.message)}</p>"
    return f"<details><summary>the rule</summary><pre>{html.escape(text)}</pre></details>"
