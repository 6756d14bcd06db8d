"""The start of every search: finds the step, the devices and the legal plans, and estimates
these."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from automesh.cost.pipeline.prices import PipelinePrices, price_pipeline_terms
from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.pricing import PlanPrices, least_of, price
from automesh.cost.terms import Terms
from automesh.errors import UsageError
from automesh.foreign.ownership import why_others_may_write
from automesh.hardware import Target
from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.hardware.compilers import attached_devices_of
from automesh.hardware.fabric.discover import fabric_of
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.model import HardwareModel
from automesh.ir.findings.state import REPLICATED_STATE
from automesh.mesh.axes import Plan
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import RuledOut
from automesh.program.nouns import Entry, Propagation, StepRef
from automesh.report.estimates import STEP_REFUSES, Estimates
from automesh.report.findings import FindingsOfPlans
from automesh.report.progress import Progress
from automesh.report.so_far import SoFar
from automesh.report.words import partly_counted_notice, uncounted_notices
from automesh.space.space import SearchSpace
from automesh.tuner.choose.partly_counted import partly_counted
from automesh.tuner.choose.ranking import estimated_candidates
from automesh.tuner.estimate.buildable import (
    MOST_SUSPECTS,
    BuildCheck,
    is_indivisible,
    refusal_notices,
)
from automesh.tuner.estimate.data_by_mesh import data_by_mesh
from automesh.tuner.estimate.propagations import Active, Need
from automesh.tuner.estimate.propagator import PropagatedStep, Propagator
from automesh.tuner.estimate.rung import EstimateRung
from automesh.tuner.estimate.standings import Standings
from automesh.tuner.estimate.terms_cache import TERMS, TermsCache
from automesh.tuner.preparation import LegalPlans, Preparation, inspect, prepare
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.identity import BUNDLE, workload_name
from automesh.tuner.workers import (
    count_lowering,
    count_workers,
    layout_job,
    memory_share_bytes,
    surroundings_of,
)
from automesh.worker.messages import BuildJob, LayoutJob, Surroundings
from automesh.worker.pool import Pool
from automesh.worker.process import Process, StartWorker
from automesh.worker.temporary import temporary_folder

# Share of the budget: the plans in the list are built, and a search compiles what it has built.
BUILD_SHARE = 0.1
_MOST_BESIDE = 20  # most other studies in which a search looks for terms
Choose = Callable[[Sequence[Plan]], Sequence[Plan]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The facts that are known before any plan is tried, and the workers for estimates.

    Attributes:
      pool: workers with virtual CPU devices instead of the target's.
      start_worker: starts the workers that have the target's own devices.
      known: propagations until now, for estimates that go on.
    """

    request: SearchRequest
    target: Target
    space: SearchSpace
    preparation: Preparation
    legal: LegalPlans
    progress: Progress
    pool: Pool
    workers: int
    clock: Callable[[], float]
    start_worker: StartWorker = Process
    known: dict[Need, Propagation] = field(default_factory=dict[Need, Propagation])

    @property
    def step(self) -> PropagatedStep:
        """The parts that all propagations of the step share."""
        return _step(self.preparation, self.target, self.space)

    def counting(self, preparation: Preparation, legal: LegalPlans) -> Session:
        """Returns the session with the facts that were found since it began; see
        `freshness.settled`."""
        return replace(self, preparation=preparation, legal=legal)

    def estimate(
        self,
        *,
        share: float,
        pulse: Callable[[], object] = lambda: None,
        choose: Choose | None = None,
        terms_folder: Path | None = None,
        may_stop: bool = False,
        keep: Callable[[SoFar], object] = lambda _: None,
        until_settled: bool = False,
    ) -> Estimates:
        """Estimates the legal plans.

        Args:
          share: share of the budget that this may take.
          pulse: called every half second or so.
          choose: chooses the plans; by default all.
          terms_folder: folder for the terms; by default in the study's folder, if there is one.
          may_stop: whether to return the estimates so far after Ctrl-C.
          keep: called with each table of the estimates so far.
          until_settled: whether to stop once the first ten plans cannot change any more.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed, and `may_stop` is False.
        """
        preparation = self.preparation
        propagator = Propagator(
            step=_step(preparation, self.target, self.space),
            pool=self.pool,
            cache=_cache(preparation, terms_folder, self.request.shared_terms),
            progress=self.progress,
            workers=self.workers,
            deadline_s=self.clock() + share * self.request.budget_s,
            timeout_s=self.request.timeout_s,
            clock=self.clock,
            pulse=pulse,
            known=self.known,
        )
        found = _estimate(
            preparation, self.legal, self.target, propagator, choose, keep, until_settled
        )
        if found.is_interrupted and not may_stop:
            raise KeyboardInterrupt
        return found

    def rule_out(
        self, estimates: Estimates, *, share: float, pulse: Callable[[], object] = lambda: None
    ) -> tuple[LegalPlans, Estimates]:
        """Builds the baseline and the most promising plans, and rules out those that cannot be
        built.

        Args:
          share: share of the budget that this may take, without the baseline.
          pulse: as in `estimate`.

        Returns:
          The legal plans and the estimates, without the plans that cannot be built.

        Raises:
          UsageError: the baseline cannot be built.
          NoFeasibleMesh: no plan is left.
        """
        preparation, legal = self.preparation, self.legal
        step = _step_on_virtual_devices(preparation, self.target)
        check = BuildCheck(
            entry=preparation.entry,
            job=lambda plan: BuildJob(step=step, plan=plan),
            pool=self.pool,
            progress=self.progress,
            workers=self.workers,
            deadline_s=self.clock() + share * self.request.budget_s,
            timeout_s=self.request.timeout_s,
            clock=self.clock,
            pulse=pulse,
        )
        for plan in legal.baseline:
            check.require(plan)
        ranked = [
            candidate.plan
            for candidate in estimated_candidates(
                estimates.found,
                baseline=legal.baseline,
                device_memory_bytes=preparation.aim.memory_bytes,
            )
        ]
        check.build(ranked, wanted=self.request.top)
        doubtful = [plan for plan, why in estimates.missing.items() if why.startswith(STEP_REFUSES)]
        check.build(doubtful[:MOST_SUSPECTS], wanted=MOST_SUSPECTS)
        refused = check.refused(legal.plans)
        notices = (*refusal_notices(refused), *_not_run_there(self.request.entry, refused))
        differs = data_by_mesh(check.data, estimates.found)
        if differs is not None:
            notices += (differs.notice,)
        listed = [plan for plan in ranked if plan not in refused][: self.request.top]
        if not all(check.is_done(plan) for plan in listed):
            notices += ("the time did not suffice to build the step on all meshes that are listed",)
        return (
            legal.without(refused),
            replace(
                estimates,
                found={plan: one for plan, one in estimates.found.items() if plan not in refused},
                missing={
                    plan: why for plan, why in estimates.missing.items() if plan not in refused
                },
                refused=refused,
                data_by_mesh="" if differs is None else differs.clause,
                notices=(*estimates.notices, *notices),
            ),
        )


