"""Before the first trial: what the script is, what the devices are, which plans are legal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.hardware import Chip, Target, chip_for, selector_of
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.reserve import NO_RESERVE, Reserve, default_reserve, parse_reserve
from automesh.mesh.axes import Plan
from automesh.mesh.axis_types import as_axis_types
from automesh.mesh.granules import granules_of
from automesh.outcomes import Failure
from automesh.program.infer.search.layout import NamedSplit
from automesh.program.nouns import Attachment, Entry, Inspection, StepRef
from automesh.report.progress import Progress
from automesh.space.legal import Enumeration, find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import SearchSpace
from automesh.tuner.choose.baseline import baseline_text, parse_plan
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.estimate.logical_knobs import with_knobs
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.identity import BUNDLE, study_name
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import answer_to, fewer_workers, refuse_several_processes
from automesh.worker.messages import DevicesJob, InspectJob
from automesh.worker.pool import Pool

Versions = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The devices that the plans are for, here or not.

    Attributes:
      memory_bytes: what one device can hold; 0 where nobody says (CPU).
    """

    platform: str
    device_kind: str
    num_devices: int
    num_granules: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Everything that the rungs need to know.

    Attributes:
      aim: the devices; those of the inspection stand in for them where they are not here.
      baseline: the script's own plan, or nothing.
      axis_types: what the step asks for, a word for each axis.
      batch_axes: of the search space.
      name: of the study.
      folder: of the study.
      reserve: of these, what is kept free.
      source_hash: what trials of the script as it is now are known by; see `tuner.study.freshness`.
      provenance: versions and environment; trials made with others are stale.
      cache_dir: where jax keeps executables, so that the measure rung need not compile again; None
        where none are kept, as for devices that are not here.
      promised: what a rule promises that was only compiled so far; see `tuner.choose.prior_rule`.
    """

    step: StepRef
    selector: str
    name: str
    folder: Path
    inspection: Inspection
    enumeration: Enumeration
    baseline: tuple[Plan, ...]
    aim: Aim
    chip: Chip
    provenance: Versions
    timeout_s: float
    axis_types: tuple[str, ...]
    batch_axes: tuple[str, ...]
    source_hash: str
    reserve: Reserve = NO_RESERVE
    cache_dir: Path | None = None
    promised: tuple[Plan, ...] = ()

    @property
    def entry(self) -> Entry:
        """What builds the step."""
        return self.step.entry

    @property
    def device_memory_bytes(self) -> int:
        """What one device can hold; 0 where nobody says (CPU)."""
        return self.aim.memory_bytes

    @property
    def device_memory(self) -> DeviceMemory:
        """What a plan may use of a device's memory."""
        limit = self.device_memory_bytes
        return DeviceMemory(limit_bytes=limit, reserve_bytes=self.reserve.of(limit))

    def with_memory(self, limit_bytes: int) -> Preparation:
        """With the limit that a compiler has stated; 0 leaves what is on record."""
        if not limit_bytes:
            return self
        return replace(self, aim=replace(self.aim, memory_bytes=limit_bytes))

    @property
    def split(self) -> str:
        """Which axes of a script's mesh are several here, in the words of `--split`."""
        capture = self.entry.capture
        return " ".join(map(str, capture.splits)) if capture is not None else ""

    @property
    def not_searched(self) -> str:
        """What a script does besides its jitted step, in a sentence."""
        capture = self.entry.capture
        return capture.step.about_outside() if capture is not None else ""

    @property
    def arguments(self) -> tuple[NamedSplit, ...]:
        """How logical axes split the arguments of a step whose shardings are inferred; nothing for
        any other."""
        capture = self.entry.capture
        layout = capture.layout if capture is not None else None
        return layout.arguments if layout is not None else ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans to compile: the baseline, then the legal ones."""
        return tuple(dict.fromkeys([*self.baseline, *self.enumeration.legal]))


def step_ref(entry: Entry, target: Target, inspection: Inspection | None = None) -> StepRef:
    """The step as workers are told of it.

    Args:
      inspection: None before it is inspected.
    """
    return StepRef(
        entry=entry,
        axis_types=inspection.axis_types if inspection else (),
        facts=inspection.facts if inspection else (),
        absent=absent_devices_of(target.absent) if target.absent else None,
    )


def inspect_job(request: SearchRequest, target: Target, space: SearchSpace) -> InspectJob:
    """The first job of a search."""
    # What an attached accelerator is called is not known yet.
    platform = "cpu" if target.platforms == "cpu" else ""
    return InspectJob(
        step=step_ref(request.entry, target),
        axis_names=space.names,
        platform=target.absent.platform if target.absent else platform,
        mapping=tuple((axis.name, axis.choices[0]) for axis in space.mapping),
    )


def inspect(
    pool: Pool,
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    progress: Progress,
    *,
    warm_up: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> Inspection:
    """Asks a worker what the script and the devices are.

    Args:
      warm_up: further workers that start jax meanwhile, to be ready for what follows.
      meanwhile: called once the worker is at work: what the search needs later, and takes time.

    Raises:
      UsageError: the script or its `build` cannot be used, or there are several processes.
    """
    progress.now(f"looking at {request.entry.location}")
    job = inspect_job(request, target, space)
    ticket = pool.submit(job, request.timeout_s)
    for _ in range(warm_up):
        pool.submit(DevicesJob(), request.timeout_s)
    meanwhile()
    answer = answer_to(pool, ticket, job, Inspection)
    if isinstance(answer, Failure):
        raise inspection_error(answer, request.entry, space)
    if target.processes == 1:
        refuse_several_processes(
            answer.process_count, "a search", hint="run the search on one host, without a launcher"
        )
    return with_knobs(pool, job, answer, space, progress, timeout_s=request.timeout_s)


def prepare(
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    inspection: Inspection,
    progress: Progress,
) -> Preparation:
    """Enumerates the plans and names the study.

    Raises:
      UsageError: the space or the baseline does not fit the script or the devices.
      NoFeasibleMesh: no plan is legal.
    """
    aim = aim_of(target, inspection)
    enumeration = find_legal(
        space,
        StepFacts(
            facts=inspection.facts,
            used_axes=inspection.used_axes,
            mapping=inspection.mapping,
            knobs=inspection.knobs,
            takes_any_knob=inspection.takes_any_knob,
        ),
        num_devices=aim.num_devices,
        num_granules=aim.num_granules,
        platform=aim.platform,
    )
    # Those of the request were said when they were found, before the script was inspected.
    found = (*inspection.notices, *enumeration.notices)
    for notice in (*target.notices, *found):
        progress.notice(notice)
    enumeration = replace(enumeration, notices=(*request.notices, *found))
    selector = target.selector or selector_of(inspection.devices)
    baseline = _baseline(request, inspection, enumeration, space, aim)
    plans = len(dict.fromkeys([*baseline, *enumeration.legal]))
    if request.workers > plans:
        fewer = fewer_workers(request.workers, plans, "there are no more plans")
        progress.notice(fewer)
        enumeration = replace(enumeration, notices=(*enumeration.notices, fewer))
    name = study_name(
        request.entry,
        selector=selector,
        axes=space.names,
        scope=request.results,
        figures=target.figures,
        bundle=os.environ.get(BUNDLE, ""),
    )
    folder = study_folder(request.results, name, new=request.new)
    return Preparation(
        step=step_ref(request.entry, target, inspection),
        selector=selector,
        name=folder.name,
        folder=folder,
        inspection=inspection,
        enumeration=enumeration,
        baseline=baseline,
        aim=aim,
        chip=chip_for(aim.device_kind, aim.platform)
        if target.absent is None
        else target.absent.fabric.chip,
        provenance=tuple(sorted((*inspection.versions, *inspection.environment))),
        timeout_s=request.timeout_s,
        axis_types=as_axis_types(inspection.axis_types, space.names),
        batch_axes=space.batch_axes,
        source_hash=inspection.source_hash,
        reserve=_reserve(request, target, aim),
    )


def _reserve(request: SearchRequest, target: Target, aim: Aim) -> Reserve:
    """What is kept free; of devices that are here nothing, unless it is asked for: they say
    themselves what fits."""
    if request.reserve:
        return parse_reserve(request.reserve)
    return default_reserve(aim.platform, os.environ) if target.absent else NO_RESERVE


def known_devices(target: Target) -> tuple[int, int]:
    """How many devices a target has, and in how many granules they are; zeros for attached ones,
    which a worker has to look at."""
    if target.absent is not None:
        return target.absent.num_devices, target.absent.fabric.num_granules
    each, processes = target.cpu_devices, target.processes
    return (each * processes, processes) if each else (0, 0)


def aim_of(target: Target, found: Inspection | Attachment) -> Aim:
    """The devices of a target: those that a worker found, unless it names absent ones."""
    absent = target.absent
    if absent is not None:
        return Aim(
            platform=absent.platform,
            device_kind=absent.device_kind or absent.fabric.chip.name,
            num_devices=absent.num_devices,
            num_granules=absent.fabric.num_granules,
            memory_bytes=absent.device_memory_bytes,
        )
    first = found.devices[0]
    return Aim(
        platform=first.platform,
        device_kind=first.kind,
        num_devices=len(found.devices),
        num_granules=len(granules_of(found.devices)),
        memory_bytes=found.device_memory_bytes,
    )


def _baseline(
    request: SearchRequest,
    inspection: Inspection,
    enumeration: Enumeration,
    space: SearchSpace,
    aim: Aim,
) -> tuple[Plan, ...]:
    text = baseline_text(request.baseline, own=inspection.baseline)
    if not text:
        return ()
    plan = parse_plan(
        text,
        names=space.names,
        num_devices=aim.num_devices,
        num_granules=aim.num_granules,
        mapping=enumeration.mapping,
        knobs=dict(inspection.knobs),
        varied=[name for name, _ in enumeration.legal[0].knobs],
    )
    return (plan,)


def study_folder(results: Path, name: str, *, new: bool) -> Path:
    """The folder of the newest study of a name, or the next free one: `name`, `name-2`, ..."""
    number, folder = 1, results / name
    while (following := results / f"{name}-{number + 1}").exists():
        number, folder = number + 1, following
    return following if new and folder.exists() else folder
