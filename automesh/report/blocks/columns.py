"""Columns of a table, and how they fit a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len

GAP = 2
# Stands for a space that Rich must neither break a line at nor strip (it does both with no-break
# spaces); a private character that no cleaned text holds, made a space again when all is drawn.
GLUE = "\ue000"
_ATOM = re.compile(r"\s*[^\s,]+,?|,")
# Before each key of a name; `norm_0..1` is one.
KEY = re.compile(r"(?=\[)|(?<!\.)(?=\.(?!\.))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
      floor: least width that a column of text can live with; 0 for figures, which are never cut.
      of_keys: its cells are names, `.params['w']`, which are folded before a key.
    """

    name: str
    header: str
    cells: tuple[str, ...]
    justify: Literal["left", "right"] = "left"
    floor: int = 0
    of_keys: bool = False

    @property
    def width(self) -> int:
        """The terminal cells that the unbroken text takes."""
        lines = (line for text in (self.header, *self.cells) for line in text.split("\n"))
        return max(map(cell_len, lines))

    def folded(self, cell: str, width: int) -> str:
        """Returns the text of a cell with line ends where it does not fit."""
        if not self.floor:
            return cell
        return wrapped(_by_keys(cell, width) if self.of_keys else cell, width)


def text_column(
    header: str, cells: Iterable[str], *, most: int, name: str = "", of_keys: bool = False
) -> Column:
    """Returns a column of text, which is folded where the terminal is narrow.

    Args:
      most: terminal cells that it can be folded to.
      name: by default the header.
    """
    column = Column(name=name or header, header=header, cells=tuple(cells), of_keys=of_keys)
    return replace(column, floor=max(min(column.width, most), 1))


def figures_column(
    header: str, cells: Iterable[str], *, justify: Literal["left", "right"] = "right"
) -> Column:
    """Returns a column that is never folded, called as its header."""
    return Column(name=header, header=header, cells=tuple(cells), justify=justify)


def least_width(columns: Sequence[Column]) -> int:
    """Returns the cells of columns side by side whose text is folded as far as possible."""
    return sum((column.floor or column.width) + GAP for column in columns) - GAP


def fitting(columns: Sequence[Column], width: int, dropped: Sequence[str]) -> list[Column]:
    """Leaves out the named columns, in this order, until the rest fits, if it ever does."""
    kept = list(columns)
    for drop in (None, *dropped):
        kept = [column for column in kept if column.name != drop]
        if least_width(kept) <= width:
            break
    return kept


def widths(columns: Sequence[Column], width: int) -> list[int]:
    """Returns the cells of each column: figures get what they need, text the rest from the left."""
    sizes = [column.floor or column.width for column in columns]
    spare = max(width - sum(sizes) - GAP * (len(columns) - 1), 0)
    for place, column in enumerate(columns):
        grown = min(column.width - sizes[place], spare)
        sizes[place] += grown
        spare -= grown
    return sizes


def _by_keys(name: str, width: int) -> str:
    """Breaks a name too long for its column before a key."""
    lines = [""]
    for part in KEY.split(name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += part
    return "\n".join(lines)


def wrapped(text: str, width: int) -> str:
    """Breaks a mesh too long for its column after a comma; Rich alone would break anywhere."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for atom in _ATOM.findall(line):
            if lines[-1] and cell_len(lines[-1] + atom) > width:
                lines.append(atom.lstrip())
            else:
                lines[-1] += atom
    return "\n".join(lines)
