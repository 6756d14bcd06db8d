"""Actions that a training loop calls at each step: progress is not told, nothing is profiled."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class ReportProgress:
    """Counts the steps."""

    def __init__(self, **_options: object) -> None:
        self.steps = 0

    def __call__(self, _step: int) -> None:
        self.steps += 1

    @contextmanager
    def timed(self, _name: str, **_options: object) -> Generator[None]:
        yield


class Profile:
    """Does nothing at each step."""

    def __init__(self, **_options: object) -> None:
        return

    def __call__(self, _step: int) -> None:
        return
