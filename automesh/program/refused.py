"""The exception for a plan that ends in an outcome rather than in an answer (no jax)."""

from __future__ import annotations

from automesh.outcomes import Failure


class StepRefused(Exception):
    """Carries the finished `Failure`; the layer above hands it to the parent."""

    def __init__(self, outcome: Failure) -> None:
        super().__init__(outcome)
        self.outcome = outcome
