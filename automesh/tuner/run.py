"""One search from its request to its result: prepares, compiles, measures, writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import Target
from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.hardware.fabric.discover import fabric_of
from automesh.launch.cluster import lent_workers, workers_of
from automesh.program.nouns import Attachment
from automesh.report.estimates import COMPILED_FIRST, ESTIMATES, Estimates
from automesh.report.files.csv import write_estimates
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.so_far import SETTLED_ROWS
from automesh.report.words import is_ranked
from automesh.space.space import SearchSpace
from automesh.tuner.choose.affordable import short_budget_notice
from automesh.tuner.choose.prior_rule import promised_plans
from automesh.tuner.context import SearchContext
from automesh.tuner.estimated import (
    NOT_BUILT,
    RankingKeeper,
    keep_ranking,
    with_estimates,
)
from automesh.tuner.paths import check_places, make_study_folder
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.carried import check_winner, with_starts
from automesh.tuner.session import BUILD_SHARE, Session, open_session
from automesh.tuner.strategies.absent import AbsentStrategy, ready_for
from automesh.tuner.strategies.attached import AttachedStrategy
from automesh.tuner.strategies.search_run import SearchRun, Strategy
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.freshness import settled
from automesh.tuner.study.metadata import header_of, notebook_of, read_header, reading
from automesh.tuner.study.scope import Scope
from automesh.tuner.study.study import Study, open_study, parse_storage
from automesh.tuner.workers import NEEDED_BYTES, count_workers, memory_share_bytes, surroundings_of
from automesh.worker.executables import executables_folder

ESTIMATE_SHARE = 0.2  # of the budget, from its beginning; the next rung gets the rest
REST_SHARE = 0.5  # of what is left of it behind the first compiles, if plans were left for then


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
      UsageError: the input is wrong.
      NoFeasibleMesh: no plan is legal, or jax can lay out none of them.
    """
    rules_before = check_places(request)
    # First of all: without its compiler, a search for absent devices has no result.
    found = ready_for(request, target, progress) if target.absent else None
    with (
        workers_of(request, target, progress) as start_worker,
        lent_workers(request, target, progress, needed_bytes=NEEDED_BYTES) as lender,
        ExitStack() as stack,
        ExitStack() as workers,
    ):
        # The time in which hosts are waited for does not count; earlier runs of the script do.
        started_s = clock() - request.used_s
        session = workers.enter_context(
            open_session(
                request,
                target,
                space,
                progress,
                clock=clock,
                start_worker=start_worker,
                limit_bytes=0 if found is None else _limit_bytes(target, found),
            )
        )
        preparation, legal = session.preparation, session.legal
        if target.absent is None and request.entry.capture is None:
            took_s = clock() - started_s
            left_s = request.budget_s - took_s
            told = short_budget_notice(request.entry, start_s=took_s, left_s=left_s, used_s=took_s)
            if told:
                progress.notice(told)
        if target.absent is None:
            promised, notices = promised_plans(request, preparation, legal)
            legal = replace(legal, promised=promised)
            for notice in notices:
                progress.notice(notice)
        make_study_folder(preparation.folder)
        with open_study(
            parse_storage(request.storage, preparation.folder),
            preparation.name,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
            scope=_scope_of(request, target, preparation, legal),
        ) as study:
            preparation, legal = settled(
                request, target, preparation, legal, study, progress, clock, start_worker
            )
            session = session.counting(preparation, legal)
            keep = RankingKeeper(
                request=request, target=target, preparation=preparation, legal=legal, study=study
            )
            # The rest is estimated behind the first compiles, where the first plans are settled.
            estimates = session.estimate(
                share=ESTIMATE_SHARE,
                pulse=study.heartbeat,
                may_stop=True,
                keep=keep,
                until_settled=target.absent is not None and request.top <= SETTLED_ROWS,
            )
            estimated = estimates
            if not estimates.is_interrupted:
                legal, estimates = _built(session, estimates, study)
            if estimates.is_interrupted:
                return _stopped(keep, estimates)
            has_rest = COMPILED_FIRST in estimates.missing.values()
            if not has_rest:
                workers.close()  # Frees the workers' memory for those that compile.
            cache_dir = None
            if target.absent is None:
                cache_dir = stack.enter_context(
                    executables_folder(preparation.folder, os.environ, progress.notice)
                )

            def climbed(estimates: Estimates, *, is_first: bool) -> SearchResult:
                header = header_of(
                    request,
                    preparation,
                    legal,
                    study,
                    estimates=estimates,
                    is_ahead=target.absent is not None,
                )
                context = SearchContext(
                    request=request,
                    preparation=preparation,
                    legal=legal,
                    estimates=estimates,
                    study=study,
                    notebook=notebook_of(study, header),
                    progress=progress,
                    workers=min(
                        lender.room() if lender else count_workers(target, request.workers),
                        len(legal.plans),
                    ),
                    started_s=started_s,
                    clock=clock,
                    start_worker=start_worker,
                    lender=lender,
                    cache_dir=cache_dir,
                )
                strategy = strategy_for(context, target, is_first_only=is_first)
                write_estimates(estimates, preparation.folder / ESTIMATES)
                keep_ranking(header, estimates, study)
                result = SearchRun(
                    study=study,
                    header=header,
                    notebook=context.notebook,
                    rungs=(study.screen, study.compile) if target.absent else (study.compile,),
                    rules="" if is_first else request.rules,
                    rules_before=rules_before,
                    folder=preparation.folder,
                    check_winner=lambda plan: check_winner(request, target, plan, progress),
                    with_starts=lambda header: with_starts(header, request.entry),
                ).run(strategy)
                return with_estimates(result, study, header)

            result = climbed(estimates, is_first=has_rest)
            if not has_rest or result.footer.interrupted:
                return result
            session = session.counting(preparation, legal)
            rest = session.estimate(
                share=max(started_s + request.budget_s - clock(), 0.0)
                * REST_SHARE
                / request.budget_s,
                pulse=study.heartbeat,
                may_stop=True,
            )
            refusals = estimates.notices[len(estimated.notices) :]
            rest = replace(
                rest,
                refused=estimates.refused,
                data_by_mesh=estimates.data_by_mesh,
                notices=(*rest.notices, *refusals),
            )
            if rest.is_interrupted:
                return _stopped(keep, rest)
            workers.close()
            return climbed(rest, is_first=False)


