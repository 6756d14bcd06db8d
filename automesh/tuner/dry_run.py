"""A search that stops after the estimates: nothing is compiled or measured.

It leaves the study with the shardings that were propagated, which the search itself takes up, and
all estimates as a table of comma-separated values.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from automesh.hardware import Target
from automesh.report.estimates import ESTIMATES, Estimates
from automesh.report.files.csv import write_estimates
from automesh.report.progress import Progress
from automesh.report.result import Funnel, SearchResult
from automesh.report.words import count
from automesh.space.space import SearchSpace
from automesh.tuner.choose.ranking import WIDE, estimated_candidates, hardly_fits
from automesh.tuner.paths import check_places, make_folder
from automesh.tuner.preparation import Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import BUILD_SHARE, looking
from automesh.tuner.study.freshness import settled
from automesh.tuner.study.metadata import Header, Notebook, header_of
from automesh.tuner.study.study import open_study, parse_storage
from automesh.units import format_bytes


def estimate_only(
    request: SearchRequest, target: Target, space: SearchSpace, progress: Progress
) -> SearchResult:
    """Estimates every legal plan.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    check_places(request)
    with looking(request, target, space, progress) as look:
        preparation = look.preparation
        make_folder(preparation.folder)
        with open_study(
            parse_storage(request.storage, preparation.folder),
            preparation.name,
            source_hash=preparation.source_hash,
            versions=preparation.provenance,
        ) as study:
            look = look.counting(
                settled(request, target, preparation, study, progress, time.monotonic)
            )
            preparation = look.preparation
            estimates = look.estimate(share=1.0, pulse=study.heartbeat)
            preparation, estimates = look.rule_out(
                estimates, share=BUILD_SHARE, pulse=study.heartbeat
            )
            whole = replace(request, command=request.command.replace(" --dry-run", "", 1))
            header = header_of(
                whole, preparation, estimates, study, is_ahead=target.absent is not None
            )
            Notebook(
                study=study, source_hash=header.source_hash, versions=header.versions
            ).note_header(header)
        write_estimates(estimates, preparation.folder / ESTIMATES)
        return _result(header, preparation, estimates)


def _result(header: Header, preparation: Preparation, estimates: Estimates) -> SearchResult:
    enumeration, inspection = preparation.enumeration, preparation.inspection
    plans = preparation.plans
    large = sum(
        hardly_fits(one, preparation.device_memory_bytes) for one in estimates.found.values()
    )
    return SearchResult(
        workload=header.workload,
        target=preparation.selector,
        platform=preparation.aim.platform,
        device=preparation.aim.device_kind,
        device_count=preparation.aim.num_devices,
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        axis_types=preparation.axis_types,
        batch_axes=preparation.batch_axes,
        candidates=estimated_candidates(
            estimates.found,
            baseline=preparation.baseline,
            device_memory_bytes=preparation.device_memory_bytes,
        ),
        funnel=Funnel(
            enumerated=enumeration.num_plans + len(plans) - len(enumeration.legal),
            ruled_out=tuple((one.rule, one.count) for one in enumeration.rejections),
            legal=len(plans),
            compiled=0,
            duplicates=0,
            out_of_memory=0,
            failed=0,
            timed_out=0,
            waiting=len(plans),
            measured=0,
            estimated=len(estimates.found),
        ),
        reference="",
        verifications=(),
        stop_reason="dry run: nothing was compiled or measured",
        details=header.details,
        made_up=header.made_up,
        notices=(*header.notices, *_large_notice(large, preparation)),
        tokens_per_step=inspection.tokens_per_step,
        study=header.location,
        results_dir=header.results_dir,
        rules_path="",
        command=header.command,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=preparation.provenance,
        speeds=estimates.origin,
        split=preparation.split,
    )


def _large_notice(large: int, preparation: Preparation) -> tuple[str, ...]:
    if not large:
        return ()
    return (
        f"{count(large, 'plan')} ranked last: estimated to need more than {WIDE:g} times the "
        f"{format_bytes(preparation.device_memory_bytes)} of a device",
    )
