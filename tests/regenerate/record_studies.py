"""Writes tests/data/studies/*.json: small searches of the examples, to be replayed by the tests.

    python -m tests.regenerate.record_studies [NAME]...

It takes some minutes, on a machine that does nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import automesh
from automesh.jsonio import from_json, to_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated, Failed, Outcome, TimedOut
from automesh.tuner.study.assemble import outcomes_of
from automesh.tuner.study.metadata import Notebook, read_header
from automesh.tuner.study.study import open_study, parse_storage
from tests.support.paths import DATA, ROOT

FOLDER = DATA / "studies"
AXES = "[axes]\ndp = {}\nfsdp = {}\nep = {}\ntp = {}\nsp = {}\n"
KNOBS = {
    "dense_lm": 'remat = ["full", "none"]\n',
    "moe_lm": "",
    "long_context": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A study as it was found.

    Attributes:
      estimates, compiled, measured: (plan, outcome) pairs.
    """

    name: str
    platform: str
    device_kind: str
    estimates: tuple[tuple[Plan, Estimated], ...]
    compiled: tuple[tuple[Plan, Outcome], ...]
    measured: tuple[tuple[Plan, Outcome], ...]


def read(path: Path) -> Recorded:
    return from_json(json.loads(path.read_text(encoding="utf-8")), Recorded)


def record(name: str) -> Recorded:
    """Searches an example on 8 virtual devices and keeps what the study holds."""
    with tempfile.TemporaryDirectory() as folder:
        space = Path(folder) / "space.toml"
        space.write_text(AXES + (f"[knobs]\n{KNOBS[name]}" if KNOBS[name] else ""))
        result = automesh.search(
            ROOT / "examples" / f"{name}.py",
            target="cpu:8",
            space=space,
            budget="4m",
            top=6,
            rules=Path(folder) / "rules.toml",
            results=Path(folder) / "results",
        )
        print(result.table(width=100))
        (study,) = (Path(folder) / "results").iterdir()
        with open_study(parse_storage("", study), study.name, create=False) as opened:
            header = read_header(opened)
            assert header is not None
            notebook = Notebook(
                study=opened,
                source_hash=header.facts.provenance.source_hash,
                versions=header.facts.provenance.versions,
            )
            measured = outcomes_of(notebook, opened.measure)
            decision = notebook.decision()
            measured |= dict(decision.confirmed) if decision else {}
            trials = [one for one in opened.compile.trials() if notebook.is_current(one)]
            return Recorded(
                name=name,
                platform=header.facts.devices.platform,
                device_kind=header.facts.devices.kind,
                estimates=tuple((one.plan, one.estimated) for one in trials if one.estimated),
                compiled=_without_logs(outcomes_of(notebook, opened.compile)),
                measured=_without_logs(measured),
            )


def _without_logs(outcomes: Mapping[Plan, Outcome]) -> tuple[tuple[Plan, Outcome], ...]:
    """Tracebacks name files of the machine that made them, and no choice depends on them."""
    return tuple(
        (plan, replace(one, log_tail="") if isinstance(one, Failed | TimedOut) else one)
        for plan, one in outcomes.items()
    )


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or KNOBS:
        data: Any = to_json(record(name), Recorded)
        text = json.dumps(data, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
