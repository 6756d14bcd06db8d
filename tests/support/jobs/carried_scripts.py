"""Stores the steps of scripts, or compares stored steps with real runs, all in this process.

    python -m tests.support.jobs.carried_scripts store FOLDER
    python -m tests.support.jobs.carried_scripts check FOLDER
    python -m tests.support.jobs.carried_scripts build FOLDER

The first line of each script is `# MESH ... [| MESH]`, the meshes that are tried for its second
run, and the mesh on which it is run once more, as for a rule, if its step is carried; if it is not,
its step is built there twice. `store` leaves a folder beside each script; `check`, in a fresh
process, reads it; `build` builds the step on the last mesh in one more process. All print one JSON
object, by script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

from automesh.errors import AutomeshError
from automesh.mesh.axes import MeshAxis
from automesh.program.capture.build import EndedEarly, OtherBatch, build_by_running
from automesh.program.capture.discover import discover
from automesh.program.carry.by_mesh import keep_first
from automesh.program.carry.check import check_carried
from automesh.program.carry.starts import starts
from automesh.program.carry.stored_step import read_step
from automesh.program.lower.any_step import lower_any
from automesh.program.nouns import Entry
from automesh.program.script.build import build_on


def stored(script: Path) -> dict[str, Any]:
    folder = script.with_suffix("")
    folder.mkdir()
    entry = Entry(kind="script", location=str(script), function="")
    found = discover(entry, keep=partial(keep_first, str(folder)))
    capture = dataclasses.replace(found.capture, folder=str(folder))
    entry = dataclasses.replace(entry, function=capture.step.name, capture=capture)
    (folder / "entry.pickle").write_bytes(pickle.dumps(entry))
    has_values = not found.not_carried and read_step(folder).has_values
    return {
        "step": capture.step.name,
        "not_carried": found.not_carried,
        "has_values": has_values,
        "unused_mesh": str(found.unused_mesh or ""),
    }


def checked(script: Path) -> dict[str, Any]:
    folder = script.with_suffix("")
    entry = pickle.loads((folder / "entry.pickle").read_bytes())
    second, _, last = script.read_text().partition("\n")[0].removeprefix("#").partition("|")
    meshes = [tuple(map(_axis, word.split(","))) for word in second.split()]
    stages: list[str] = []
    program, same_program = "", False
    found = check_carried(entry, meshes, lower=lower_any, entering=stages.append)
    stored_on = found.mesh if found.is_stored else ""
    if stored_on and found.difference:  # A third run shows whether this step can be carried.
        found = check_carried(entry, meshes[::-1], lower=lower_any, entering=stages.append)
    if last and not found.difference:
        entry = dataclasses.replace(entry, capture=entry.capture.stored(found.by))
        meshes = [tuple(map(_axis, last.strip().split(",")))]
        found = check_carried(entry, meshes, lower=lower_any, entering=stages.append)
    elif last:
        # The first run has left its step on the script's own mesh: no run there.
        assert entry.capture is not None
        _program_on(entry, str(entry.capture.mesh))
        program, again = _program_on(entry, last), _program_on(entry, last)
        same_program = program == again
    return {
        **dataclasses.asdict(found),
        "same_program": same_program,
        "program": program,
        "stored_on": stored_on,
        "stages": stages,
        "starts": starts(str(folder)),
    }


def built(script: Path) -> dict[str, Any]:
    folder = script.with_suffix("")
    entry = pickle.loads((folder / "entry.pickle").read_bytes())
    last = script.read_text().partition("\n")[0].rpartition("|")[2]
    return {"program": _program_on(entry, last), "starts": starts(str(folder))}


def _program_on(entry: Entry, mesh: str) -> str:
    """Returns the text of the step of a script that is run for each mesh."""
    assert entry.capture is not None
    entry = dataclasses.replace(entry, capture=entry.capture.stored(""))
    build = build_by_running(entry)
    program: Any = lower_any(build_on(build, tuple(map(_axis, mesh.strip().split(",")))))
    return "\n".join(line.text for line in program.lines())


def _axis(text: str) -> MeshAxis:
    name, _, size = text.partition(":")
    return MeshAxis(name=name, ici=int(size))


def main(what: str, folder: Path) -> None:
    run = {"store": stored, "check": checked, "build": built}[what]
    found: dict[str, Any] = {}
    for script in sorted(folder.glob("*.py")):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[script.stem] = run(script)
        except (AutomeshError, EndedEarly, OtherBatch) as error:
            found[script.stem] = {"error": str(error)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
