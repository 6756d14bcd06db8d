"""One search from its request to its result: prepare, compile, measure, write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from automesh.hardware import Target
from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.mesh.axes import Plan
from automesh.outcomes import Outcome
from automesh.program.nouns import Attachment
from automesh.report.estimates import ESTIMATES, Estimates
from automesh.report.files.csv import write_csv, write_estimates
from automesh.report.files.rule import save_rule
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.space.space import SearchSpace
from automesh.tuner.choose.finalists import COMPILES_PER_FINALIST, Contest, contest_of
from automesh.tuner.choose.prior_rule import promised_plans
from automesh.tuner.compile.jobs import CompilingHere
from automesh.tuner.compile.rung import CompileRung
from automesh.tuner.measure.leased_pool import LeaseLost, LivePool
from automesh.tuner.measure.rung import MeasureRung
from automesh.tuner.measure.schedule import VisitRules
from automesh.tuner.paths import as_seen, check_places, make_folder
from automesh.tuner.preparation import (
    Preparation,
    count_workers,
    memory_share_bytes,
    surroundings_of,
)
from automesh.tuner.request import SearchRequest
from automesh.tuner.run_absent import AheadSearch, ready_for
from automesh.tuner.session import BUILD_SHARE, looking
from automesh.tuner.study.assemble import assemble, outcomes_of
from automesh.tuner.study.freshness import settled
from automesh.tuner.study.metadata import Footer, Header, Notebook, header_of, reading, spent
from automesh.tuner.study.scope import Scope
from automesh.tuner.study.study import Study, open_study, parse_storage
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool

# Of the budget, from its beginning; what is left over goes to the next rung.
ESTIMATE_SHARE = 0.2
COMPILE_SHARE = 0.4
MEASURE_S = 40.0  # a race and three fresh processes take as much: not the compiler's
LEAST_COMPILE_SHARE = 0.25


def run_search(
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Searches until the budget is spent or nothing is left to try.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal, or jax can lay out none of them.
    """
    started_s = clock()
    check_places(request)
    # Before anything costs time: without its compiler, a search for absent devices ends in nothing.
    found = ready_for(request, target, progress) if target.absent else None
    with ExitStack() as lookers:
        look = lookers.enter_context(looking(request, target, space, progress, clock=clock))
        preparation = look.preparation
        if found is not None:
            preparation = preparation.with_memory(_limit_bytes(target, found))
        else:
            promised, notices = promised_plans(request, preparation)
            preparation = replace(preparation, promised=promised)
            for notice in notices:
                progress.notice(notice)
        make_folder(preparation.folder)
        with open_study(
            parse_storage(request.storage, preparation.folder),
            preparation.name,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
            scope=_scope_of(request, target, preparation),
        ) as study:
            look = look.counting(settled(request, target, look.preparation, study, progress, clock))
            preparation = replace(preparation, source_hash=look.preparation.source_hash)
            estimates = look.estimate(share=ESTIMATE_SHARE, pulse=study.heartbeat)
            legal, estimates = look.rule_out(estimates, share=BUILD_SHARE, pulse=study.heartbeat)
            # What was added to the preparation since the look stays.
            preparation = replace(
                preparation,
                enumeration=legal.enumeration,
                promised=tuple(one for one in preparation.promised if one not in estimates.refused),
            )
            lookers.close()  # The workers make room for those that compile.
            if target.absent is not None:
                return AheadSearch(
                    request=request,
                    preparation=preparation,
                    absent=target.absent,
                    estimates=estimates,
                    study=study,
                    progress=progress,
                    workers=count_workers(target, request.workers),
                    started_s=started_s,
                    clock=clock,
                ).run()
            search = _Search(
                request=request,
                preparation=preparation,
                estimates=estimates,
                study=study,
                progress=progress,
                surroundings=surroundings_of(target),
                workers=count_workers(target, request.workers),
                started_s=started_s,
                clock=clock,
            )
            return search.run()


