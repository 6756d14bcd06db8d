"""A stand-in for `worker.handlers.jobs` where devices are absent: compiles are made up, the rest
is done by the real worker.

`$AUTOMESH_TEST_JOURNAL` gets a line for the begin and the end of every compile. Meshes of the sizes
in `$AUTOMESH_TEST_REFUSED`, as `2x4`, cannot be laid out: which jax refuses depends on its release.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from automesh.hardware.fabric.fabric import Layouts
from automesh.hlo.store import ModuleStore, Stored
from automesh.outcomes import Counts, Failed, Memory, OutOfMemory
from automesh.program.nouns import Attachment, CompileAnswer, Device, Lowered
from automesh.worker.blame import OutcomeError
from automesh.worker.messages import CompileJob, DevicesJob, Job, LayoutJob

Emit = Callable[[dict[str, Any]], dict[str, Any]]
GIB = 2**30
LIMIT_BYTES = 63 * GIB // 4  # of a v5e
PEAKS = {1: 20 * GIB, 2: 12 * GIB, 4: 8 * GIB, 8: 6 * GIB}  # by the size of tp
LOW = 0.9  # of the memory at default effort
JOURNAL, SECONDS = "AUTOMESH_TEST_JOURNAL", "AUTOMESH_TEST_COMPILE_S"
REFUSED = "AUTOMESH_TEST_REFUSED"


def handle(job: Job, emit: Emit) -> object:
    if isinstance(job, DevicesJob) and job.absent is not None:
        return Attachment(
            devices=(
                Device(id=0, platform="tpu", kind="x", process_index=0, slice_index=0, coords=()),
            ),
            process_count=1,
            device_memory_bytes=LIMIT_BYTES,
            versions=(),
            environment=(),
        )
    if isinstance(job, CompileJob) and job.step.absent is not None:
        return compiled(job, emit)
    from automesh.worker.handlers import jobs

    if isinstance(job, LayoutJob) and REFUSED in os.environ:
        return laid_out(job, os.environ[REFUSED], emit)
    return jobs.handle(job, emit)


def laid_out(job: LayoutJob, refused: str, emit: Emit) -> Layouts:
    """As jax lays meshes out, but for one size of them."""
    from automesh.worker.handlers import jobs

    mine = [shape for shape in job.shapes if sizes_of(shape) == refused]
    others = tuple(shape for shape in job.shapes if shape not in mine)
    found = jobs.handle(replace(job, shapes=others), emit)
    assert isinstance(found, Layouts)
    reason = f"jax cannot lay a mesh of `{refused}` out"
    return replace(found, refused=(*found.refused, *((shape, reason) for shape in mine)))


def sizes_of(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape if size > 1)


def compiled(job: CompileJob, emit: Emit) -> CompileAnswer | Lowered:
    emit({"event": "stage", "stage": "compile"})
    fingerprint = f"program of {job.plan}"
    if not emit({"event": "lowered", "fingerprint": fingerprint, "reply": True})["go"]:
        return Lowered(fingerprint=fingerprint)
    refuse(job)
    key = hashlib.sha256(f"{fingerprint} {job.effort}".encode()).hexdigest()
    store = ModuleStore(Path(job.store_dir))
    found = store.find(key)
    if found is None:
        note(f"begin {job.effort} {job.plan}")
        time.sleep(float(os.environ.get(SECONDS, "0")))
        found = Stored(
            module=b"a module",
            memory=memory_of(job),
            counts=Counts(flops=10**9, hbm_bytes=10**6, collectives=()),
            compile_s=0.1,
            effort=job.effort,
            target="tpu",
            label=str(job.plan),
            versions=(),
        )
        store.keep(key, found)
        note(f"end {job.effort} {job.plan}")
    assert found.memory is not None and found.counts is not None
    return CompileAnswer(
        fingerprint=fingerprint,
        memory=found.memory,
        counts=found.counts,
        compile_s=found.compile_s,
        effort=found.effort,
        stored=key,
        asked=("devices: 8 of `TPU v5 lite`",),
    )


def refuse(job: CompileJob) -> None:
    if dict(job.plan.compiler_options).get("xla_no_such_option"):
        reason = "this compiler has no option `xla_no_such_option`"
        raise OutcomeError(Failed(stage="compile", reason=reason))
    peak = PEAKS[job.plan.sizes["tp"]]
    if peak > LIMIT_BYTES:
        note(f"refused {job.effort} {job.plan}")
        raise OutcomeError(
            OutOfMemory(
                stage="compile",
                needed_bytes=peak,
                limit_bytes=LIMIT_BYTES,
                detail="Ran out of memory on HBM",
            )
        )


def memory_of(job: CompileJob) -> Memory:
    peak = int(PEAKS[job.plan.sizes["tp"]] * (LOW if job.effort == "low" else 1))
    return Memory(
        argument_bytes=peak // 2,
        output_bytes=peak // 2,
        alias_bytes=peak // 2,
        temporary_bytes=peak - peak // 2,
        peak_bytes=peak,
    )


def note(line: str) -> None:
    if os.environ.get(JOURNAL):
        # One write of one line: whole in the file once it returns, also if the process is killed.
        descriptor = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)
