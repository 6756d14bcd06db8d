"""What a worker can do with the user's program: inspect it, compile a plan of it, visit a plan
(jax)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from automesh.hardware.fabric import Layouts
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed
from automesh.program import cache, describing
from automesh.program.building import Built, build_on, check_facts, read_facts
from automesh.program.calibrating import calibrate
from automesh.program.compiled import is_out_of_memory, out_of_memory, read_counts, read_memory
from automesh.program.laying_out import lay_out
from automesh.program.load import load_entry
from automesh.program.lowered import loss_dtype
from automesh.program.lowering import Program, compile_program, lower
from automesh.program.notes import in_one_line
from automesh.program.nouns import (
    Attachment,
    Calibration,
    CompileAnswer,
    Entry,
    Inspection,
    Lowered,
    Propagation,
    VisitAnswer,
)
from automesh.program.preparing import Ready, prepare
from automesh.program.propagating import propagate
from automesh.program.propagating_programs import Programs
from automesh.program.refused import Refused
from automesh.program.signature import Signature, check_knobs, read_signature
from automesh.program.signs import Domain, domains
from automesh.program.stepping import leaf_shape
from automesh.program.visiting import visit
from automesh.worker.failures import OutcomeError
from automesh.worker.inspecting import Trials, used_axes
from automesh.worker.messages import (
    CalibrateJob,
    CompileJob,
    DevicesJob,
    InspectJob,
    Job,
    LayoutJob,
    PropagateJob,
    VisitJob,
)

Event = dict[str, Any]
Emit = Callable[[Event], Event]
Answer = (
    Layouts
    | Inspection
    | Attachment
    | CompileAnswer
    | Lowered
    | VisitAnswer
    | Calibration
    | Propagation
)
_Step = tuple[Entry, Plan, tuple[str, ...]]
_NO_BACKEND = "Unable to initialize backend"  # jax's words, in jax/_src/xla_bridge.py


@dataclass(slots=True)
class _Memory:
    """What a worker remembers between jobs: loaded scripts, and plans that are ready; no arrays.

    Attributes:
      domains: per script and axis types, what the values of each leaf may be.
      programs: per script, axes, knobs and platform, what its lowerings have in common.
    """

    loaded: dict[Entry, Callable[..., Any]] = field(default_factory=dict[Entry, Callable[..., Any]])
    ready: dict[_Step, Ready] = field(default_factory=dict[_Step, Ready])
    domains: dict[Any, tuple[Domain, ...]] = field(default_factory=dict[Any, tuple[Domain, ...]])
    programs: dict[Any, Programs] = field(default_factory=dict[Any, Programs])


_MEMORY = _Memory()


def handle(job: Job, emit: Emit) -> Answer:
    """Does one job.

    Args:
      emit: sends an event to the parent and returns its reply.

    Raises:
      OutcomeError: the plan ended in a failure that is an outcome, such as `OutOfMemory`; of stage
        `start` if jax or the machine is to blame, and neither the plan nor the user's code.
      UsageError: the user's code breaks the contract.
      Exception: whatever the user's code raises.
    """
    stages = _Stages(emit)
    try:
        match job:
            case InspectJob():
                return _inspect(job, stages)
            case LayoutJob():
                stages.enter("layout")
                return lay_out(job)
            case DevicesJob():
                return _devices(stages)
            case CompileJob():
                return _compile(job, stages, emit)
            case VisitJob():
                return _visit(job, stages)
            case CalibrateJob():
                return _calibrate(job, stages, emit)
            case PropagateJob():
                return _propagate(job, stages)
    except Refused as refused:
        raise OutcomeError(refused.outcome) from refused
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise OutcomeError(out_of_memory(error, stage=stages.current)) from error
        raise


class _Stages:
    """Tells the parent what the job is doing, and remembers it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.current = "start"

    def enter(self, stage: str) -> None:
        if stage == self.current:
            return
        self.current = stage
        self._emit({"event": "stage", "stage": stage})