@contextmanager
def open_session(
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
    start_worker: StartWorker = Process,
    meanwhile: Callable[[], object] = lambda: None,
    limit_bytes: int = 0,
) -> Generator[Session]:
    """Inspects the script and the devices, and enumerates the plans.

    Args:
      start_worker: starts the workers that have the target's own devices.
      meanwhile: called while a worker inspects the script; see `inspect`.
      limit_bytes: as for `prepare`.

    Raises:
      UsageError: the script, the space or the baseline cannot be used.
      NoFeasibleMesh: no plan is legal.
    """
    surroundings = surroundings_of(target)
    # The workers that propagate can also inspect.
    shared = surroundings.platforms == "cpu" and target.processes == 1
    workers = count_workers(target, request.workers) if shared else count_lowering()
    with ExitStack() as stack:
        logs = stack.enter_context(temporary_folder("session"))

        def open_pool(size: int, around: Surroundings, start: StartWorker = Process) -> Pool:
            limit = request.memory_limit_bytes or memory_share_bytes(size)
            pool = Pool(
                size=size,
                surroundings=around,
                log_dir=logs,
                memory_limit_bytes=limit,
                on_wait=progress.tick,
                start=start,
            )
            return stack.enter_context(pool)

        pool = open_pool(workers if shared else 1, surroundings, start_worker)
        inspection = inspect(
            pool,
            request,
            target,
            space,
            progress,
            warm_up=workers - 1 if shared else 0,
            meanwhile=meanwhile,
        )
        preparation, legal = prepare(
            request, target, space, inspection, progress, limit_bytes=limit_bytes
        )
        enumeration = legal.enumeration
        progress.phase(
            "enumerate",
            total=enumeration.num_plans,
            done=enumeration.num_plans,
            note=f"{len(enumeration.legal)} legal",
        )
        if not shared:
            pool.close()
            devices = preparation.aim.num_devices
            pool = open_pool(workers, Surroundings(platforms="cpu", cpu_devices=devices))
        yield Session(
            request=request,
            target=target,
            space=space,
            preparation=preparation,
            legal=legal,
            progress=progress,
            pool=pool,
            workers=min(workers, len(legal.plans)),
            clock=clock,
            start_worker=start_worker,
        )


