"""What a search notes at its start, and how it says that its time is over."""

from __future__ import annotations

from automesh.report.estimates import Estimates
from automesh.tuner.paths import as_seen
from automesh.tuner.preparation import Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.session import notices_of
from automesh.tuner.study.identity import workload_name
from automesh.tuner.study.metadata import Header
from automesh.tuner.study.study import Study
from automesh.units import format_wait


def header_of(
    request: SearchRequest,
    preparation: Preparation,
    estimates: Estimates,
    study: Study,
    *,
    is_ahead: bool = False,
) -> Header:
    """What a search knows before anything is compiled.

    Args:
      is_ahead: the devices are not here.
    """
    enumeration, inspection = preparation.enumeration, preparation.inspection
    extra = len(preparation.plans) - len(enumeration.legal)  # a baseline outside of the space
    return Header(
        workload=workload_name(request.entry),
        target=preparation.selector,
        platform=preparation.aim.platform,
        device_kind=preparation.aim.device_kind,
        device_count=preparation.aim.num_devices,
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        enumerated=enumeration.num_plans + extra,
        plans=len(preparation.plans),
        ruled_out=tuple((one.rule, one.count) for one in enumeration.rejections),
        baseline=preparation.baseline,
        notices=notices_of(preparation, estimates),
        details=estimates.details,
        made_up=inspection.made_up,
        tokens_per_step=inspection.tokens_per_step,
        location=study.storage.text
        if study.storage.kind == "server"
        else as_seen(study.storage.location),
        results_dir=as_seen(preparation.folder),
        command=request.command,
        source_hash=preparation.source_hash,
        versions=preparation.provenance,
        speeds=estimates.origin,
        estimated=len(estimates.found),
        fabric=estimates.fabric,
        is_ahead=is_ahead,
        room=preparation.room,
        axis_types=preparation.axis_types,
        batch_axes=preparation.batch_axes,
        split=preparation.split,
        outside=_outside(preparation, study, is_ahead=is_ahead),
    )


def _outside(preparation: Preparation, study: Study, *, is_ahead: bool) -> tuple[str, ...]:
    """Plans that were searched here before, for this script, and are not legal now."""
    mine = (preparation.source_hash, preparation.provenance)
    legal = frozenset(preparation.plans)
    rungs = [study.compile, study.measure, *([study.screen] if is_ahead else [])]
    known = dict.fromkeys(
        trial.plan for rung in rungs for trial in rung.trials() if trial.matches(*mine)
    )
    return tuple(str(plan) for plan in known if plan not in legal)


def spent(budget_s: float) -> str:
    """`the budget of 10 min was spent`."""
    text = format_wait(budget_s) if budget_s >= 120 else f"{budget_s:.0f} s"
    return f"the budget of {text} was spent"