def _load(entry: Entry, stages: _Stages) -> tuple[Callable[..., Any], Signature]:
    stages.enter("load")
    if entry in _MEMORY.loaded:
        return _MEMORY.loaded[entry], read_signature(_MEMORY.loaded[entry])
    try:
        build = load_entry(entry)
    except Exception as error:
        if _NO_BACKEND in str(error):  # The script was only the first to ask for the devices.
            _start_jax(stages)
            stages.enter("load")
        raise
    signature = read_signature(build)
    # Not before: a script may configure jax, which must be done before the devices are there.
    _start_jax(stages)
    _MEMORY.loaded[entry] = build
    return build, signature


def _start_jax(stages: _Stages) -> None:
    """Makes jax find its devices; if it cannot, that is neither the script's fault nor a plan's."""
    stages.enter("start")
    try:
        jax.devices()
    # Plugins raise what they like.
    except Exception as error:
        config: Any = jax.config
        raise OutcomeError(
            Failed(
                stage="start",
                reason=f"jax could not start on `{config.jax_platforms}`: {in_one_line(error)}",
                hint="check JAX_PLATFORMS, or search virtual devices: `--target cpu:8`",
            )
        ) from error


def _inspect(job: InspectJob, stages: _Stages) -> Inspection:
    build, signature = _load(job.entry, stages)
    stages.enter("build")
    built = build_on(build, _ones(job.axis_names))
    stages.enter("lower")
    program = lower(built)
    workload = built.workload
    trials = Trials(build=build, job=job, axis_types=built.axis_types)
    return Inspection(
        devices=describing.devices(),
        process_count=jax.process_count(),
        device_memory_bytes=describing.device_memory_bytes(),
        knobs=signature.knobs,
        takes_any_knob=signature.takes_any_knob,
        facts=read_facts(workload),
        used_axes=used_axes(trials, job.axis_names),
        axis_types=built.axis_types,
        baseline=workload.baseline or "",
        tokens_per_step=workload.tokens_per_step,
        has_init=workload.init is not None,
        argument_bytes=_argument_bytes(program),
        fingerprint=program.fingerprint(()),
        source_hash=describing.source_hash(job.entry),
        versions=describing.versions(),
        environment=describing.environment(),
        seen=tuple(sorted(trials.seen.items())),
    )


def _devices(stages: _Stages) -> Attachment:
    _start_jax(stages)
    return Attachment(
        devices=describing.devices(),
        process_count=jax.process_count(),
        device_memory_bytes=describing.device_memory_bytes(),
        versions=describing.versions(),
        environment=describing.environment(),
    )


def _calibrate(job: CalibrateJob, stages: _Stages, emit: Emit) -> Calibration:
    _start_jax(stages)
    stages.enter("calibrate")
    parts = len(job.probes) + job.rounds
    points = calibrate(
        job.probes,
        rounds=job.rounds,
        sample_s=job.sample_s,
        done=lambda done: emit({"event": "calibrated", "parts": done, "of": parts}),
    )
    return Calibration(points=points)


def _propagate(job: PropagateJob, stages: _Stages) -> Propagation:
    build, signature = _load(job.entry, stages)
    key = (job.entry, job.axis_names, job.axis_types, job.knobs, job.platform)
    if key not in _MEMORY.programs:
        # The programs of one choice of knobs are enough: jobs come sorted by knobs.
        _MEMORY.programs.clear()
        _MEMORY.programs[key] = Programs(
            build=lambda axes: _build_plan(
                job, Plan(axes=tuple(axes), knobs=job.knobs), build, signature
            ),
            axis_names=job.axis_names,
            platform=job.platform,
            seen=dict(job.seen),
        )
    return propagate(
        _MEMORY.programs[key],
        sizes=job.sizes,
        probes=job.probes,
        exact=job.exact,
        enter=stages.enter,
    )


def _ones(names: tuple[str, ...]) -> tuple[MeshAxis, ...]:
    return tuple(MeshAxis(name=name) for name in names)


def _argument_bytes(program: Program) -> int:
    leaves = jax.tree.leaves((program.args, program.kwargs))
    total = 0
    for leaf in leaves:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        elements = 1
        for dimension in leaf_shape(leaf):
            elements *= dimension
        total += elements * dtype.itemsize
    return total


def _build(job: CompileJob | VisitJob, build: Callable[..., Any], signature: Signature) -> Built:
    return _build_plan(job, job.plan, build, signature)


