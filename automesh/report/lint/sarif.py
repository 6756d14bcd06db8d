"""A lint as SARIF 2.1.0, which code hosts show beside the lines of a change.

Source: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. Every rule is listed, so
that a viewer can explain those without a result. Places are relative to the folder of the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from automesh.package import installed_version
from automesh.report.findings import BROKEN, RULES
from automesh.report.lint.nouns import Linted, LintReport
from automesh.report.lint.text import saving

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(report: LintReport) -> dict[str, Any]:
    """Returns the report as the object of one SARIF file."""
    rules = list(RULES)
    driver: dict[str, Any] = {
        "name": "automesh lint",
        "rules": [
            {
                "id": rule,
                "name": "".join(word.capitalize() for word in rule.split("-")),
                "shortDescription": {"text": RULES[rule].title},
                "fullDescription": {"text": _sentence(RULES[rule].why)},
                "help": {"text": f"docs/lint.md, section `{rule}`"},
                "defaultConfiguration": {"level": _level(rule)},
            }
            for rule in rules
        ],
    }
    if version := installed_version("jax-automesh"):
        driver["version"] = version
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "results": [_result(one, report, rules) for one in report.findings],
                "columnKind": "unicodeCodePoints",
            }
        ],
    }


def _result(one: Linted, report: LintReport, rules: Sequence[str]) -> dict[str, Any]:
    tried = f" Tried: {one.tried.change}: {saving(one.tried)}." if one.tried else ""
    found: dict[str, Any] = {
        "ruleId": one.rule,
        "ruleIndex": rules.index(one.rule),
        "level": _level(one.rule),
        "message": {
            "text": f"{_sentence(one.what)} On {report.target}, {one.plan}. "
            f"Cure: {_sentence(one.cure)}{tried}"
        },
        # The same finding in another run: what it is and about which array, not its figures.
        "partialFingerprints": {"automesh/v1": f"{one.rule}:{one.source}:{one.array}"},
        "properties": {
            "mesh": one.plan,
            "bytes": one.bytes,
            "count": one.count,
            "axes": list(one.axes),
        },
    }
    if one.line:
        path = PurePath(one.file or one.source.rpartition(":")[0]).as_posix()
        found["locations"] = [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(path)},
                    "region": {"startLine": one.line},
                }
            }
        ]
    return found


def _level(rule: str) -> str:
    return "error" if rule in BROKEN else "warning"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
