"""The steps before the first trial: finds the script's step, the devices and the legal plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.hardware import Chip, Target, chip_for, selector_of
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.reserve import NO_RESERVE, Reserve, default_reserve, parse_reserve
from automesh.mesh.axes import Plan
from automesh.mesh.axis_types import as_axis_types
from automesh.mesh.granules import granules_of
from automesh.outcomes import Failure, RuledOut
from automesh.program.nouns import Attachment, Entry, Inspection, StepRef
from automesh.report.facts import Searched, Versions
from automesh.report.progress import Progress
from automesh.space.legal import Enumeration, find_legal
from automesh.space.settings import StepFacts
from automesh.space.space import SearchSpace
from automesh.tuner.choose.baseline import baseline_text, parse_plan
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.estimate.logical_knobs import with_knobs
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.identity import BUNDLE, study_name, workload_name
from automesh.tuner.worker_errors import inspection_error
from automesh.tuner.workers import answer_to, fewer_workers, refuse_several_processes
from automesh.worker.messages import DevicesJob, InspectJob
from automesh.worker.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The devices that the plans are for, attached or absent.

    Attributes:
      memory_bytes: the memory of one device; 0 if unknown (CPU).
    """

    platform: str
    device_kind: str
    num_devices: int
    num_granules: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPlans:
    """The plans that a search may try.

    Attributes:
      baseline: the script's own plan, or nothing.
      promised: the prediction of a rule that was only compiled; see `tuner.choose.prior_rule`.
    """

    enumeration: Enumeration
    baseline: tuple[Plan, ...]
    promised: tuple[Plan, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans to try: the baseline, then the legal ones."""
        return tuple(dict.fromkeys([*self.baseline, *self.enumeration.legal]))

    def with_notices(self, notices: tuple[str, ...]) -> LegalPlans:
        """Returns the plans with further notices for the user."""
        enumeration = self.enumeration
        said = (*enumeration.notices, *notices)
        return replace(self, enumeration=replace(enumeration, notices=said))

    def without(self, refused: Mapping[Plan, RuledOut]) -> LegalPlans:
        """Returns the plans without those that turned out not to be legal.

        Raises:
          NoFeasibleMesh: no other plan is left.
        """
        return replace(
            self,
            enumeration=self.enumeration.without(refused),
            promised=tuple(plan for plan in self.promised if plan not in refused),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The step, the devices and the study of a search, which are known before any plan is tried.

    Attributes:
      searched: the step, as the study's facts describe it.
      selector: the selector of the devices, for which a rule is written.
      name: name of the study.
      folder: folder of the study.
      inspection: the facts about the script that a worker has found; its devices represent those of
        `aim` if these are absent.
      aim: the devices.
      provenance: versions and environment; trials with other ones are stale.
      source_hash: identifies trials of the script as it is now; see `tuner.study.freshness`.
      reserve: the part of a device's memory that is kept free.
    """

    step: StepRef
    searched: Searched
    selector: str
    name: str
    folder: Path
    inspection: Inspection
    aim: Aim
    chip: Chip
    provenance: Versions
    timeout_s: float
    source_hash: str
    reserve: Reserve = NO_RESERVE

    @property
    def entry(self) -> Entry:
        """The entry that builds the step."""
        return self.step.entry

    @property
    def device_memory(self) -> DeviceMemory:
        """The memory of a device that a plan may use."""
        limit = self.aim.memory_bytes
        return DeviceMemory(limit_bytes=limit, reserve_bytes=self.reserve.of(limit))


def step_ref(entry: Entry, target: Target, inspection: Inspection | None = None) -> StepRef:
    """Returns the reference to the step that is sent to workers.

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
    """Returns the first job of a search."""
    # The kind of an attached accelerator is not known yet.
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
    """Asks a worker about the script and the devices.

    Args:
      warm_up: number of further workers that start jax meanwhile, for the next jobs.
      meanwhile: called while the worker is busy, for slow preparations that the search needs later.

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
    *,
    limit_bytes: int = 0,
) -> tuple[Preparation, LegalPlans]:
    """Enumerates the plans and names the study.

    Args:
      limit_bytes: the memory of a device that a program can use, from its compiler; 0 to use the
        one in the chip table.

    Raises:
      UsageError: the space or the baseline does not fit the script or the devices.
      NoFeasibleMesh: no plan is legal.
    """
    aim = aim_of(target, inspection)
    if limit_bytes:
        aim = replace(aim, memory_bytes=limit_bytes)
    legal = _legal_plans(request, target, space, inspection, aim, progress)
    selector = target.selector or selector_of(inspection.devices)
    name = study_name(
        request.entry,
        selector=selector,
        axes=space.names,
        scope=request.results,
        figures=target.figures,
        bundle=os.environ.get(BUNDLE, ""),
    )
    folder = study_folder(request.results, name, new=request.new)
    preparation = Preparation(
        step=step_ref(request.entry, target, inspection),
        searched=_searched(request.entry, space, inspection, legal.enumeration),
        selector=selector,
        name=folder.name,
        folder=folder,
        inspection=inspection,
        aim=aim,
        chip=chip_for(aim.device_kind, aim.platform)
        if target.absent is None
        else target.absent.fabric.chip,
        provenance=tuple(sorted((*inspection.versions, *inspection.environment))),
        timeout_s=request.timeout_s,
        source_hash=inspection.source_hash,
        reserve=_reserve(request, target, aim),
    )
    return preparation, legal


