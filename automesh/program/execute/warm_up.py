"""How many steps warm up: decided for all processes that run a step together (no jax)."""

from __future__ import annotations

import math

_LEAST_STEP_S = 1e-4  # A clock that shows less shows nothing.


def steps_to_warm_up(step_s: float, least_s: float) -> int:
    """Further steps until about `least_s` are over, of which one step has taken `step_s`.

    >>> steps_to_warm_up(0.01, 0.05), steps_to_warm_up(3.0, 0.05)
    (4, 0)
    """
    return max(0, math.ceil(least_s / max(step_s, _LEAST_STEP_S)) - 1)
