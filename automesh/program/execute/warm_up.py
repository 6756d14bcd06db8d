"""Decides the number of warm-up steps for all processes that run a step together (no jax)."""

from __future__ import annotations

import math

_LEAST_STEP_S = 1e-4  # Shorter times are not reliable.


def steps_to_warm_up(step_s: float, least_s: float) -> int:
    """Returns the number of further steps until about `least_s` are over, if one step takes
    `step_s`.

    >>> steps_to_warm_up(0.01, 0.05), steps_to_warm_up(3.0, 0.05)
    (4, 0)
    """
    return max(0, math.ceil(least_s / max(step_s, _LEAST_STEP_S)) - 1)
