"""What a job is doing, told to the parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
Emit = Callable[[Event], Event]


class Stages:
    """Tells the parent what the job is doing, and remembers it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.current = "start"

    def enter(self, stage: str) -> None:
        if stage == self.current:
            return
        self.current = stage
        self._emit({"event": "stage", "stage": stage})
