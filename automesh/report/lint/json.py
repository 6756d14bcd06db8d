"""What `automesh lint --json` prints.

Schema 1. Names carry their units; a figure that is not known is null. Keys are only ever added
within a schema number.

    schema, script, workload, target, device, device_count, speeds, notices
    plans       texts of the meshes that were looked at
    findings    the most expensive first: {rule, title, plan, plans, array, axes, source, file,
                line, what, why, cure, bytes, count, seconds, tried}; `bytes` are of one device,
                `count` how often in a step, `plans` how many of those that were looked at have
                it; `tried` is null where there is only advice, else {change, memory_bytes,
                step_s, is_gone}, the figures estimated and each a pair: before and after
    smaller     how many findings are below the threshold
    missing     [{plan, why}] of meshes without an estimate
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from automesh.report.lint.nouns import Linted, LintReport

SCHEMA = 1


def facts_of(report: LintReport) -> dict[str, Any]:
    """Returns the report as plain JSON values; see the module."""
    return {
        "schema": SCHEMA,
        "script": report.script,
        "workload": report.workload,
        "target": report.target,
        "device": report.device,
        "device_count": report.device_count,
        "speeds": report.speeds or None,
        "notices": list(report.notices),
        "plans": list(report.plans),
        "findings": [_finding(one) for one in report.findings],
        "smaller": report.smaller,
        "missing": [{"plan": plan, "why": why} for plan, why in report.missing],
    }


def _finding(one: Linted) -> dict[str, Any]:
    data = asdict(one)
    tried = data["tried"]
    if tried is not None:
        tried |= {key: list(tried[key]) for key in ("memory_bytes", "step_s")}
    return data | {
        "axes": list(one.axes),
        "source": one.source or None,
        "file": one.file or None,
        "line": one.line or None,
        "seconds": one.seconds or None,
    }
