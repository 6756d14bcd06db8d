"""`automesh check-script --json`."""

from __future__ import annotations

from typing import Any

from automesh import jsonio
from automesh.report.script_check.nouns import CheckedScript

SCHEMA = 1


def to_json(found: CheckedScript) -> dict[str, Any]:
    """The record as plain JSON values, by the names of its attributes, with `schema` and `ready`
    before them: bytes are integers, a shape is a list."""
    return {
        "schema": SCHEMA,
        "ready": found.is_ready,
        **jsonio.to_json(found, CheckedScript),
    }