def _build_plan(
    job: CompileJob | VisitJob | PropagateJob,
    plan: Plan,
    build: Callable[..., Any],
    signature: Signature,
) -> Built:
    check_knobs(signature, plan.knobs, name=job.entry.function)
    built = build_on(build, plan.axes, axis_types=job.axis_types, knobs=plan.knobs)
    defaults = dict(signature.knobs)
    # Facts may depend on knobs, and were read at their defaults.
    if all(name in defaults and defaults[name] == value for name, value in plan.knobs):
        check_facts(job.facts, read_facts(built.workload), mesh=plan.mesh)
    return built


def _compile(job: CompileJob, stages: _Stages, emit: Emit) -> CompileAnswer | Lowered:
    begin = time.perf_counter()
    cache.use(job.cache_dir)
    build, signature = _load(job.entry, stages)
    stages.enter("build")
    built = _build(job, build, signature)
    stages.enter("lower")
    program = lower(built)
    fingerprint = program.fingerprint(job.plan.compiler_options)
    begun = time.perf_counter()
    reply = emit({"event": "lowered", "fingerprint": fingerprint, "reply": True})
    waited = time.perf_counter() - begun
    if not reply["go"]:
        return Lowered(fingerprint=fingerprint)
    stages.enter("compile")
    _, compiled = compile_program(program, job.plan.compiler_options)
    return CompileAnswer(
        fingerprint=fingerprint,
        memory=read_memory(compiled, platform=_platform(built)),
        counts=read_counts(compiled, list(job.plan.sizes.items())),
        compile_s=time.perf_counter() - begin - waited,
    )


def _platform(built: Built) -> str:
    return built.mesh.devices.flat[0].platform


def _visit(job: VisitJob, stages: _Stages) -> VisitAnswer:
    since_s = time.perf_counter()
    cache.use(job.cache_dir)
    ready = _ready(job, stages)
    stages.enter("materialize")
    seen = visit(
        ready,
        steps=job.steps,
        samples=job.samples,
        loss_steps=job.loss_steps,
        warmup_s=job.warmup_s,
        since_s=since_s,
        started=lambda: stages.enter("run"),
    )
    return VisitAnswer(
        samples_s=seen.samples_s,
        losses=seen.losses,
        loss_dtype=ready.loss_dtype,
        values=ready.values,
        setup_s=seen.setup_s,
        peak_bytes=seen.peak_bytes,
        fingerprint=ready.fingerprint,
    )


def _ready(job: VisitJob, stages: _Stages) -> Ready:
    key = (job.entry, job.plan, job.axis_types)
    if key in _MEMORY.ready:
        return _MEMORY.ready[key]
    ready = _MEMORY.ready[key] = _prepared(job, stages)
    # Every visit ends with a collection; what a plan keeps for good (modules, programs) need not be
    # walked each time. The arrays of a visit are made after this; those that `build` makes may hang
    # in cycles that are here by now, and would never be freed.
    gc.collect()
    if ready.build_again is None:
        gc.freeze()
    return ready


def _prepared(job: VisitJob, stages: _Stages) -> Ready:
    build, signature = _load(job.entry, stages)
    stages.enter("build")
    built = _build(job, build, signature)
    stages.enter("lower")
    program = lower(built)
    fingerprint = program.fingerprint(job.plan.compiler_options)
    coarsest = loss_dtype(program.lowered)
    stages.enter("compile")
    program, compiled = compile_program(program, job.plan.compiler_options)
    stages.enter("materialize")
    return prepare(
        program,
        compiled,
        fingerprint=fingerprint,
        loss_dtype=coarsest,
        reference_domains=lambda: _domains(job, build),
        build_again=lambda: _build(job, build, signature),
    )


def _domains(job: VisitJob, build: Callable[..., Any]) -> tuple[Domain, ...]:
    names = tuple(axis.name for axis in job.plan.axes)
    key = (job.entry, names, job.axis_types)
    if key not in _MEMORY.domains:
        built = build_on(build, _ones(names), axis_types=job.axis_types)
        _MEMORY.domains[key] = domains(lower(built).traced)
    return _MEMORY.domains[key]
