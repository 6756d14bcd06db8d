"""Makes the beginning of a result from a study's header, for every kind of search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automesh.report.result import Candidate, Footer, Funnel, SearchResult
from automesh.tuner.measure.decision import Decision
from automesh.tuner.study.metadata import Header


def result_of(header: Header, candidates: Sequence[Candidate], funnel: Funnel) -> SearchResult:
    """Makes the result of a search that has not ended."""
    facts = header.facts
    # A script whose shardings are inferred has no mesh of its own.
    is_scripts = not facts.searched.arguments
    return SearchResult(
        facts=facts,
        candidates=tuple(replace(one, is_scripts=is_scripts) for one in candidates),
        funnel=funnel,
        notices=facts.notices,
        command=facts.provenance.command,
        is_ahead=facts.devices.are_absent,
    )


def nothing_tried(header: Header) -> Funnel:
    """Makes the funnel of a dry run: all legal plans wait."""
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
    """Returns the result with the decision, and with how its last search ended."""
    footer = result.footer if footer is None else footer
    if decision is None:
        return replace(result, footer=footer)
    return replace(
        result,
        verifications=(decision.verification,),
        footer=replace(footer, made=decision.made),
    )
