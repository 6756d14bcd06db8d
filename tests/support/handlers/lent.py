"""A stand-in for `worker.handlers.jobs` on a host that is lent to a search: compiles, without jax.

The job's arguments are how long it takes, and a folder in which each start of a compile is noted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automesh.hlo.store import ModuleStore, Stored, key_of
from automesh.outcomes import Counts, Memory
from automesh.program.nouns import CompileAnswer, Lowered
from automesh.worker.messages import CompileJob

Emit = Callable[[dict[str, Any]], dict[str, Any]]
COUNTS = Counts(flops=1, hbm_bytes=1, collectives=())
MEMORY = Memory(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=1, peak_bytes=1)


def handle(job: CompileJob, emit: Emit) -> object:
    seconds, folder = job.step.entry.argv
    emit({"event": "stage", "stage": "lower"})
    fingerprint = f"program of {job.plan.axes[0].ici // 2}"  # Two plans have the same.
    if not emit({"event": "lowered", "fingerprint": fingerprint, "reply": True})["go"]:
        return Lowered(fingerprint=fingerprint)
    emit({"event": "stage", "stage": "compile"})
    note = Path(folder, f"{fingerprint} {os.getpid()} {time.monotonic_ns()}")
    note.write_text("")
    time.sleep(float(seconds))
    key = key_of(fingerprint=fingerprint, target="", effort=(), versions=(), environment=())
    stored = Stored(
        module=fingerprint.encode() * 1000,
        memory=MEMORY,
        counts=COUNTS,
        compile_s=float(seconds),
        effort="default",
        target="",
        label=str(job.plan),
        versions=(),
    )
    ModuleStore(Path(job.store_dir)).keep(key, stored)
    return CompileAnswer(
        fingerprint=fingerprint,
        memory=MEMORY,
        counts=COUNTS,
        compile_s=float(seconds),
        effort="default",
        stored=key,
    )
