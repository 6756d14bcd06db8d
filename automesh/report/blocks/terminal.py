"""A report on a terminal: lines of text, the same in a terminal, a pipe and a file."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from io import StringIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table as Grid
from rich.text import Text

from automesh.report.blocks.columns import GAP, GLUE, Column, fitting, least_width, widths, wrapped
from automesh.report.blocks.nouns import Block, KeyValues, Report, Sentence, Table
from automesh.texts.terminal import without_controls

MIN_WIDTH = 40
_UNFOLDED = 10_000
_NUMBER_AND_WORD = re.compile(r"(?<=\d) (?=[A-Za-z%])")


def render(report: Report, *, width: int, colour: bool) -> str:
    """Draws a report.

    Args:
      width: columns of the terminal; no line is longer (fewer than 40 are treated as 40).
      colour: write colours as ANSI codes; the text is the same without them.

    Returns:
      Lines that end in a line feed.
    """
    width = max(width, MIN_WIDTH) if report.is_folded else _UNFOLDED
    parts: list[RenderableType] = [Text(glued(report.title))] if report.title else []
    for section in report.sections:
        blocks = [part for block in section.blocks for part in drawn(block, width)]
        if section.title:
            blocks.insert(0, Text(glued(section.title), style="bold"))
        parts += [Text(), *blocks] if parts and blocks else blocks
    return draw(parts, width=width, colour=colour)


def told(report: Report, *, width: int | None = None, colour: bool | None = None) -> str:
    """Draws a report for the terminal of this process, or for a given one; see `render`."""
    return render(
        report,
        width=width or shutil.get_terminal_size().columns,
        colour=is_colourful() if colour is None else colour,
    )


def is_colourful() -> bool:
    """Whether stdout is a terminal that shows colours, and nobody forbids them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def draw(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """Draws one part below the other; see `render`."""
    # Whether this is a terminal, and NO_COLOR, is for the caller to judge: `colour` alone decides.
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        force_jupyter=False,
        force_interactive=False,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )
    for part in parts:
        # Each text is cleaned where it is put into words; what was forgotten there ends here, where
        # the escape sequences of colours are not yet among the text.
        drawn = (
            one if one.control else Segment(without_controls(one.text), one.style)
            for one in console.render(part)
        )
        console.print(Segments(drawn), end="", crop=False)
    lines = out.getvalue().replace(GLUE, " ").split("\n")[:-1]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def drawn(block: Block, width: int) -> list[RenderableType]:
    match block:
        case Sentence(text=text, is_whole=True):
            return [Text(text, no_wrap=True, overflow="ignore")]
        case Sentence(text=text):
            return [Text(glued(text), overflow="fold")]
        case KeyValues(lines=()):
            return []
        case KeyValues():
            return [_key_values(block, width)]
        case Table():
            return _table(block, width)


def glued(text: str) -> str:
    """Keeps a number and the word after it on one line."""
    return _NUMBER_AND_WORD.sub(GLUE, text)


def _key_values(block: KeyValues, width: int) -> Grid:
    of_plans = block.labels == "plans"
    size = block.width if block.labels == "words" else max(cell_len(one) for one, _ in block.lines)
    if of_plans:
        size = min(size, width * 2 // 5)
    grid = Grid.grid(padding=(0, GAP if of_plans else 1, 0, 0))
    style = "bold" if block.labels == "words" else ""
    grid.add_column(width=size, style=style, no_wrap=not of_plans, overflow="fold")
    grid.add_column(overflow="fold")
    for label, text in block.lines:
        # A line without a plan is no reason: it says how many plans are not shown.
        why = Text(glued(text), style="red" if of_plans and label else "")
        grid.add_row(Text(wrapped(label, size) if of_plans else label), why)
    return grid


def _table(table: Table, width: int) -> list[RenderableType]:
    if not table.columns or not table.columns[0].cells:
        return []
    columns = _shown(table, width)
    grid = Grid(
        box=box.SIMPLE_HEAD if table.is_ruled else None,
        show_edge=False,
        pad_edge=False,
        show_header=table.has_header,
        header_style="table.header" if table.is_ruled else "",
        padding=(0, 1 if table.is_ruled else GAP, 0, 0),
    )
    sizes = widths(columns, width)
    for column, size in zip(columns, sizes, strict=True):
        grid.add_column(
            Text(column.header),
            justify=column.justify,
            width=size,
            no_wrap=not column.floor,
            overflow="fold",
        )
    for index in range(len(columns[0].cells)):
        cells = (
            Text(column.folded(column.cells[index], size))
            for column, size in zip(columns, sizes, strict=True)
        )
        grid.add_row(*cells, style=table.styles[index] if table.styles else "")
    notes = table.notes_beside({column.name for column in columns})
    indented = Padding(grid, (0, 0, 0, table.indent), expand=False) if table.indent else grid
    below = KeyValues(lines=notes, labels="marks")
    return [indented, _key_values(below, width)] if notes else [indented]


def _shown(table: Table, width: int) -> list[Column]:
    """Returns the columns that there is room for."""
    kept = fitting(table.columns, width - table.indent, table.dropped)
    if not table.narrow or least_width(kept) <= width:
        return kept
    return [*table.narrow, *(column for column in kept if not column.floor)]
