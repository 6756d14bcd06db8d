"""Reports the stages of a job to the parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
Emit = Callable[[Event], Event]


class StageReporter:
    """Reports each stage of a job to the parent, and remembers the last one."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.current = "start"

    def enter(self, stage: str) -> None:
        if stage == self.current:
            return
        self.current = stage
        self._emit({"event": "stage", "stage": stage})