def notices_of(legal: LegalPlans, estimates: Estimates) -> tuple[str, ...]:
    """Returns notices for the user about the plans and their estimates."""
    said = [*legal.enumeration.notices, *estimates.notices]
    if estimates.missing:
        said.append(estimates.missing_notice)
    said.append(partly_counted_notice(len(partly_counted(estimates.found))))
    said += uncounted_notices(list(estimates.found.values()))
    return tuple(dict.fromkeys(filter(None, said)))


def _not_run_there(entry: Entry, refused: Mapping[Plan, RuledOut]) -> tuple[str, ...]:
    """Says that a script whose step is carried was not run on meshes that do not divide its
    arrays: it may make others there."""
    capture = entry.capture
    if capture is None or not (capture.is_carried and capture.makes_mesh):
        return ()
    if not any(is_indivisible(why) for why in refused.values()):
        return ()
    return (
        f"{Path(entry.location).name} was not run on meshes that do not divide its arrays as "
        f"they are on {capture.mesh}: if it pads them for its mesh, these meshes are legal",
    )


def _step_on_virtual_devices(preparation: Preparation, target: Target) -> StepRef:
    """Returns the step for the workers that lower it on virtual CPU devices.

    User code that asks for devices gets those of the target, even if they are attached to this
    machine: these workers do not have them.
    """
    step, found, aim = preparation.step, preparation.inspection, preparation.aim
    if target.absent is not None or aim.platform == "cpu":
        return step
    try:
        fabric = fabric_of(target, found.devices)
    except UsageError:
        return step  # Then nothing is estimated, and the estimates say why.
    devices = attached_devices_of(
        fabric,
        device_kind=aim.device_kind,
        memory_bytes=aim.memory_bytes,
        says=found.devices[0].says,
    )
    return replace(step, absent=devices)


def _step(preparation: Preparation, target: Target, space: SearchSpace) -> PropagatedStep:
    return PropagatedStep(
        step=_step_on_virtual_devices(preparation, target),
        axis_names=space.names,
        platform=preparation.aim.platform,
        seen=preparation.inspection.seen,
    )


