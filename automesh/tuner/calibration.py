"""A calibration, from its request to the profile that it writes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from automesh.errors import Interrupted, UsageError
from automesh.hardware import Target, parse_target
from automesh.hardware.calibration.points import Point
from automesh.hardware.calibration.probes import Lot, plan_lots, probe_shapes
from automesh.hardware.calibration.profile import Profile, make_profile
from automesh.hardware.calibration.profile_files import (
    check_place,
    host_of,
    merge_profile,
    profile_folder,
    profile_path,
)
from automesh.hardware.fabric.discover import fabric_of
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.launch.cluster import (
    ALONE,
    ENGINES,
    Cluster,
    ClusterOptions,
    cluster_of,
    spread,
    workers_of,
)
from automesh.outcomes import Failed, Failure, OutOfMemory
from automesh.program.nouns import Attachment, ProbeTimes
from automesh.reading import kind_of_file
from automesh.report.pages.calibration import CalibrationResult
from automesh.report.progress import Progress
from automesh.texts.user_text import check_text, user_path
from automesh.tuner.workers import (
    ask,
    layout_job,
    one_worker,
    refuse_launcher,
    refuse_several_processes,
    surroundings_of,
)
from automesh.units import format_wait, parse_duration
from automesh.worker.messages import CalibrateJob, DevicesJob, Job
from automesh.worker.pool import Pool

_T = TypeVar("_T")
ROUNDS = 7
SAMPLE_S = 0.01
_HINT = "say on which hosts the devices are: see docs/clusters.md"
_LIMIT_S = 180.0  # For finding the devices; jax may have to wait for them.
_LEAST_LOT_S = 30.0  # A lot takes seconds; on a busy machine, or with slow compiles, a minute.


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """The request for a calibration.

    Attributes:
      target: `local`, `cpu:N`, or `cpu:N*P`.
      out: file for the profile; None for the one that searches look for.
      budget_s: seconds; no lot of probes begins that would probably end later.
      cluster: the hosts of the devices.
    """

    target: str
    out: Path | None
    budget_s: float
    cluster: Cluster = ALONE

    @property
    def memory_limit_bytes(self) -> int:
        """The limit for the memory of one process; 0 stands for its share of the free memory."""
        return 0


def read_calibration(
    target: str,
    *,
    out: str | Path | None,
    budget: str,
    hosts: ClusterOptions,
    spelled: Callable[[str], str] = str,
) -> CalibrationRequest:
    """Checks the options of a calibration; see `automesh.calibrate`.

    Args:
      spelled: gives the user's spelling of an option: `--budget` for `budget`.

    Raises:
      UsageError: an option is wrong.
    """
    try:
        budget_s = parse_duration(budget)
    except UsageError as error:
        raise UsageError(f"{spelled('budget')}: {error.message}", hint=error.hint) from None
    return CalibrationRequest(
        target=check_text(target),
        out=user_path(out) if out is not None else None,
        budget_s=budget_s,
        cluster=cluster_of(hosts, spelled),
    )


def run_calibration(
    request: CalibrationRequest,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
    plan: Callable[[Fabric, Layouts], Sequence[Lot]] = plan_lots,
) -> CalibrationResult:
    """Measures the devices of a target, and merges the results into their profile.

    The profile is written after every lot of probes, so no measurement is lost.

    Args:
      plan: the probes to take; by default all that a search may need.

    Raises:
      UsageError: the devices are not attached, a file cannot be written, or nothing was measured.
      Interrupted: Ctrl-C was pressed before anything was measured; later it ends the calibration
        early.
    """
    if not (request.cluster.is_everywhere or request.cluster.launch in ENGINES):
        refuse_launcher("a calibration", hint=_HINT)
    target = spread(_target(request.target), request.cluster)
    if request.out is not None:
        _check_out(request.out)
    with (
        workers_of(request, target, progress) as start,
        one_worker(surroundings_of(target), progress=progress, start=start) as pool,
    ):
        attached = _answer(pool, DevicesJob(), Attachment)
        first, count = attached.devices[0], len(attached.devices)
        if target.processes == 1:
            refuse_several_processes(attached.process_count, "a calibration", hint=_HINT)
        fabric = fabric_of(target, attached.devices)
        layouts = _layouts(pool, fabric, attached)
        path = request.out or profile_path(
            profile_folder(os.environ),
            platform=first.platform,
            device_kind=first.kind,
            num_devices=count,
            host=host_of(first.platform),
            num_granules=fabric.num_granules,
        )
        check_place(path)
        for notice in target.notices:
            progress.notice(notice)
        lots = plan(fabric, layouts)
        return _Run(
            pool=pool,
            progress=progress,
            attached=attached,
            num_granules=fabric.num_granules,
            path=path.absolute(),
            deadline_s=clock() + request.budget_s,
            began_s=clock(),
            clock=clock,
        ).take(lots)


def _target(name: str) -> Target:
    target = parse_target(name, os.environ)
    if target.absent is not None:
        raise UsageError(
            f"target `{name}` names devices that are not here, and only attached ones can be "
            "measured",
            hint="run it there, with `--target local`, and copy the profile that it writes",
        )
    return target


def _check_out(path: Path) -> None:
    if path.suffix != ".json":
        raise UsageError(f"`{path}` does not end in .json", hint="write for example --out cpu.json")
    if kind := kind_of_file(path):
        inside = " in it" if kind == "a folder" else ""
        raise UsageError(f"`{path}` is {kind}, not a file", hint=f"name a file{inside}")
    check_place(path)


def _layouts(pool: Pool, fabric: Fabric, attached: Attachment) -> Layouts:
    if fabric.kind != "torus":
        return Layouts(shapes=(), spans=())
    first = attached.devices[0]
    job = layout_job(
        fabric, platform=first.platform, device_kind=first.kind, shapes=probe_shapes(fabric)
    )
    return _answer(pool, job, Layouts)


def _answer(pool: Pool, job: Job, kind: type[_T]) -> _T:
    answer = ask(pool, job, kind, _LIMIT_S)
    if not isinstance(answer, Failure):
        return answer
    hint = answer.hint if isinstance(answer, Failed) else ""
    raise UsageError(
        f"the devices cannot be looked at: {_why(answer)}",
        hint=hint or "`automesh doctor` says what is wrong with them",
    )


def _why(answer: Failure) -> str:
    match answer:
        case Failed():
            return answer.reason
        case OutOfMemory():
            return f"out of memory: {answer.detail}"
        case _:
            return "no answer in time"


@dataclass(slots=True, kw_only=True)
class _Run:
    """A running calibration."""

    pool: Pool
    progress: Progress
    attached: Attachment
    num_granules: int
    path: Path
    deadline_s: float
    began_s: float
    clock: Callable[[], float]
    profile: Profile | None = None
    measured: int = 0
    skipped: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    spreads: list[float] = field(default_factory=list[float])
    interrupted: bool = False

    def take(self, lots: Sequence[Lot]) -> CalibrationResult:
        """Measures one lot after the other until all are done or the budget is spent."""
        total = sum(len(lot.probes) for lot in lots)
        self.progress.phase("calibrate", total=total)
        try:
            for lot in lots:
                if self._is_too_long(lot):
                    self.skipped.append(lot.name)
                    total -= len(lot.probes)
                    self.progress.phase("calibrate", total=total, done=self.measured)
                else:
                    self._measure(lot, total)
        except KeyboardInterrupt:
            self.interrupted = True
        return self._result()

    def _is_too_long(self, lot: Lot) -> bool:
        now_s = self.clock()
        each_s = (now_s - self.began_s) / self.measured if self.measured else 0.0
        return now_s + each_s * len(lot.probes) > self.deadline_s

    def _measure(self, lot: Lot, total: int) -> None:
        job = CalibrateJob(probes=lot.probes, rounds=ROUNDS, sample_s=SAMPLE_S)

        def on_event(event: dict[str, object]) -> None:
            if event.get("event") == "calibrated":
                share = float(str(event["parts"])) / float(str(event["of"]))
                done = self.measured + int(share * len(lot.probes))
                self.progress.phase("calibrate", total=total, done=min(done, total - 1))

        self.progress.now(lot.name)
        left_s = self.deadline_s - self.clock()
        answer = ask(self.pool, job, ProbeTimes, max(2 * left_s, _LEAST_LOT_S), on_event)
        if isinstance(answer, Failure):
            self.failed.append(f"{lot.name}: {_why(answer)}")
            self.progress.notice(f"{lot.name} could not be measured: {_why(answer)}")
            return
        told = tuple(point for point in answer.points if point.seconds > 0)
        if len(told) < len(answer.points):
            drowned = len(answer.points) - len(told)
            self.failed.append(f"{lot.name}: {drowned} of {len(answer.points)} drowned in noise")
        self.profile = merge_profile(self.path, self._profile(told))
        self.spreads += [point.spread for point in told]
        self.measured += len(answer.points)
        self.progress.phase("calibrate", total=total, done=self.measured)

    def _profile(self, points: tuple[Point, ...]) -> Profile:
        first = self.attached.devices[0]
        return make_profile(
            points,
            platform=first.platform,
            device_kind=first.kind,
            num_devices=len(self.attached.devices),
            host=host_of(first.platform),
            versions=self.attached.versions,
            num_granules=self.num_granules,
        )

    def _result(self) -> CalibrationResult:
        if self.profile is None and self.interrupted:
            raise Interrupted("interrupted before anything was measured")
        if self.profile is None:
            spent = format_wait(self.clock() - self.began_s)
            raise UsageError(
                f"nothing was measured in {spent}: {'; '.join(self.failed) or 'no time'}",
                hint="allow more time with --budget, or ask `automesh doctor`",
            )
        return CalibrationResult(
            profile=self.profile,
            path=str(self.path),
            measured=len(self.spreads),
            spread=statistics.median(self.spreads) if self.spreads else 0.0,
            skipped=tuple(self.skipped),
            failed=tuple(self.failed),
            took_s=self.clock() - self.began_s,
            interrupted=self.interrupted,
        )
