"""What a study's header says, as the beginning of a result: every kind of search reports so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automesh.report.result import NOT_ENDED, Candidate, Funnel, SearchResult
from automesh.report.search_command import text_of
from automesh.tuner.measure.decision import Decision
from automesh.tuner.study.metadata import Footer, Header, batch_axes_of


def result_of(header: Header, candidates: Sequence[Candidate], funnel: Funnel) -> SearchResult:
    """The result of a search that has not ended."""
    return SearchResult(
        workload=header.workload,
        target=header.target,
        platform=header.platform,
        device=header.device_kind,
        device_count=header.device_count,
        axes=header.axes,
        axis_types=header.axis_types,
        batch_axes=batch_axes_of(header),
        # A script whose shardings are inferred has no mesh of its own.
        candidates=tuple(replace(one, is_scripts=not header.arguments) for one in candidates),
        funnel=funnel,
        reference="",
        verifications=(),
        stop_reason=NOT_ENDED,
        notices=header.notices,
        details=header.details,
        made_up=header.made_up,
        tokens_per_step=header.tokens_per_step,
        study=header.location,
        results_dir=header.results_dir,
        rules_path="",
        command=text_of(header.again),
        made="",
        versions=header.versions,
        speeds=header.speeds,
        is_ahead=header.is_ahead,
        split=header.split,
        not_searched=header.not_searched,
        device_memory_bytes=header.device_memory.limit_bytes,
        reserve_bytes=header.device_memory.reserve_bytes,
        template=header.template,
        arguments=header.arguments,
    )


def nothing_tried(header: Header) -> Funnel:
    """The funnel of a dry run: all legal plans wait."""
    return Funnel(
        enumerated=header.enumerated,
        ruled_out=header.ruled_out,
        legal=header.plans,
        compiled=0,
        duplicates=0,
        out_of_memory=0,
        failed=0,
        timed_out=0,
        waiting=header.plans,
        measured=0,
        estimated=header.estimated,
        refused=header.refused,
    )


def with_ending(
    result: SearchResult, decision: Decision | None, footer: Footer | None
) -> SearchResult:
    """The result with what was decided, and with how its last search ended."""
    if footer is not None:
        result = replace(
            result,
            stop_reason=footer.stop_reason,
            rules_path=footer.rules_path,
            interrupted=footer.interrupted,
            certificate=footer.certificate,
            belief=footer.belief,
            made=footer.made,
        )
    if decision is not None:
        result = replace(result, verifications=(decision.verification,), made=decision.made)
    return result
