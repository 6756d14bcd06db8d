"""What former versions have noted in a study, as what this version reads.

Schema 1 kept a header as about thirty flat fields, without saying so; schema 2 keeps the facts of
the study as one noun, and counts beside it. What is not what a former version has written is handed
on as it was found: reading it then says what is wrong.
"""

from __future__ import annotations

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
    """A header as it was noted, in the form of `Header`."""
    if not isinstance(found, dict):
        return found
    noted = cast("dict[str, Any]", found)
    if "schema" in noted:
        # Of a newer version, it stays: then it is refused as what is not known.
        return {key: one for key, one in noted.items() if (key, one) != ("schema", SCHEMA)}
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


def _taken(flat: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Takes fields out of a flat header, under the names that they have now."""
    return {new: flat.pop(old) for old, new in names.items() if old in flat}


def _with_command_in_parts(noted: dict[str, Any]) -> dict[str, Any]:
    """A header of a version that kept its command as a text: only the parts of it that are known
    ones are read."""
    if "command" not in noted:
        return noted
    kept = {key: one for key, one in noted.items() if key != "command"}
    command = read_text(str(noted["command"]))
    return {**kept, "again": None if command is None else to_json(command, SearchCommand)}


def upgraded_decision(found: Any) -> Any:
    """A decision of a version that compared with the winner of a race, as one of now.

    Its comparisons are left out: they were made with another plan than the exported one.
    """
    if not isinstance(found, dict) or "race" not in found:
        return found
    noted = cast("dict[str, Any]", found)
    race, kept = noted["race"], {key: one for key, one in noted.items() if key != "race"}
    sentence = race.get("sentence") if isinstance(race, dict) else None
    return {**kept, "comparisons": [], "sentence": sentence}
