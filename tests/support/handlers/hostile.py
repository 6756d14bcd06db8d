"""A stand-in for `worker.handlers.jobs` that starts no jax: loads a script, calls its `build`, then
its step, and answers with the figure that this gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from automesh.program.nouns import VisitAnswer
from automesh.program.script.load import load_entry
from automesh.worker.handlers.stages import StageReporter
from automesh.worker.messages import VisitJob


def handle(job: VisitJob, emit: Callable[[dict[str, Any]], dict[str, Any]]) -> VisitAnswer:
    stages = StageReporter(emit)
    stages.enter("load")
    build = load_entry(job.step.entry)
    stages.enter("build")
    step, _ = build(None)
    stages.enter("run")
    given = step()
    return VisitAnswer(
        samples_s=(0.5,),
        losses=() if isinstance(given, str) else (float(given),),
        loss_dtype="float32",
        values="synthetic",
        setup_s=0.1,
        peak_bytes=os.getpid(),
        fingerprint=given if isinstance(given, str) else str(sys.getrecursionlimit()),
    )