def _legal_plans(
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    inspection: Inspection,
    aim: Aim,
    progress: Progress,
) -> LegalPlans:
    enumeration = find_legal(
        space,
        StepFacts(
            facts=inspection.facts,
            used_axes=inspection.used_axes,
            mapping=inspection.mapping,
            knobs=inspection.knobs,
            takes_any_knob=inspection.takes_any_knob,
            # Axes of inferred shardings are not those of a mesh of the script.
            is_captured=request.entry.capture is not None and request.entry.capture.layout is None,
        ),
        num_devices=aim.num_devices,
        num_granules=aim.num_granules,
        platform=aim.platform,
    )
    # The notices of the request were shown when they were found, before the script was inspected.
    found = (*inspection.notices, *enumeration.notices)
    for notice in (*target.notices, *found):
        progress.notice(notice)
    enumeration = replace(enumeration, notices=(*request.notices, *found))
    baseline = _baseline(request, inspection, enumeration, space, aim)
    legal = LegalPlans(enumeration=enumeration, baseline=baseline)
    if request.workers > len(legal.plans):
        fewer = fewer_workers(request.workers, len(legal.plans), "there are no more plans")
        progress.notice(fewer)
        legal = legal.with_notices((fewer,))
    return legal


def _searched(
    entry: Entry, space: SearchSpace, inspection: Inspection, enumeration: Enumeration
) -> Searched:
    """Returns the step as the study's facts describe it."""
    capture = entry.capture
    layout = capture.layout if capture is not None else None
    return Searched(
        workload=workload_name(entry),
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        batch_axes=space.batch_axes,
        axis_types=as_axis_types(inspection.axis_types, space.names),
        tokens_per_step=inspection.tokens_per_step,
        arguments=layout.arguments if layout is not None else (),
        made_up=inspection.made_up,
        split=" ".join(map(str, capture.splits)) if capture is not None else "",
        not_searched=capture.step.about_outside() if capture is not None else "",
    )


def _reserve(request: SearchRequest, target: Target, aim: Aim) -> Reserve:
    """Returns the memory to keep free. For attached devices it is none, unless the user wants it:
    they report themselves what fits."""
    if request.reserve:
        return parse_reserve(request.reserve)
    return default_reserve(aim.platform, os.environ) if target.absent else NO_RESERVE


def known_devices(target: Target) -> tuple[int, int]:
    """Returns the number of a target's devices and of their granules; zeros for attached ones,
    which a worker must find."""
    if target.absent is not None:
        return target.absent.num_devices, target.absent.fabric.num_granules
    each, processes = target.cpu_devices, target.processes
    return (each * processes, processes) if each else (0, 0)


def aim_of(target: Target, found: Inspection | Attachment) -> Aim:
    """Returns the devices of a target: those that a worker found, unless it names absent ones."""
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
    """Returns the folder of the newest study of a name, or the next free one: `name`, `name-2`,
    ..."""
    number, folder = 1, results / name
    while (following := results / f"{name}-{number + 1}").exists():
        number, folder = number + 1, following
    return following if new and folder.exists() else folder
