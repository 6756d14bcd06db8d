"""The questions about one study: its figures, its table, and what its rule changes in a file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from automesh.jsonio import dumps
from automesh.mesh.rules.file import merged_rules
from automesh.report.blocks.json import to_json
from automesh.report.blocks.terminal import render
from automesh.report.files.rule import rule_of
from automesh.report.result import SearchResult
from automesh.report.table import report_of
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.metadata import reading


def answer_of(question: dict[str, Any]) -> str:
    """Returns the text that answers a question, for the study as it is now.

    Raises:
      AutomeshError: the study cannot be read, does not exist any more, or does not have what the
        question asks for.
    """
    found = _read(Path(question["folder"]), str(question["storage"]))
    match question["what"]:
        case "result":
            return dumps(to_json(report_of(found, top=0)), indent=1)
        case "table":
            top, width = int(question["top"]), int(question["width"])
            return render(report_of(found, top=top), width=width, colour=False) + "\n"
        case "diff":
            return _diff(found, str(question["mine"]))
        case other:
            raise ValueError(f"nobody asks for {other!r}")


def _read(folder: Path, storage: str) -> SearchResult:
    # Files from submitted code or an agent are never opened in place, but as copies.
    opened = reading(folder, results=folder.parent, storage=storage, in_place=False)
    with opened as (_, study, header):
        study.freeze()
        return assemble(study, header)


def _diff(found: SearchResult, mine: str) -> str:
    source = Path("mesh_rules.toml")
    merged = merged_rules(mine, rule_of(found), selector=found.facts.devices.target, source=source)
    lines = difflib.unified_diff(
        mine.splitlines(keepends=True),
        merged.splitlines(keepends=True),
        "mesh_rules.toml",
        f"mesh_rules.toml with the rule of {found.facts.devices.target}",
    )
    return "".join(_ended(lines))


def _ended(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
