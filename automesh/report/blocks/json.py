"""A report as JSON: its facts, strictly."""

from __future__ import annotations

import math
from typing import Any

from automesh.report.blocks.nouns import Report


def to_json(report: Report) -> Any:
    """Returns plain values that `json.dumps(..., allow_nan=False)` takes; `--json` prints them."""
    return finite(report.facts())


def finite(value: Any) -> Any:
    """Replaces NaN and infinities, such as a loss may be, by null: strict JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value
