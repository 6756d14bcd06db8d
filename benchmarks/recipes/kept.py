"""Predictions in a file, a line of JSON each; what is asked for twice is compiled once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.errors import AutomeshError, UsageError
from automesh.jsonio import read_json, to_json
from benchmarks.recipes.predict import Asked, Prediction


@dataclass(slots=True, kw_only=True)
class Kept:
    """The lines of a file, the last one of each record."""

    path: Path
    lines: dict[str, Prediction]

    @classmethod
    def open(cls, path: Path) -> Kept:
        """Reads what is there.

        Raises:
          UsageError: a line is none of ours.
        """
        lines: dict[str, Prediction] = {}
        texts = path.read_text("utf-8").splitlines() if path.exists() else []
        for number, text in enumerate(texts, start=1):
            try:
                one = read_json(text, Prediction)
            except AutomeshError as error:
                raise UsageError(
                    f"line {number} of `{path}` is no prediction: {error}",
                    hint="delete the line: its record is predicted again",
                ) from None
            lines[one.asked.id] = one
        return cls(path=path, lines=lines)

    def find(self, asked: Asked) -> Prediction | None:
        """The record's own line, or that of another record that asks for the same, as its own."""
        own = self.lines.get(asked.id)
        if own is not None and own.digest == asked.digest:
            return own
        for one in self.lines.values():
            if one.digest == asked.digest:
                return replace(one, asked=asked, same_as=one.same_as or one.asked.id)
        return None

    def keep(self, one: Prediction) -> None:
        """Adds a line; one that is torn by a crash is the last."""
        self.lines[one.asked.id] = one
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(one, Prediction)) + "\n")
