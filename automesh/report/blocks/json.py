"""A report as JSON: its facts, strictly."""

from __future__ import annotations

import math
from typing import Any

from automesh.report.blocks.nouns import Report


def to_json(report: Report) -> Any:
    """Plain values that `json.dumps(..., allow_nan=False)` takes; what `--json` prints."""
    return finite(report.facts())


def finite(value: Any) -> Any:
    """Strict JSON has no NaN and no infinities: a loss that is one becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value
