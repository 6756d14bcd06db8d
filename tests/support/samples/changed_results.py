"""Results with other facts: what a test changes, wherever in a result it stands."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from automesh.report.facts import Devices, Provenance, Searched
from automesh.report.result import Footer, SearchResult

_PARTS = {"searched": Searched, "devices": Devices, "provenance": Provenance}


def changed(result: SearchResult, **changes: Any) -> SearchResult:
    """The result with fields of its own, of its footer, or of its facts replaced."""
    own = {one.name for one in fields(SearchResult)}
    footer, facts = result.footer, result.facts
    of_footer = _taken(changes, Footer)
    for name, kind in _PARTS.items():
        part = replace(getattr(facts, name), **_taken(changes, kind))
        facts = replace(facts, **{name: part})
    if "details" in changes:
        facts = replace(facts, details=changes.pop("details"))
    assert changes.keys() <= own, changes.keys() - own
    return replace(result, **{"footer": replace(footer, **of_footer), "facts": facts} | changes)


def _taken(changes: dict[str, Any], kind: type) -> dict[str, Any]:
    names = [one.name for one in fields(kind) if one.name in changes]
    return {name: changes.pop(name) for name in names}
