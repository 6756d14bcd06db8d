"""A report as HTML without scripts, for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable

from automesh.report.blocks.columns import GLUE
from automesh.report.blocks.nouns import Block, KeyValues, Report, Sentence, Table


def to_html(report: Report) -> str:
    """Writes the title and every block as one element each; no text is ever read as HTML."""
    title = f"<h4>{_text(report.title)}</h4>" if report.title else ""
    return title + "".join(
        (f"<h5>{_text(section.title)}</h5>" if section.title else "")
        + "".join(_block(block) for block in section.blocks)
        for section in report.sections
    )


def _block(block: Block) -> str:
    match block:
        case Sentence(text=text):
            return f"<p>{_text(text)}</p>"
        case KeyValues(lines=lines):
            return "".join(
                f"<p><strong>{_text(label)}</strong> {_text(said)}</p>" for label, said in lines
            )
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    """Writes all columns of a table: a browser has room for them."""
    if not table.columns or not table.columns[0].cells:
        return ""
    head = _row("th", (column.header for column in table.columns)) if table.has_header else ""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(_row("td", row) for row in rows)
    notes = table.notes_beside({column.name for column in table.columns})
    below = "".join(f"<p>{_text(f'{mark} {said}'.strip())}</p>" for mark, said in notes)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{below}"


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{_text(cell)}</{kind}>" for cell in cells) + "</tr>"


def _text(value: str) -> str:
    return html.escape(value.replace(GLUE, " "))
