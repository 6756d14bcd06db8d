"""How job code in a worker says that it ended in a failure which is an outcome, not a crash."""

from __future__ import annotations

from automesh.outcomes import Failure


class OutcomeError(Exception):
    """Carries a finished `Failure` (such as `OutOfMemory`) from the job to the parent unchanged."""

    def __init__(self, outcome: Failure) -> None:
        super().__init__(outcome)
        self.outcome = outcome