def _limit_bytes(target: Target, found: Attachment) -> int:
    """What a program can have: what the compiler says, unless the user's own file says less."""
    limit, absent = found.device_memory_bytes, target.absent
    if absent is None or not absent.is_memory_stated:
        return limit
    return min(limit, absent.device_memory_bytes) if limit else absent.device_memory_bytes


def _scope_of(request: SearchRequest, target: Target, preparation: Preparation) -> Scope:
    """What the search may take over from a study, and try."""
    workers, absent, aim = count_workers(target, request.workers), target.absent, preparation.aim
    speeds = absent and find_speeds(
        absent.fabric, platform=aim.platform, device_kind=aim.device_kind, environ=os.environ
    )
    return Scope(
        plans=frozenset(preparation.plans),
        timeout_s=request.timeout_s,
        worker_bytes=request.memory_limit_bytes or memory_share_bytes(workers),
        speeds=speeds.origin if speeds is not None else "",
    )


def read_result(study: Path | None, *, results: Path, storage: str) -> SearchResult:
    """Reads what a study holds, without running anything.

    Raises:
      UsageError: there is no such study, or it cannot be read.
    """
    with reading(study, results=results, storage=storage) as (_, opened, header):
        return assemble(opened, header)


@dataclass(slots=True, kw_only=True)
class _Search:
    request: SearchRequest
    preparation: Preparation
    estimates: Estimates
    study: Study
    progress: Progress
    surroundings: Surroundings
    workers: int
    started_s: float
    clock: Callable[[], float]
    _contest: Contest = field(init=False)
    _compiled: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _wanted: list[Plan] = field(init=False, default_factory=list[Plan])

    def run(self) -> SearchResult:
        header = header_of(self.request, self.preparation, self.estimates, self.study)
        self._contest = contest_of(self.preparation, self.estimates.found, self.request.top)
        notebook = Notebook(
            study=self.study, source_hash=header.source_hash, versions=header.versions
        )
        self.study.compile.adopt_expired()
        notebook.note_header(header)
        write_estimates(self.estimates, self.preparation.folder / ESTIMATES)
        interrupted, ending = False, ""
        try:
            ending = self._climb(notebook)
        except KeyboardInterrupt:
            # Whatever is in flight is given back when the study closes; the table shows the rest.
            interrupted = True
        footer = self._footer(header, notebook, interrupted=interrupted, ending=ending)
        notebook.note_footer(footer)
        result = assemble(self.study, header)
        if result.verifications and self.request.rules and not interrupted:
            path = save_rule(result, Path(self.request.rules))
            notebook.note_footer(replace(footer, rules_path=as_seen(path)))
            result = assemble(self.study, header)
        write_csv(result, self.preparation.folder / "trials.csv")
        return result

    def _climb(self, notebook: Notebook) -> str:
        budget_s = self.request.budget_s
        left = max(LEAST_COMPILE_SHARE, 1 - MEASURE_S / budget_s)
        self._compile_first(notebook, self.started_s + min(COMPILE_SHARE, left) * budget_s)
        measured = outcomes_of(notebook, self.study.measure)
        # Another pool: what is measured has the cores and the memory of the machine to itself.
        with self._open_pool(1) as pool:
            rung = MeasureRung(
                preparation=self.preparation,
                study=self.study,
                notebook=notebook,
                pool=LivePool(pool=pool, study=self.study, progress=self.progress),
                progress=self.progress,
                compiled=self._compiled,
                finalists=self._contest.finalists(self._compiled, measured),
                challenge=lambda done, until_s: self._challenge(notebook, done, until_s),
                budget_s=budget_s,
                deadline_s=self.started_s + budget_s,
                rules=VisitRules(timeout_s=self.request.timeout_s),
                clock=self.clock,
            )
            try:
                return rung.run()
            except LeaseLost:
                return (
                    "this search was silent for so long that another one has taken over; "
                    "run the same command to see what it found"
                )

    def _compile_first(self, notebook: Notebook, deadline_s: float) -> None:
        """Compiles the most promising plans until there are enough programs for a race."""
        measured = outcomes_of(notebook, self.study.measure)
        self._compiled |= self._judged(outcomes_of(notebook, self.study.compile))
        wanted = COMPILES_PER_FINALIST * self.request.top
        while True:
            chosen = self._contest.to_compile(self._compiled, measured, wanted=wanted)
            is_all = len(chosen) == len(self._wanted)
            self._compile(notebook, chosen, deadline_s)
            finalists = self._contest.finalists(self._compiled, measured)
            first = (*self.preparation.baseline, *self.preparation.promised)
            others = [plan for plan in finalists if plan not in first]
            late = self.clock() >= deadline_s
            if is_all or late or len(others) >= self.request.top:
                return
            wanted += self.request.top

    def _challenge(
        self, notebook: Notebook, measured: Mapping[Plan, Outcome], until_s: float
    ) -> Sequence[Plan]:
        """Compiles plans that may still win; gives as many of them as a race has room for."""
        likely = self._contest.challengers(self._compiled, measured)[: self.request.top]
        if likely:
            half_s = self.clock() + (until_s - self.clock()) / 2
            self._compile(notebook, [*self._wanted, *likely], half_s)
        return self._contest.raceable(likely, self._compiled, measured)

    def _compile(self, notebook: Notebook, plans: Sequence[Plan], deadline_s: float) -> None:
        self._wanted = list(dict.fromkeys(plans))
        if all(plan in self._compiled for plan in self._wanted):
            return
        view = self._contest.view(self._compiled, outcomes_of(notebook, self.study.measure))
        with self._open_pool(self.workers) as pool:
            done = CompileRung(
                preparation=self.preparation,
                notebook=notebook,
                study=self.study,
                rung=self.study.compile,
                compiling=CompilingHere(preparation=self.preparation),
                pool=pool,
                progress=self.progress,
                choose=lambda _: self._wanted,
                order=lambda plans, done: self._contest.order(plans, view, done),
                estimates=self.estimates.found,
                workers=self.workers,
                deadline_s=deadline_s,
                clock=self.clock,
            ).run()
        self._compiled |= self._judged(done)

    def _judged(self, outcomes: Mapping[Plan, Outcome]) -> dict[Plan, Outcome]:
        return {plan: self.preparation.room.judged(one) for plan, one in outcomes.items()}

    def _open_pool(self, size: int) -> Pool:
        return Pool(
            size=size,
            surroundings=self.surroundings,
            log_dir=self.preparation.folder / "logs",
            memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(size),
            on_wait=self.progress.tick,
        )

    def _footer(
        self, header: Header, notebook: Notebook, *, interrupted: bool, ending: str
    ) -> Footer:
        result = assemble(self.study, header)
        decision = notebook.decision()
        compiled = self._judged(outcomes_of(notebook, self.study.compile))
        measured = outcomes_of(notebook, self.study.measure)
        view = ("", "")
        if decision is not None:
            measured |= dict(decision.confirmed)
            best_s = dict(decision.confirmed)[decision.winner].step_s
            known = (compiled, measured, best_s)
            view = (self._contest.certificate(*known), self._contest.belief(*known))
        reason = "interrupted"
        if not interrupted:
            if not ending:  # Nothing was left to measure: the last race says how it came to this.
                ending = decision.sentence if decision else "there was nothing left to measure"
            raced = "the most promising were raced: " if result.verifications else ""
            reason = f"{self._extent(result)}; {raced}{ending}"
        return Footer(
            stop_reason=reason,
            rules_path="",
            interrupted=interrupted,
            certificate=view[0],
            belief=view[1],
        )

    def _extent(self, result: SearchResult) -> str:
        if not result.funnel.waiting:
            return "every legal plan was compiled"
        if all(plan in self._compiled for plan in self._wanted):
            return "the plans that promised most were compiled"
        return f"{spent(self.request.budget_s)} before all promising plans were compiled"
