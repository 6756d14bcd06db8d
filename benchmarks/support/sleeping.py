"""A stand-in for `worker.handlers.jobs`: compiles that take their time, and workers that talk.

The job's arguments are seconds to sleep, and messages to send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from automesh.program.nouns import Lowered
from automesh.worker.messages import CompileJob

Emit = Callable[[dict[str, Any]], dict[str, Any]]


def handle(job: CompileJob, emit: Emit) -> object:
    seconds, messages = job.step.entry.argv
    emit({"event": "stage", "stage": "compile"})
    for _ in range(int(messages)):
        emit({"event": "progress"})
    time.sleep(float(seconds))
    return Lowered(fingerprint=seconds)
