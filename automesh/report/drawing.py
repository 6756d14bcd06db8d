"""Rich renderables as lines of text, for reports that are not made of blocks yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from automesh.report.blocks import terminal
from automesh.report.blocks.columns import Column
from automesh.report.blocks.nouns import KeyValues, Line, Table

MIN_WIDTH = terminal.MIN_WIDTH
draw = terminal.draw
glued = terminal.glued


def footnotes(notes: Iterable[Line]) -> RenderableType:
    return terminal.drawn(KeyValues(lines=tuple(notes), labels="marks"), 0)[0]


def labelled(lines: Iterable[Line]) -> RenderableType:
    return terminal.drawn(KeyValues(lines=tuple(lines)), 0)[0]


def tabulated(
    columns: Sequence[Column], *, width: int, styles: Sequence[str] = ()
) -> RenderableType:
    return terminal.drawn(Table(columns=tuple(columns), styles=tuple(styles)), width)[0]
