"""Converts what former versions have stored in a study to the form of this version.

Schema 1 kept a header as about thirty flat fields, without saying so, and a decision with three
nouns for one comparison; schema 2 keeps the facts of the study as one noun, the counts apart from
it, and every comparison as a `Comparison`. Anything that no former version has written is returned
unchanged, and the code that reads it then reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from automesh.jsonio import to_json
from automesh.mesh.axes import usual_batch_axes
from automesh.report.search_command import SearchCommand, read_text

SCHEMA = 2
_SEARCHED = (
    *("workload", "axes", "batch_axes", "axis_types", "tokens_per_step", "arguments", "made_up"),
    *("split", "not_searched", "template"),
)
_DEVICES = {
    "target": "target",
    "platform": "platform",
    "device_kind": "kind",
    "device_count": "count",
    "is_ahead": "are_absent",
    "fabric": "fabric",
}
_MEMORY = {"limit_bytes": "memory_bytes", "reserve_bytes": "reserve_bytes"}
_PROVENANCE = ("source_hash", "versions", "speeds", "again", "location", "results_dir")
_FACTS = ("notices", "details")


def upgraded_header(found: Any) -> Any:
    """Returns a header as it was noted, in the form of `Header`."""
    if not isinstance(found, dict):
        return found
    noted = cast("dict[str, Any]", found)
    if "schema" in noted:
        return _without_schema(noted)
    flat = dict(_with_command_in_parts(noted))
    if "room" in flat:  # The name of `device_memory` in studies of the first versions.
        flat["device_memory"] = flat.pop("room")
    if flat.get("batch_axes") is None and isinstance(flat.get("axes"), list):
        flat["batch_axes"] = list(usual_batch_axes(tuple(map(str, flat["axes"]))))
    searched = _taken(flat, {name: name for name in _SEARCHED})
    devices = _taken(flat, _DEVICES)
    memory = flat.get("device_memory")
    if isinstance(memory, dict):
        devices |= _taken(dict(flat.pop("device_memory")), _MEMORY)
    provenance = _taken(flat, {name: name for name in _PROVENANCE})
    facts = _taken(flat, {name: name for name in _FACTS})
    facts |= {"searched": searched, "devices": devices, "provenance": provenance}
    return {**flat, "facts": facts}


def _without_schema(noted: dict[str, Any]) -> dict[str, Any]:
    # That of a newer version stays: reading then refuses it as what is not known.
    return {key: one for key, one in noted.items() if (key, one) != ("schema", SCHEMA)}


def _taken(flat: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Takes fields out of a flat header, under the names that they have now."""
    return {new: flat.pop(old) for old, new in names.items() if old in flat}


def _with_command_in_parts(noted: dict[str, Any]) -> dict[str, Any]:
    """Splits the command of a header that has it as a text.

    Only parts that are known now are read.
    """
    if "command" not in noted:
        return noted
    kept = {key: one for key, one in noted.items() if key != "command"}
    command = read_text(str(noted["command"]))
    return {**kept, "again": None if command is None else to_json(command, SearchCommand)}


def upgraded_decision(found: Any) -> Any:
    """Returns a decision as it was noted, in the form of `Decision`."""
    if not isinstance(found, dict):
        return found
    noted = cast("dict[str, Any]", found)
    if "schema" in noted:
        return _without_schema(noted)
    noted = _against_exported(noted)
    comparisons, verification = noted.get("comparisons"), noted.get("verification")
    if not isinstance(comparisons, list) or not isinstance(verification, dict):
        return noted
    flat = [dict(cast("dict[str, Any]", one)) for one in comparisons if isinstance(one, dict)]
    if len(flat) != len(cast("list[Any]", comparisons)):
        return noted
    pairs = [[one.pop("plan", None), _with_basis(one)] for one in flat]
    kept = _with_gain(cast("dict[str, Any]", verification), [one for _, one in pairs])
    return {**noted, "comparisons": pairs, "verification": kept}


def _against_exported(noted: dict[str, Any]) -> dict[str, Any]:
    """Converts a decision that compared plans with the winner of a race.

    Its comparisons are left out: they were made with another plan than the exported one.
    """
    if "race" not in noted:
        return noted
    race, kept = noted["race"], {key: one for key, one in noted.items() if key != "race"}
    sentence = race.get("sentence") if isinstance(race, dict) else None
    return {**kept, "comparisons": [], "sentence": sentence}


def _with_basis(comparison: dict[str, Any]) -> dict[str, Any]:
    return {**comparison, "basis": "fresh processes" if comparison.get("processes") else "race"}


def _with_gain(
    verification: dict[str, Any], comparisons: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Adds the comparison with the baseline to a verification, which repeated its figures."""
    kept = dict(verification)
    speedup, interval = kept.pop("speedup", None), kept.pop("speedup_interval", None)
    is_tie = kept.pop("is_tie", None)
    if not isinstance(is_tie, bool) or not isinstance(speedup, float):
        return verification
    if not kept.get("baseline") or (not is_tie and interval == [1.0, 1.0]):
        return kept  # Nothing to compare with, or the baseline itself is exported.
    of_baseline = (
        one for one in comparisons if (one.get("ratio"), one.get("interval")) == (speedup, interval)
    )
    # Older versions have exported what turned out to be slower, too.
    shown = "slower" if speedup >= 1.0 else "faster"
    gain = {
        "verdict": "undecided" if is_tie else shown,
        "ratio": speedup,
        "interval": interval,
        "basis": "fresh processes",
        "processes": kept.get("processes"),
    }
    return {**kept, "gain": next(of_baseline, gain)}
