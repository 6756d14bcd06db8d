"""A stand-in for `worker.handlers.jobs` in the processes of a gang, without jax.

The job's function names what to do, its first argument on which rank: the others wait for all in a
"collective" that never ends, as those of a real step would, or answer if nothing else happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.program.execute.warm_up import steps_to_warm_up
from automesh.program.nouns import VisitAnswer
from automesh.worker.messages import Job
from automesh.worker.place import place_in
from tests.support.handlers import misbehaving

Emit = Callable[[dict[str, Any]], dict[str, Any]]


def handle(job: Job, emit: Emit) -> object:
    place = place_in(os.environ)
    assert place is not None
    function, (rank, *argv) = job.step.entry.function, job.step.entry.argv
    emit({"event": "stage", "stage": "build"})
    if function == "agree":
        return agree(emit, place.rank, *argv)
    emit({"event": "gather", "where": "program", "reply": True})
    emit({"event": "stage", "stage": "run"})
    if rank in ("all", str(place.rank)):
        return globals().get(function, vars(misbehaving).get(function))(emit, *argv)
    time.sleep(600)
    return None


def agree(emit: Emit, rank: int, *what: str) -> VisitAnswer:
    """Meets the others and says what was answered."""
    said = {"event": "slowest", "seconds": 0.01 * (rank + 1), "reply": True}
    steps = steps_to_warm_up(emit(said)["seconds"], 0.1)
    fingerprint = f"{what[rank]} {steps}" if what else f"{steps}"
    return VisitAnswer(
        samples_s=(0.1 * (rank + 1), 0.5 - 0.1 * rank),
        losses=(1.0, float("nan")),
        loss_dtype="float32",
        values="synthetic",
        setup_s=1.0 + rank,
        peak_bytes=os.getpid(),
        fingerprint=fingerprint,
    )


def meets(emit: Emit) -> VisitAnswer:
    """Says where."""
    place = place_in(os.environ)
    assert place is not None
    return replace(agree(emit, place.rank), fingerprint=place.coordinator)


def devices(emit: Emit, folder: str) -> VisitAnswer:
    """Writes which it was told to take."""
    place = place_in(os.environ)
    assert place is not None
    said = f"{os.environ['JAX_LOCAL_DEVICE_IDS']} {os.environ['JAX_PLATFORMS']}"
    Path(folder, f"rank{place.rank}").write_text(said)
    return replace(agree(emit, place.rank), fingerprint="", samples_s=(0.1,))


def stop(emit: Emit) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sever(emit: Emit) -> None:
    os.closerange(3, 4096)
    time.sleep(600)


def nonsense(emit: Emit, text: str) -> None:
    emit(json.loads(text))
    time.sleep(600)


def says(emit: Emit, text: str) -> None:
    sys.stdout.write(text)
    raise RuntimeError(text)


def gloo_then_others(emit: Emit) -> None:
    """What a peer says when another process was lost."""
    raise RuntimeError("Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711")
