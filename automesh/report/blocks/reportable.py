"""`Reportable`: what the Python API gives back, and a command prints."""

from __future__ import annotations

from typing import Any

from automesh.report.blocks.json import to_json
from automesh.report.blocks.nouns import Report
from automesh.report.blocks.terminal import told


class Reportable:
    """Base of results that can be shown as a report, which a subclass makes."""

    __slots__ = ()

    def to_report(self) -> Report:
        """Makes the answer: sections of blocks for people, and facts for programs."""
        raise NotImplementedError

    def text(self, *, width: int | None = None, colour: bool | None = None) -> str:
        """Returns tables and sentences for a terminal.

        Args:
          width: columns of the terminal; by default those of this one.
          colour: write colours as ANSI codes; by default where this one shows them.
        """
        return told(self.to_report(), width=width, colour=colour)

    def table(self, *, width: int | None = None, colour: bool | None = None) -> str:
        """Returns the same as `text`."""
        return self.text(width=width, colour=colour)

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as plain JSON values; `--json` prints it."""
        return to_json(self.to_report())
