"""Finds the study that a search belongs to: the same inputs resume the same one."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from automesh.plugins.framework import framework_at
from automesh.program.nouns import Entry

BUNDLE = "AUTOMESH_BUNDLE"
"""The environment variable `WORD:FOLDER`: in the data that identify a study, the word replaces the
folder. So a search of a service continues in the same study wherever an agent has unpacked its
bundle. The word is the number of the submission, which is in the names of its studies: nobody can
take a name that belongs to another submission."""
_NUMBER = re.compile(r"[0-9a-f]{16}")
_OF_SUBMISSION = re.compile(r".*-([0-9a-f]{16})-[0-9a-f]{8}", re.DOTALL)
# Names of files that say nothing of what they train.
_SAY_NOTHING = ("build", "main", "run", "step", "launch", "mesh")


def workload_name(entry: Entry) -> str:
    """Returns a short name for people: the script's stem, the last part of a module, or a function.

    A stem that says nothing, such as that of `lm1b/build.py`, has its folder's name before it.
    """
    path = Path(entry.location)
    stem = f"{path.parent.name}-{path.stem}" if path.stem in _SAY_NOTHING else path.stem
    name = {
        "script": stem.lstrip("-"),
        "module": entry.location.rpartition(".")[2],
        "pickle": entry.function,
    }[entry.kind]
    if entry.kind != "pickle" and entry.function != "build":
        name = f"{name}-{entry.function}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


def submission_in(name: str) -> str:
    """Returns the number of the submission in the name of a study.

    It is empty for a study of no submission, or of one that a former version has searched.
    """
    match = _OF_SUBMISSION.fullmatch(name)
    return match[1] if match else ""


def study_name(
    entry: Entry,
    *,
    selector: str,
    axes: Sequence[str],
    scope: Path,
    figures: str = "",
    bundle: str = "",
) -> str:
    """Returns `<workload>-<target>-<hash>`. The hash covers script path, function, arguments,
    target and axes.

    Args:
      scope: directory of all studies; it stands for the location of a callable, which has no path.
      figures: of a target of the user's own, see `Target`.
      bundle: the value of `BUNDLE`; empty where the script's own path counts.
    """

    def ending_at(location: str, number: str = "") -> str:
        identity = [entry.kind, location, entry.function, list(entry.argv), selector, list(axes)]
        identity += [figures] if figures else []
        identity += [entry.start] if entry.start else []
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
        return f"-{selector}-{number}-{digest}" if number else f"-{selector}-{digest}"

    location = str(scope) if entry.kind == "pickle" else entry.location
    word = bundle.partition(":")[0]
    known_by = _in_bundle(location, bundle)
    is_of_submission = known_by != location and _NUMBER.fullmatch(word)
    ending = ending_at(known_by, word if is_of_submission else "")
    # Before names had the number, before bundles had words, when a path was what counted, and
    # before adapters of frameworks were in a plug-in.
    endings = (ending, ending_at(known_by), ending_at(location))
    framework = framework_at(location) if entry.kind == "module" else None
    if framework is not None:
        endings = (*endings, ending_at(framework.former_module))
    for one in endings:
        if former := _former(scope, one):
            return former
    return f"{workload_name(entry)}{ending}"


def _in_bundle(location: str, bundle: str) -> str:
    """Returns a location in the folder of a bundle as the same text on every host."""
    word, _, folder = bundle.partition(":")
    if not word or not folder:
        return location
    path, top = Path(location), Path(folder).resolve()
    return f"{word}:{path.relative_to(top).as_posix()}" if path.is_relative_to(top) else location


def _former(results: Path, ending: str) -> str:
    """Returns the name that another version has given to a study of the same inputs."""
    folders = sorted(one.name for one in results.glob(f"*{glob.escape(ending)}") if one.is_dir())
    return folders[0] if folders else ""
