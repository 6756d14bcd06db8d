"""Does a worker's jobs with the user's program: inspects it, compiles plans, visits plans (jax)."""

from __future__ import annotations

import math
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import jax
import psutil

from automesh.errors import UsageError
from automesh.hardware.absent import AbsentDevices
from automesh.mesh.axes import Plan
from automesh.program import surroundings
from automesh.program.absent import client
from automesh.program.absent.device_queries import Answers, own
from automesh.program.absent.layout import lay_out
from automesh.program.capture.discover import discover_for_absent, discover_here
from automesh.program.capture.line_watch import line_noted
from automesh.program.capture.nouns import CarryCheck, Discovery, OtherDevices
from automesh.program.capture.world import told
from automesh.program.capture.world.wishes import devices_asked_for
from automesh.program.carry.by_mesh import keep_first
from automesh.program.carry.check import check_carried
from automesh.program.carry.starts import note_start
from automesh.program.execute.arguments import made_up_arguments
from automesh.program.execute.calibrate import calibrate
from automesh.program.execute.team import Team, team_of
from automesh.program.infer.search.layout import Layout
from automesh.program.lower.any_step import StepProgram, lower_any
from automesh.program.lower.compiled import is_out_of_memory, out_of_memory
from automesh.program.lower.host_callbacks import said_of_callbacks
from automesh.program.lower.program_text import write_text
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.nouns import (
    Attachment,
    BuildAnswer,
    CompileAnswer,
    Entry,
    Inspection,
    Lowered,
    ProbeTimes,
    Propagation,
    Traced,
)
from automesh.program.refused import StepRefused
from automesh.program.script.build import build_on, read_facts
from automesh.program.script.build_check import check_build
from automesh.program.script.signature import check_knobs, check_mapping
from automesh.program.script.sources import hash_of_sources, watching
from automesh.program.step_summary import StepSummary
from automesh.program.summarize import summarize
from automesh.sharding.programs import lowered_for
from automesh.space.mapping import StepMapping
from automesh.worker.blame import OutcomeError
from automesh.worker.handlers.auto_axes import with_its_axes
from automesh.worker.handlers.by_itself import blamed
from automesh.worker.handlers.compile_absent import compile_ahead
from automesh.worker.handlers.compile_attached import compile_attached
from automesh.worker.handlers.device_count import wanted_devices
from automesh.worker.handlers.garbage import fewer_collections
from automesh.worker.handlers.inspect_step import (
    Trials,
    default_mapping,
    look,
    looked_at,
    seen_mapping,
    used_axes,
)
from automesh.worker.handlers.memory import WorkerMemory
from automesh.worker.handlers.propagate import Propagations
from automesh.worker.handlers.scripts import (
    Script,
    build_plan,
    join_gang,
    showing_devices,
    start_jax,
    with_or_without_shown_devices,
)
from automesh.worker.handlers.stages import Emit, StageReporter
from automesh.worker.handlers.visits import visit_plan
from automesh.worker.messages import (
    MOST_CALLS,
    ArraysJob,
    BuildJob,
    CalibrateJob,
    CarryJob,
    CompileJob,
    DevicesJob,
    DiscoverJob,
    InspectJob,
    Job,
    LayoutJob,
    PropagateJob,
    SummarizeJob,
    TraceJob,
    VisitJob,
)
from automesh.worker.protocol import Answer

# The file name of a notebook cell contains a space.
_FAILS = re.compile(r" fails at \S+( \[cell \d+\]:\d+)? before its step: ")
_NO_BACKEND = "Unable to initialize backend"  # jax's words, in jax/_src/xla_bridge.py
# Resident memory above which a worker drops the programs of other calls of `build`.
_MOST_KEPT_BYTES = 2**30


_MEMORY = WorkerMemory()


