"""A result in a notebook: static HTML without scripts, so that it shows wherever notebooks do.

The whole page with its charts is a file, see `Result.report`: a notebook that held it would grow by
a megabyte for every result that is shown.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from automesh.errors import NoFeasibleMesh
from automesh.report import words
from automesh.report.files.rule import rule_text
from automesh.report.html.document import plan_rows
from automesh.report.result import SearchResult
from automesh.units import format_bytes, format_seconds

_HEADS = ("rank", "plan", "evidence", "step time", "vs exported", "memory", "bound by")


def summary_html(result: SearchResult, *, top: int) -> str:
    """Title, answer, the best plans and the rule.

    Args:
      top: rows of the table.
    """
    rows = [row for row in plan_rows(result) if row["rank"]]
    cells = [_cells(row) for row in rows[:top]]
    own = [_cells(row) for row in rows[top:] if row["is_baseline"]]
    more = f"<p>and {words.count(len(rows) - top, 'more plan')} behind these</p>"
    verdict = words.best_sentence(result) or "nothing was tried"
    return "".join(
        [
            f"<div><h4>{_text(words.title(result))}</h4>",
            f"<p><strong>{_text(words.best_label(result))}</strong> {_text(verdict)}</p>",
            _table([*cells, *own]) if cells else "",
            more if len(rows) > top else "",
            f"<p>{_text(words.funnel_sentence(result.funnel))}</p>",
            _rule(result),
            "</div>",
        ]
    )


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


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in _HEADS)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _rule(result: SearchResult) -> str:
    try:
        text = rule_text(result)
    except NoFeasibleMesh as error:
        return f"<p>no rule: {_text(error.message)}</p>"
    return f"<details><summary>the rule</summary><pre>{_text(text)}</pre></details>"


def _text(value: str) -> str:
    return html.escape(value)
