"""The compile job for absent devices (jax)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from automesh.cost.pipeline.outcome import busiest_counts, worst_memory
from automesh.hardware.absent import AbsentDevices
from automesh.hlo.store import ModuleStore, store_in
from automesh.plugins.pipelines import pipelines_of
from automesh.program.absent.client import devices_of
from automesh.program.absent.compile import CompileOrder, obtain
from automesh.program.absent.device_queries import answering, explaining_real_arrays
from automesh.program.lower import compilation_cache
from automesh.program.lower.any_step import StepProgram
from automesh.program.lower.host_callbacks import without_host
from automesh.program.lower.lowering import SingleProgram, lower
from automesh.program.nouns import CompileAnswer, Lowered
from automesh.worker.handlers.scripts import Scripts, build_plan, is_wanted
from automesh.worker.handlers.stages import Emit, StageReporter
from automesh.worker.messages import CompileJob


def compile_ahead(
    job: CompileJob, one: AbsentDevices, scripts: Scripts, stages: StageReporter, emit: Emit
) -> CompileAnswer | Lowered:
    """Builds, lowers and compiles a plan for `one`, or finds its program in the store.

    Raises:
      StepRefused: the plan needs more memory than there is, or `one` cannot be compiled for.
      UsageError: `build` puts arrays on the absent devices.
      Exception: whatever the user's code raises.
    """
    begin = perf_counter()
    stages.enter("start")
    devices = devices_of(one)
    with (
        without_host(is_compiled=True),
        explaining_real_arrays(job.step.entry.function),
        answering(
            one,
            lambda: devices,
            in_meshes=True,
            as_one=job.step.entry.capture is not None,
        ) as answers,
    ):
        script = scripts.load(job.step.entry, stages, one, answers)
        # jax could not read these executables back from its cache.
        compilation_cache.leave()
        stages.enter("build")
        built = build_plan(job, job.plan, script, devices)
        stages.enter("lower")
        pipelines = pipelines_of(built.workload.step)
        # A stage is compiled for as many slices as it spans.
        program, part = (
            (lower(built), one) if pipelines is None else pipelines.lower_for_absent(built, one)
        )
        fingerprint = program.fingerprint(job.plan.compiler_options)
        wanted, waited = is_wanted(fingerprint, emit)
        if not wanted:
            return Lowered(fingerprint=fingerprint)
        stages.enter("compile")
        order = CompileOrder(
            one=part,
            options=job.plan.compiler_options,
            effort=job.effort,
            store=_store(job.store_dir),
            plan=str(job.plan),
            axes=tuple(job.plan.sizes.items()),
            dcn=tuple(axis.dcn for axis in job.plan.axes),
            began_s=begin + waited,
        )
        answer = _obtained(program, order, fingerprint)
    return replace(answer, asked=tuple(dict.fromkeys((*script.asked, *answers.asked))))


def _obtained(program: StepProgram, order: CompileOrder, fingerprint: str) -> CompileAnswer:
    if not isinstance(program, SingleProgram):
        pipeline = program.compile_absent(order)
        return CompileAnswer(
            fingerprint=fingerprint,
            memory=worst_memory(pipeline),
            counts=busiest_counts(pipeline),
            compile_s=perf_counter() - order.began_s,
            effort=order.at_known_effort().effort,
            pipeline=pipeline,
        )
    found = obtain(program, order, fingerprint=fingerprint)
    return CompileAnswer(
        fingerprint=fingerprint,
        memory=found.memory,
        counts=found.counts,
        compile_s=found.compile_s,
        effort=found.effort,
        stored=found.key,
    )


def _store(folder: str) -> ModuleStore | None:
    return store_in(Path(folder), os.environ) if folder else None