def handle(job: Job, emit: Emit) -> Answer:
    """Does one job.

    Args:
      emit: sends an event to the parent and returns its reply.

    Raises:
      OutcomeError: the plan failed with an outcome, such as `OutOfMemory`; its stage is `start` if
        jax or the machine is the cause, and neither the plan nor the user's code.
      UsageError: the user's code breaks the contract.
      Exception: whatever the user's code raises.
    """
    join_gang(emit)
    stages = StageReporter(emit)
    if not isinstance(job, VisitJob):
        _MEMORY.kept.clear()
    try:
        match job:
            case LayoutJob():
                stages.enter("layout")
                return lay_out(job)
            case DevicesJob():
                return _devices(job, stages)
            case CompileJob():
                return _compile(job, stages, emit)
            case TraceJob():
                return _trace(job, stages)
            case VisitJob():
                return visit_plan(job, _MEMORY, stages, team_of(emit))
            case CalibrateJob():
                return _calibrate(job, stages, emit, team_of(emit))
            case _:
                with fewer_collections():
                    return _answer_without_compiling(job, stages, emit)
    except StepRefused as refused:
        raise OutcomeError(refused.outcome) from refused
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise OutcomeError(out_of_memory(error, stage=stages.current)) from error
        raise


def _answer_without_compiling(
    job: InspectJob | DiscoverJob | CarryJob | ArraysJob | SummarizeJob | BuildJob | PropagateJob,
    stages: StageReporter,
    emit: Emit,
) -> Answer:
    """Does the jobs about the script itself and about programs that are never compiled."""
    match job:
        case InspectJob():
            return _inspect(job, stages)
        case DiscoverJob():
            return _discover(job, stages, emit)
        case CarryJob():
            return _check_carried(job, stages)
        case ArraysJob():
            return _arrays(job, stages)
        case SummarizeJob():
            return _summarize(job, stages)
        case BuildJob():
            return with_or_without_shown_devices(job, lambda job: _build(job, stages))[0]
        case PropagateJob():
            found, why = with_or_without_shown_devices(
                job, lambda job: _propagate(job, stages, emit)
            )
            return replace(found, notes=(*found.notes, why)) if why else found


def _inspect(job: InspectJob, stages: StageReporter) -> Inspection:
    with watching() as watch, _loaded(job, stages) as (script, _):
        devices, signature = own(), script.signature
        mapping = default_mapping(signature.mapping, job.mapping)
        looked = look(script.build, job, mapping, devices=devices, stages=stages)
        built, program = looked.built, looked.program
        trials = Trials(build=script.build, job=job, axis_types=built.axis_types, devices=devices)
        defaults, layout = signature.mapping, _layout_of(job.step.entry)
        is_for_one = layout is not None and not layout.keeps_written
        seen = program.named_axes([axis.name for axis in looked.axes if axis.size > 1])
        used = () if is_for_one else used_axes(trials, job.axis_names, mapping, known=seen)
        if layout is not None:  # The layout already says what its mapping splits.
            logical = layout.step_mapping
        else:
            logical = None if defaults is None else seen_mapping(trials, defaults, mapping)
    workload, sources = built.workload, surroundings.sources(job.step.entry)
    return Inspection(
        devices=surroundings.devices(),
        process_count=jax.process_count(),
        device_memory_bytes=surroundings.device_memory_bytes(),
        knobs=signature.knobs,
        takes_any_knob=signature.takes_any_knob,
        facts=read_facts(workload),
        used_axes=used,
        axis_types=built.axis_types,
        baseline=workload.baseline or "",
        tokens_per_step=workload.tokens_per_step,
        has_init=workload.init is not None,
        argument_bytes=_argument_bytes(program),
        fingerprint=program.fingerprint(()),
        source_hash=hash_of_sources(sources),
        sources=sources,
        reads=watch.reads(surroundings.roots_of(job.step.entry), sources),
        versions=surroundings.versions(),
        environment=surroundings.environment(),
        # With axes that were not tried, the texts do not tell which axes change the program.
        seen=() if seen else tuple(sorted(trials.seen.items())),
        mapping=logical,
        # A captured script is measured with its own values, though only their shapes are known
        # here.
        made_up=made_up_arguments(workload) if job.step.entry.capture is None else (),
        notices=(*script.notices, *said_of_callbacks()),
    )


def _layout_of(entry: Entry) -> Layout | None:
    """Returns the layout that is searched for a script; None if no shardings are inferred."""
    return entry.capture.layout if entry.capture is not None else None


