"""A search that stops after the estimates: nothing is compiled or measured.

It leaves the study with the shardings that were propagated, which the search itself takes up, and
all estimates as a table of comma-separated values.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from automesh.hardware import Target
from automesh.launch.cluster import workers_of
from automesh.report.estimates import ESTIMATES, Estimates
from automesh.report.files.csv import write_estimates
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.words import count
from automesh.space.space import SearchSpace
from automesh.tuner.choose.ranking import WIDE, estimated_candidates, hardly_fits
from automesh.tuner.paths import check_places, make_study_folder
from automesh.tuner.preparation import Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.script.carried import with_starts
from automesh.tuner.session import BUILD_SHARE, open_session
from automesh.tuner.study.freshness import settled
from automesh.tuner.study.metadata import Header, header_of, notebook_of
from automesh.tuner.study.results import nothing_tried, result_of
from automesh.tuner.study.study import load_tools, open_study, parse_storage
from automesh.units import format_bytes

_DRY_RUN = "dry run: nothing was compiled or measured"
NOT_BUILT = "whether the step can be built on the meshes that are listed is not known yet"


def estimate_only(
    request: SearchRequest, target: Target, space: SearchSpace, progress: Progress
) -> SearchResult:
    """Estimates every legal plan.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    check_places(request)
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
            session = session.counting(
                settled(request, target, preparation, study, progress, time.monotonic, start_worker)
            )
            preparation = session.preparation
            estimates = session.estimate(share=1.0, pulse=study.heartbeat, may_stop=True)
            try:
                if not estimates.is_interrupted:
                    preparation, estimates = session.rule_out(
                        estimates, share=BUILD_SHARE, pulse=study.heartbeat
                    )
            except KeyboardInterrupt:
                # The table is there: what is not known yet is whether the step builds everywhere.
                estimates = replace(
                    estimates,
                    is_interrupted=True,
                    notices=(*estimates.notices, NOT_BUILT),
                )
            again = request.again and request.again.without("dry-run")
            whole = replace(request, again=again)
            header = header_of(
                whole, preparation, estimates, study, is_ahead=target.absent is not None
            )
            header = with_starts(header, request.entry)
            notebook_of(study, header).note_header(header)
        write_estimates(estimates, preparation.folder / ESTIMATES)
        return _result(header, preparation, estimates)


def _result(header: Header, preparation: Preparation, estimates: Estimates) -> SearchResult:
    limit_bytes = preparation.device_memory_bytes
    large = sum(hardly_fits(one, limit_bytes) for one in estimates.found.values())
    candidates = estimated_candidates(
        estimates.found, baseline=preparation.baseline, device_memory_bytes=limit_bytes
    )
    return replace(
        result_of(header, candidates, nothing_tried(header)),
        stop_reason="interrupted" if estimates.is_interrupted else _DRY_RUN,
        interrupted=estimates.is_interrupted,
        notices=(*header.notices, *_large_notice(large, preparation)),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        is_ahead=False,
        device_memory_bytes=0,
        reserve_bytes=0,
    )


def _large_notice(large: int, preparation: Preparation) -> tuple[str, ...]:
    if not large:
        return ()
    return (
        f"{count(large, 'plan')} ranked last: estimated to need more than {WIDE:g} times the "
        f"{format_bytes(preparation.device_memory_bytes)} of a device",
    )