def _cache(
    preparation: Preparation, terms_folder: Path | None, shared: tuple[Path, ...]
) -> TermsCache:
    # A dry run creates no study, but uses and completes one that a search has begun.
    folder = preparation.folder
    return TermsCache(
        folder=terms_folder or (folder / TERMS if folder.is_dir() else None),
        source_hash=preparation.source_hash,
        versions=preparation.provenance,
        others=tuple(dict.fromkeys((*shared, *_beside(folder, workload_name(preparation.entry))))),
    )


def _beside(folder: Path, workload: str) -> list[Path]:
    """Returns the folders with terms of other searches of a script with this name, newest first.

    Terms are stored under all that they depend on, so those of another target may be used, too:
    with as many devices of the same platform, a step has the same terms on most of its meshes. A
    search of a submission uses none, and folders into which another account may write are left out.
    """
    if os.environ.get(BUNDLE):
        return []
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for terms in folder.absolute().parent.glob(f"{glob.escape(workload)}-*/{TERMS}"):
            if terms.parent.name != folder.name and not why_others_may_write(terms):
                found.append((terms.stat().st_mtime, terms))
    return [terms for _, terms in sorted(found, reverse=True)[:_MOST_BESIDE]]


def _estimate(
    preparation: Preparation,
    plans: LegalPlans,
    target: Target,
    propagator: Propagator,
    choose: Choose | None,
    keep: Callable[[SoFar], object],
    until_settled: bool,
) -> Estimates:
    try:
        fabric = fabric_of(target, preparation.inspection.devices)
    except UsageError as error:
        missing = dict.fromkeys(plans.plans, error.message)
        return Estimates(missing=missing)
    aim = preparation.aim
    speeds = find_speeds(
        fabric, platform=aim.platform, device_kind=aim.device_kind, environ=os.environ
    )

    def price_on_fabric(
        terms: Mapping[Active, Terms], batch: Batch, layouts: Layouts
    ) -> PlanPrices:
        return price(
            terms,
            batch,
            hardware=HardwareModel(fabric=fabric, layouts=layouts, speeds=speeds),
        )

    def price_stages(
        pipeline: PipelineTerms, where: Terms, batch: Batch, layouts: Layouts
    ) -> PipelinePrices:
        return price_pipeline_terms(
            pipeline,
            where,
            batch,
            hardware=HardwareModel(fabric=fabric, layouts=layouts, speeds=speeds),
        )

    legal = tuple(dict.fromkeys([*plans.enumeration.legal, *plans.baseline]))
    rung = EstimateRung(
        plans=choose(legal) if choose else legal,
        propagator=propagator,
        layout=_layout_job(preparation, fabric) if fabric.kind == "torus" else None,
        price=price_on_fabric,
        price_pipeline=price_stages,
        origin=speeds.origin,
        first=plans.baseline,
        findings=FindingsOfPlans(left_out=_chosen_anyway(preparation)),
        until_settled=until_settled,
        standings=Standings(
            progress=propagator.progress,
            baseline=plans.baseline,
            device_memory_bytes=aim.memory_bytes,
            keep=keep,
            least=lambda terms: least_of(terms, speeds=speeds, devices=aim.num_devices),
        ),
    )
    found = rung.run()
    notices = (*found.notices, *propagator.cache.skipped.notices())
    return replace(found, fabric=fabric, notices=notices)


def _chosen_anyway(preparation: Preparation) -> frozenset[str]:
    """Returns the findings whose cures are plans of the search: if the script splits nothing, the
    search tries to split the state, and the user has no shardings to fix."""
    capture = preparation.entry.capture
    is_inferred = capture is not None and capture.layout is not None
    return frozenset({REPLICATED_STATE}) if is_inferred else frozenset()


def _layout_job(
    preparation: Preparation, fabric: Fabric
) -> Callable[[tuple[tuple[int, ...], ...]], LayoutJob]:
    aim = preparation.aim
    return lambda shapes: layout_job(
        fabric, platform=aim.platform, device_kind=aim.device_kind, shapes=shapes
    )