@contextmanager
def _loaded(
    job: InspectJob | ArraysJob | PropagateJob | SummarizeJob | TraceJob | BuildJob,
    stages: StageReporter,
) -> Generator[tuple[Script, Answers | None]]:
    """Loads the script of a job; while the body runs, the script sees the devices that the job is
    for."""
    is_captured = job.step.entry.capture is not None
    with showing_devices(job.step.absent, job.step.entry.function, as_one=is_captured) as answers:
        yield _MEMORY.scripts.load(job.step.entry, stages, job.step.absent, answers), answers


def _discover(job: DiscoverJob, stages: StageReporter, emit: Emit) -> Discovery | OtherDevices:
    if job.step.absent is not None or wanted_devices():
        start_jax(stages)  # Only here: the script may set the number of devices.
    stages.enter("build")
    began_s = perf_counter()
    named = f" on the {job.num_devices} devices that it names" if job.num_devices else ""
    note_start(job.folder, f"first run{named}")
    try:
        name = Path(job.step.entry.location).name
        with showing_devices(job.step.absent, name, as_one=True), line_noted(job.folder):
            found = with_its_axes(
                lambda: _discovered(job, emit),
                lambda why: note_start(job.folder, f"first run again {why}"),
            )
    except UsageError as error:
        if (
            _NO_BACKEND in error.message
        ):  # The script is not the cause; it only asked for devices first.
            start_jax(stages)
        count = told.wanted_devices()
        undivided = told.undivided()
        if count and (not job.num_devices or (undivided and count < len(own()))):
            return OtherDevices(num_devices=count, reason=error.message, undivided=undivided)
        if not _FAILS.search(error.message) or own()[0].platform != "cpu":
            raise
        took_s = perf_counter() - began_s
        emit({"event": "failed", "text": error.message})
        stages.enter("alone")
        known = blamed(error, job.step.entry, took_s)
        stages.enter("build")
        raise known from error
    return replace(
        found,
        capture=replace(found.capture, num_devices=job.num_devices),
        notices=tuple(dict.fromkeys((*found.notices, *told.told()))),
        asked_devices=devices_asked_for(),
    )


def _discovered(job: DiscoverJob, emit: Emit) -> Discovery:
    keep = partial(keep_first, job.folder) if job.folder else None

    def again(why: str) -> None:
        note_start(job.folder, f"first run again {why}")

    def tell(text: str) -> None:
        emit({"event": "waits", "text": text})

    if job.step.absent is not None:
        return discover_for_absent(
            job.step.entry, step=job.wanted, keep=keep, again=again, tell=tell, infer=job.infer
        )
    return discover_here(
        job.step.entry,
        step=job.wanted,
        device_memory_bytes=surroundings.device_memory_bytes,
        keep=keep,
        again=again,
        tell=tell,
        infer=job.infer,
        measures_nothing=job.measures_nothing,
    )


def _check_carried(job: CarryJob, stages: StageReporter) -> CarryCheck:
    start_jax(stages)
    with showing_devices(job.step.absent, Path(job.step.entry.location).name, as_one=True):
        return check_carried(
            job.step.entry,
            [plan.axes for plan in job.plans],
            lower=lambda built: lower_any(built, platforms=_platforms(job.step.absent)),
            entering=stages.enter,
            limit_s=job.limit_s or math.inf,
        )


def _arrays(job: ArraysJob, stages: StageReporter) -> StepMapping:
    with _loaded(job, stages) as (script, _):
        signature = script.signature
        check_knobs(signature, job.knobs, name=job.step.entry.function)
        check_mapping(signature, job.mapping, name=job.step.entry.function)
        stages.enter("lower")
        trials = Trials(
            build=script.build,
            job=job,
            axis_types=job.step.axis_types,
            devices=own(),
            knobs=job.knobs,
        )
        defaults = signature.mapping or ()
        return seen_mapping(trials, defaults, default_mapping(defaults, job.mapping))


def _devices(job: DevicesJob, stages: StageReporter) -> Attachment:
    start_jax(stages)
    here = Attachment(
        devices=surroundings.devices(),
        process_count=jax.process_count(),
        device_memory_bytes=surroundings.device_memory_bytes(),
        versions=surroundings.versions(),
        environment=surroundings.environment(),
    )
    if job.absent is None:
        return here
    return replace(
        here,
        devices=surroundings.described(client.devices_of(job.absent)),
        process_count=job.absent.num_hosts,
        device_memory_bytes=client.usable_bytes(job.absent),
    )


