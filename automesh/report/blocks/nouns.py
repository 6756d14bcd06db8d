"""`Report`: sections of blocks for people, facts for programs.

A command builds one report. `terminal.render`, `html.to_html` and `json.to_json` are the only ones
that know how a report is shown: a command lays nothing out itself. Texts in a report are cleaned
where they are put into words; figures are words with their units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from automesh.report.blocks.columns import Column

Line = tuple[str, str]
# `words`: labels of 9 characters, bold. `marks`: footnotes, as narrow as the widest mark. `plans`:
# plans and why they fell out, at most two fifths of the width, folded after commas.
Labels = Literal["words", "marks", "plans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One paragraph.

    Attributes:
      is_whole: a terminal does not fold it: `train.py:12: rule`, by which an editor finds the line.
    """

    text: str
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValues:
    """Lines with a label and a sentence; a line without a label continues the one before.

    Attributes:
      width: characters of the labels, where `labels` are words.
    """

    lines: tuple[Line, ...]
    labels: Labels = "words"
    width: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A footnote to a table.

    Attributes:
      mark: empty where it goes on with the note before.
      shown_with: columns, one of which must be shown; empty: it is always shown.
      hidden_with: columns, none of which may be shown.
    """

    mark: str
    text: str
    shown_with: tuple[str, ...] = ()
    hidden_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns side by side.

    Attributes:
      dropped: names of the columns that a narrow terminal does without, in this order.
      narrow: instead of the columns of text, where there is not even room for the others.
      notes: below it.
      styles: of the rows, as Rich writes them: `bold green`; none gives all the plain one.
      is_ruled: a line is drawn below the headers.
      has_header: whether headers are drawn.
      indent: characters before it.
    """

    columns: tuple[Column, ...]
    dropped: tuple[str, ...] = ()
    narrow: tuple[Column, ...] = ()
    notes: tuple[Note, ...] = ()
    styles: tuple[str, ...] = ()
    is_ruled: bool = True
    has_header: bool = True
    indent: int = 0

    def notes_beside(self, shown: Collection[str]) -> tuple[Line, ...]:
        """Returns the notes that a table needs if these columns are shown."""
        return tuple(
            (note.mark, note.text)
            for note in self.notes
            if (not note.shown_with or any(name in shown for name in note.shown_with))
            and not any(name in shown for name in note.hidden_with)
        )


Block = Sentence | KeyValues | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks that belong together, with an empty line before and after them.

    Attributes:
      blocks: in their order; one that is empty is not shown.
      title: above them; empty for none.
    """

    blocks: tuple[Block, ...]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a command shows: sections for people, facts for programs.

    Attributes:
      sections: for people.
      facts: makes the plain values that `--json` prints, where they are wanted; by default none.
      title: above all sections; empty for none.
      is_folded: whether a terminal folds lines to its width; the log of a continuous integration,
        from which commands are copied, does not.
    """

    sections: tuple[Section, ...]
    facts: Callable[[], Any] = dict
    title: str = ""
    is_folded: bool = True


def lines_of(*lines: Line, labels: Labels = "words") -> KeyValues:
    """Makes lines of those entries that have a sentence."""
    return KeyValues(lines=tuple(line for line in lines if line[1]), labels=labels)
