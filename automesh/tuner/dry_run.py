"""A search that stops after the estimates: nothing is compiled or measured.

It leaves the study with the propagated shardings, which a later search uses, and a CSV file with
all estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from automesh.hardware import Target
from automesh.launch.cluster import workers_of
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.space.space import SearchSpace
from automesh.tuner.estimated import INTERRUPTED, NOT_BUILT, RankingKeeper
from automesh.tuner.paths import check_places, make_study_folder
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import BUILD_SHARE, open_session
from automesh.tuner.study.freshness import settled
from automesh.tuner.study.study import load_tools, open_study, parse_storage

_DRY_RUN = "dry run: nothing was compiled or measured"


def estimate_only(
    request: SearchRequest, target: Target, space: SearchSpace, progress: Progress
) -> SearchResult:
    """Estimates every legal plan; after Ctrl-C returns the estimates until then.

    Raises:
      UsageError: the input is wrong.
      NoFeasibleMesh: no plan is legal.
      KeyboardInterrupt: Ctrl-C was pressed before anything was estimated.
    """
    check_places(request)
    answers: list[SearchResult] = []
    try:
        _estimate(request, target, space, progress, answers.append)
    except KeyboardInterrupt:
        if not answers:
            raise
        # Pressed while workers were ended or the study was closed: the estimates are complete.
        answer = answers[-1]
        footer = replace(answer.footer, stop_reason=INTERRUPTED, interrupted=True)
        return replace(answer, footer=footer)
    return answers[-1]


def _estimate(
    request: SearchRequest,
    target: Target,
    space: SearchSpace,
    progress: Progress,
    answer: Callable[[SearchResult], object],
) -> None:
    """Calls `answer` with the result as soon as it exists, since the rest may be interrupted."""
    with (
        workers_of(request, target, progress) as start_worker,
        open_session(
            request, target, space, progress, start_worker=start_worker, meanwhile=load_tools
        ) as session,
    ):
        preparation = session.preparation
        make_study_folder(preparation.folder)
        with open_study(
            parse_storage(request.storage, preparation.folder),
            preparation.name,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
        ) as study:
            preparation, legal = settled(
                request,
                target,
                preparation,
                session.legal,
                study,
                progress,
                time.monotonic,
                start_worker,
            )
            session = session.counting(preparation, legal)
            keep = RankingKeeper(
                request=request, target=target, preparation=preparation, legal=legal, study=study
            )
            estimates = session.estimate(share=1.0, pulse=study.heartbeat, may_stop=True, keep=keep)
            try:
                if not estimates.is_interrupted:
                    legal, estimates = session.rule_out(
                        estimates, share=BUILD_SHARE, pulse=study.heartbeat
                    )
            except KeyboardInterrupt:
                # The table is complete, but not all of its plans were built.
                notices = (*estimates.notices, NOT_BUILT)
                estimates = replace(estimates, is_interrupted=True, notices=notices)
            # Ctrl-C may be pressed while the answer is made; a second one ends that.
            with suppress(KeyboardInterrupt):
                answer(keep.ranked(legal, estimates, stop_reason=_DRY_RUN))
                return
            estimates = replace(estimates, is_interrupted=True)
            answer(keep.ranked(legal, estimates, stop_reason=_DRY_RUN))