def _calibrate(job: CalibrateJob, stages: StageReporter, emit: Emit, team: Team) -> ProbeTimes:
    start_jax(stages)
    stages.enter("calibrate")
    parts = len(job.probes) + job.rounds
    points = calibrate(
        job.probes,
        rounds=job.rounds,
        sample_s=job.sample_s,
        done=lambda done: emit({"event": "calibrated", "parts": done, "of": parts}),
        team=team,
    )
    return ProbeTimes(points=points)


def _propagate(job: PropagateJob, stages: StageReporter, emit: Emit) -> Propagation:
    with _loaded(job, stages) as (script, answers):
        key = (
            job.step.entry,
            job.axis_names,
            job.step.axis_types,
            job.mapping,
            job.knobs,
            job.platform,
            job.step.absent,
        )
        propagations = _MEMORY.programs.pop(key, None)
        if propagations is None:
            # Jobs arrive nearly sorted by calls of `build`, and large programs take much memory.
            while len(_MEMORY.programs) >= MOST_CALLS or (
                _MEMORY.programs and psutil.Process().memory_info().rss > _MOST_KEPT_BYTES
            ):
                _MEMORY.programs.pop(next(iter(_MEMORY.programs)))
            propagations = Propagations.of(
                job,
                lambda axes: build_plan(
                    job, Plan(axes=tuple(axes), mapping=job.mapping, knobs=job.knobs), script
                ),
            )
        _MEMORY.programs[key] = propagations
        found = propagations.answer(job, stages.enter, emit)
    if answers is not None:
        propagations.asked.update(dict.fromkeys((*script.asked, *answers.asked)))
    return replace(found, asked=tuple(propagations.asked))


def _argument_bytes(program: StepProgram) -> int:
    leaves = jax.tree.leaves((program.args, program.kwargs))
    return sum(math.prod(leaf_shape(leaf)) * leaf_dtype(leaf).itemsize for leaf in leaves)


def _compile(job: CompileJob, stages: StageReporter, emit: Emit) -> CompileAnswer | Lowered:
    if job.step.absent is not None:
        return compile_ahead(job, job.step.absent, _MEMORY.scripts, stages, emit)
    return compile_attached(job, _MEMORY.scripts, stages, emit)


def _summarize(job: SummarizeJob, stages: StageReporter) -> StepSummary:
    platforms = _platforms(job.step.absent)
    with _loaded(job, stages) as (script, _):
        stages.enter("build")
        built, again = (build_plan(job, job.plan, script) for _ in range(2))
        whole = build_on(
            script.build,
            looked_at(job.step.entry, tuple(axis.name for axis in job.plan.axes)),
            axis_types=job.step.axis_types,
            mapping=job.plan.mapping,
            devices=own(),
        )
        stages.enter("lower")
        return summarize(
            lower_any(built, platforms=platforms),
            again,
            reference=lower_any(whole, platforms=platforms),
            is_run=job.step.absent is None,
        )


def _trace(job: TraceJob, stages: StageReporter) -> Traced:
    with _loaded(job, stages) as (script, _):
        stages.enter("build")
        built = build_plan(job, job.plan, script)
        stages.enter("lower")
        program = lower_any(built, platforms=_platforms(job.step.absent))
        if job.text_file:
            write_text(Path(job.text_file), program.lines())
    return Traced(fingerprint=program.fingerprint(job.plan.compiler_options))


def _build(job: BuildJob, stages: StageReporter) -> BuildAnswer:
    with _loaded(job, stages) as (script, _):
        stages.enter("build")
        built = build_plan(job, job.plan, script)
        stages.enter("lower")
        return check_build(built, platforms=_platforms(job.step.absent))


def _platforms(absent: AbsentDevices | None) -> tuple[str, ...] | None:
    """Returns the platforms to lower for: kernels may exist for the target's platform only."""
    return lowered_for(absent.platform) if absent else None
