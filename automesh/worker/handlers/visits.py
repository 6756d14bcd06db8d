"""Visits a plan: makes its step ready to run, runs it for a while, and times it (jax)."""

from __future__ import annotations

import gc
from dataclasses import replace
from time import perf_counter

from automesh.program.absent.device_queries import own
from automesh.program.execute.prepare import Ready, prepare
from automesh.program.execute.team import Team
from automesh.program.execute.timed_loop import visit
from automesh.program.execute.value_domains import Domain, domains
from automesh.program.lower import compilation_cache
from automesh.program.lower.any_step import lower_any
from automesh.program.lower.lowered import loss_dtype
from automesh.program.lower.lowering import SingleProgram, compile_program, lower
from automesh.program.nouns import VisitAnswer
from automesh.program.script.build import build_on
from automesh.worker.handlers.inspect_step import looked_at
from automesh.worker.handlers.memory import ReadyKey, WorkerMemory
from automesh.worker.handlers.scripts import Script, build_plan
from automesh.worker.handlers.stages import StageReporter
from automesh.worker.messages import VisitJob

# Number of plans that a worker keeps ready to be visited again. A loaded program of the CPU
# compiler has several hundred memory maps, and Linux allows a process 65,530 (`vm.max_map_count`):
# beyond these XLA ends the process.
MOST_READY = 32


def visit_plan(
    job: VisitJob, memory: WorkerMemory, stages: StageReporter, team: Team
) -> VisitAnswer:
    """Makes a plan ready unless it is, runs its step for a while, and times it.

    Raises:
      UsageError: the user's code breaks the contract.
      Exception: whatever the user's code raises, and what jax raises when it compiles or runs.
    """
    since_s = perf_counter()
    compilation_cache.use(job.cache_dir)
    if job.step.entry.capture is not None and job.step.entry.capture.without_arrays:
        # Only visits need values; estimates and compiles do not.
        capture = replace(job.step.entry.capture, without_arrays=False)
        entry = replace(job.step.entry, capture=capture)
        job = replace(job, step=replace(job.step, entry=entry))
    key, kept = _key(job), memory.kept
    if not job.keep and not kept.has(key):
        kept.clear()
    started_s = memory.start_s
    ready = _ready(job, memory, stages)
    since_s += memory.start_s - started_s
    if not kept.has(key):
        team.gather("program")  # The processes take different times to compile.
        stages.enter("materialize")
    seen = visit(
        ready,
        kept=kept,
        key=key,
        keep=job.keep,
        steps=job.steps,
        samples=job.samples,
        loss_steps=job.loss_steps,
        warmup_s=job.warmup_s,
        since_s=since_s,
        sensitivity=job.sensitivity,
        team=team,
        started=lambda: stages.enter("run"),
    )
    return VisitAnswer(
        samples_s=seen.samples_s,
        losses=seen.losses,
        loss_dtype=ready.loss_dtype,
        values=ready.values,
        setup_s=seen.setup_s,
        state_s=seen.state_s,
        peak_bytes=seen.peak_bytes,
        fingerprint=ready.fingerprint,
        updates=seen.first.updates,
        vectors=seen.first.vectors,
        arguments=seen.first.arguments,
        start_s=memory.start_s,
    )


def _key(job: VisitJob) -> ReadyKey:
    return (job.step.entry, job.plan, job.step.axis_types)


def _ready(job: VisitJob, memory: WorkerMemory, stages: StageReporter) -> Ready:
    key = _key(job)
    if key in memory.ready:
        memory.ready[key] = memory.ready.pop(key)  # The plan used last is dropped last.
        return memory.ready[key]
    _make_room(memory)
    ready = memory.ready[key] = _prepared(job, memory, stages)
    # Every visit ends with a garbage collection, which should not walk the permanent objects of a
    # plan (modules, programs) each time. The arrays of a visit are made after this point. Arrays
    # that `build` made may already be in reference cycles, which must be collected before the
    # freeze, or they are never freed.
    gc.collect()
    if ready.build_again is None:
        gc.freeze()
    return ready


def _make_room(memory: WorkerMemory) -> None:
    """Drops the least recently visited plan if the limit of ready plans is reached."""
    idle = [key for key in memory.ready if not memory.kept.has(key)]
    if len(memory.ready) < MOST_READY or not idle:
        return
    del memory.ready[idle[0]]
    gc.unfreeze()
    gc.collect()


def _prepared(job: VisitJob, memory: WorkerMemory, stages: StageReporter) -> Ready:
    script = memory.scripts.load(job.step.entry, stages)
    stages.enter("build")
    begun_s = perf_counter()
    built = build_plan(job, job.plan, script)
    if not memory.first_build_s:
        memory.first_build_s = perf_counter() - begun_s
    stages.enter("lower")
    program = lower_any(built)
    fingerprint = program.fingerprint(job.plan.compiler_options)
    if not isinstance(program, SingleProgram):
        return program.prepare(
            job.plan.compiler_options,
            fingerprint=fingerprint,
            build_again=lambda: build_plan(job, job.plan, script),
            enter=stages.enter,
        )
    coarsest = loss_dtype(program.lowered)
    stages.enter("compile")
    program, compiled, _ = compile_program(program, job.plan.compiler_options)
    stages.enter("materialize")
    return prepare(
        program,
        compiled,
        built=built,
        fingerprint=fingerprint,
        loss_dtype=coarsest,
        reference_domains=lambda: _domains(job, memory, script),
        build_again=lambda: build_plan(job, job.plan, script),
    )


def _domains(job: VisitJob, memory: WorkerMemory, script: Script) -> tuple[Domain, ...]:
    names = tuple(axis.name for axis in job.plan.axes)
    key = (job.step.entry, names, job.step.axis_types, job.plan.mapping)
    if key not in memory.domains:
        built = build_on(
            script.build,
            looked_at(job.step.entry, names),
            axis_types=job.step.axis_types,
            mapping=job.plan.mapping,
            devices=own(),
        )
        memory.domains[key] = domains(lower(built).traced)
    return memory.domains[key]
