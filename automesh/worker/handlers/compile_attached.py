"""The compile job for attached devices (jax)."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

from automesh.cost.pipeline.outcome import busiest_counts, worst_memory
from automesh.hlo.store import Stored, key_of, store_in
from automesh.program import surroundings
from automesh.program.kernels.annotate import kernel_costs
from automesh.program.lower import compilation_cache
from automesh.program.lower.any_step import lower_any
from automesh.program.lower.compiled import count_serialized, read_memory, serialized
from automesh.program.lower.lowering import SingleProgram, compile_program
from automesh.program.notes import note
from automesh.program.nouns import CompileAnswer, Lowered
from automesh.worker.handlers.scripts import Scripts, build_plan, is_wanted
from automesh.worker.handlers.stages import Emit, StageReporter
from automesh.worker.messages import CompileJob


def compile_attached(
    job: CompileJob, scripts: Scripts, stages: StageReporter, emit: Emit
) -> CompileAnswer | Lowered:
    """Builds, lowers and compiles a plan for the devices of this process.

    Raises:
      StepRefused: the plan needs more memory than there is, or its program cannot be read.
      Exception: whatever the user's code raises.
    """
    begin = perf_counter()
    compilation_cache.use(job.cache_dir)
    script = scripts.load(job.step.entry, stages)
    stages.enter("build")
    built = build_plan(job, job.plan, script)
    stages.enter("lower")
    program = lower_any(built)
    fingerprint = program.fingerprint(job.plan.compiler_options)
    wanted, waited = is_wanted(fingerprint, emit)
    if not wanted:
        return Lowered(fingerprint=fingerprint)
    stages.enter("compile")
    if not isinstance(program, SingleProgram):
        pipeline = program.compile_here(job.plan.compiler_options)
        return CompileAnswer(
            fingerprint=fingerprint,
            memory=worst_memory(pipeline),
            counts=busiest_counts(pipeline),
            compile_s=perf_counter() - begin - waited,
            pipeline=pipeline,
        )
    program, compiled, first = compile_program(program, job.plan.compiler_options)
    platform = built.mesh.devices.flat[0].platform
    module = serialized(compiled, kernel_costs(program.lowered))
    axes = job.plan.axes
    memory = read_memory(compiled, platform=platform)
    if first is not None:
        memory = memory.after(read_memory(first, platform=platform))
    counts = count_serialized(module, list(job.plan.sizes.items()), [axis.dcn for axis in axes])
    compile_s = perf_counter() - begin - waited
    stored = Stored(
        module=module,
        memory=memory,
        counts=counts,
        compile_s=compile_s,
        effort="default",
        target=f"attached {surroundings.devices()[0].kind}",
        label=str(job.plan),
        versions=surroundings.versions(),
    )
    return CompileAnswer(
        fingerprint=fingerprint,
        memory=memory,
        counts=counts,
        compile_s=compile_s,
        stored=_store_program(stored, job.store_dir, fingerprint) if job.store_dir else "",
    )


def _store_program(stored: Stored, folder: str, fingerprint: str) -> str:
    """Stores a scheduled program; returns its key, or an empty text if it cannot be stored."""
    key = key_of(
        fingerprint=fingerprint,
        target=stored.target,
        effort=(("effort", stored.effort),),
        versions=stored.versions,
        environment=surroundings.environment(),
    )
    try:
        store_in(Path(folder), os.environ).keep(key, stored)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        note(f"the compiled program cannot be kept in `{folder}`, and is not replayed: {reason}")
        return ""
    return key