def _built(session: Session, estimates: Estimates, study: Study) -> tuple[LegalPlans, Estimates]:
    """Returns the plans and the estimates without those that cannot be built; after Ctrl-C all."""
    try:
        return session.rule_out(estimates, share=BUILD_SHARE, pulse=study.heartbeat)
    except KeyboardInterrupt:
        notices = (*estimates.notices, NOT_BUILT)
        return session.legal, replace(estimates, is_interrupted=True, notices=notices)


def _stopped(keep: RankingKeeper, estimates: Estimates) -> SearchResult:
    """Returns the result of a search that was stopped before it compiled anything: the ranking by
    estimates, unless the study has results of an earlier search."""
    answer = keep.ranked(keep.legal, estimates, stop_reason="")
    header = read_header(keep.study)
    held = None if header is None else assemble(keep.study, header)
    if held is None or not any(map(is_ranked, held.candidates)):
        return answer
    reason = answer.footer.stop_reason
    return replace(held, footer=replace(held.footer, stop_reason=reason, interrupted=True))


def strategy_for(
    context: SearchContext, target: Target, *, is_first_only: bool = False
) -> Strategy:
    """Returns the strategy by which the search for a target spends its budget.

    Args:
      is_first_only: see `AbsentStrategy`.

    Raises:
      NoFeasibleMesh: jax can lay out none of the meshes.
    """
    if target.absent is not None:
        return AbsentStrategy(search=context, absent=target.absent, is_first_only=is_first_only)
    return AttachedStrategy(search=context, surroundings=surroundings_of(target))


def _limit_bytes(target: Target, found: Attachment) -> int:
    """Returns the memory that a program can use: from the compiler, or less if the user's own file
    says so."""
    limit, absent = found.device_memory_bytes, target.absent
    if absent is None or not absent.is_memory_stated:
        return limit
    return min(limit, absent.device_memory_bytes) if limit else absent.device_memory_bytes


def _scope_of(
    request: SearchRequest, target: Target, preparation: Preparation, legal: LegalPlans
) -> Scope:
    """Returns which trials of a study the search may use, and which plans it may try."""
    workers = count_workers(target, request.workers)
    return Scope(
        plans=frozenset(legal.plans),
        timeout_s=request.timeout_s,
        worker_bytes=request.memory_limit_bytes or memory_share_bytes(workers),
        speeds=_replay_speeds(target, preparation),
    )


def _replay_speeds(target: Target, preparation: Preparation) -> str:
    """Returns a phrase about the speeds with which schedules are replayed; empty where none are."""
    try:
        fabric = fabric_of(target, preparation.inspection.devices)
    except UsageError:  # The estimates report this error.
        return ""
    if fabric.kind == "shared":
        return ""
    aim = preparation.aim
    return find_speeds(
        fabric, platform=aim.platform, device_kind=aim.device_kind, environ=os.environ
    ).origin


def read_result(study: Path | None, *, results: Path, storage: str) -> SearchResult:
    """Reads the result in a study, without running anything.

    Raises:
      UsageError: there is no such study, or it cannot be read.
    """
    with reading(study, results=results, storage=storage) as (_, opened, header):
        return with_estimates(assemble(opened, header), opened, header)
