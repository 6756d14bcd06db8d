"""A search that stops after the estimates: nothing is compiled, measured or written."""

from __future__ import annotations

from datetime import UTC, datetime

from automesh.hardware import Target
from automesh.ladder.identity import workload_name
from automesh.ladder.looking import looking, notices_of
from automesh.ladder.preparation import Preparation
from automesh.ladder.ranking import WIDE, estimated_candidates, hardly_fits
from automesh.ladder.request import SearchRequest
from automesh.results.estimates import Estimates
from automesh.results.progress import Progress
from automesh.results.result import Funnel, SearchResult
from automesh.results.words import count
from automesh.space.space import SearchSpace
from automesh.units import format_bytes


def estimate_only(
    request: SearchRequest, target: Target, space: SearchSpace, progress: Progress
) -> SearchResult:
    """Estimates every legal plan.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    with looking(request, target, space, progress) as look:
        return _result(request, look.preparation, look.estimate(share=1.0))


def _result(request: SearchRequest, preparation: Preparation, estimates: Estimates) -> SearchResult:
    enumeration, inspection = preparation.enumeration, preparation.inspection
    plans = preparation.plans
    large = sum(
        hardly_fits(one, preparation.device_memory_bytes) for one in estimates.found.values()
    )
    return SearchResult(
        workload=workload_name(request.entry),
        target=preparation.selector,
        platform=preparation.aim.platform,
        device=preparation.aim.device_kind,
        device_count=preparation.aim.num_devices,
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
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
        notices=(*notices_of(preparation, estimates), *_large_notice(large, preparation)),
        tokens_per_step=inspection.tokens_per_step,
        study="",
        results_dir="",
        rules_path="",
        command="",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=preparation.provenance,
        speeds=estimates.origin,
    )


def _large_notice(large: int, preparation: Preparation) -> tuple[str, ...]:
    if not large:
        return ()
    return (
        f"{count(large, 'plan')} ranked last: estimated to need more than {WIDE:g} times the "
        f"{format_bytes(preparation.device_memory_bytes)} of a device",
    )
