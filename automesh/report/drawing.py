"""Rich renderables as lines of text, the same in a terminal, a pipe and a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from automesh.report.columns import GLUE, Column, widths, wrapped
from automesh.texts.terminal import without_controls

MIN_WIDTH = 40
_LABEL_WIDTH = 9
_NUMBER_AND_WORD = re.compile(r"(?<=\d) (?=[A-Za-z%])")


def draw(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """Draws one part below the other.

    Args:
      width: columns of the terminal; no line is longer.
      colour: write colours as ANSI codes; the text is the same without them.

    Returns:
      Lines that end in a line feed.
    """
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
        console.print(Segments(drawn), end="")
    lines = out.getvalue().replace(GLUE, " ").split("\n")[:-1]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def glued(text: str) -> str:
    """Keeps a number and the word after it on one line."""
    return _NUMBER_AND_WORD.sub(GLUE, text)


def footnotes(notes: Sequence[tuple[str, str]]) -> Table:
    """Marks and what they mean."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for mark, note in notes:
        grid.add_row(Text(mark), Text(note))
    return grid


def labelled(lines: Iterable[tuple[str, str]]) -> Table:
    """A label and a sentence a line."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL_WIDTH, style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(label), Text(glued(text)))
    return grid


def tabulated(columns: Sequence[Column], *, width: int, styles: Sequence[str] = ()) -> Table:
    """Columns that fit into `width` side by side under a rule.

    Args:
      styles: one per row; none gives them all the plain one.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    sizes = widths(columns, width)
    for column, size in zip(columns, sizes, strict=True):
        table.add_column(
            Text(column.header),
            justify=column.justify,
            width=size,
            no_wrap=not column.floor,
            overflow="fold",
        )
    for index in range(len(columns[0].cells)):
        cells = (
            Text(wrapped(column.cells[index], size) if column.floor else column.cells[index])
            for column, size in zip(columns, sizes, strict=True)
        )
        table.add_row(*cells, style=styles[index] if styles else "")
    return table
