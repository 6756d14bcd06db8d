"""`Reportable`: what the Python API gives back, and a command prints."""

from __future__ import annotations

from typing import Any

from automesh.report.blocks.json import to_json
from automesh.report.blocks.nouns import Report
from automesh.report.blocks.terminal import told


class Reportable:
    """What can be told as a report: a subclass says which."""

    __slots__ = ()

    def to_report(self) -> Report:
        """The answer as sections of blocks for people, and as facts for programs."""
        raise NotImplementedError

    def text(self, *, width: int | None = None, colour: bool | None = None) -> str:
        """Tables and sentences for a terminal.

        Args:
          width: columns of the terminal; by default those of this one.
          colour: write colours as ANSI codes; by default where this one shows them.
        """
        return told(self.to_report(), width=width, colour=colour)

    def table(self, *, width: int | None = None, colour: bool | None = None) -> str:
        """As `text`."""
        return self.text(width=width, colour=colour)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values; what `--json` prints."""
        return to_json(self.to_report())
