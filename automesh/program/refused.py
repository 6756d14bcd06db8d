"""The exception for a plan that ends in a failure instead of an answer (no jax)."""

from __future__ import annotations

from automesh.outcomes import Failure


class StepRefused(Exception):
    """Carries the finished `Failure` to the layer above, which sends it to the parent."""

    def __init__(self, outcome: Failure) -> None:
        super().__init__(outcome)
        self.outcome = outcome
