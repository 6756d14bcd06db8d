"""A study's trials and notes as one result: what `search` and `show` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from automesh.hardware import chip_for
from automesh.mesh.axes import Plan
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Failure,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from automesh.report.result import Candidate, Funnel, SearchResult
from automesh.report.words import count
from automesh.tuner.choose.ranking import rank, rank_ahead
from automesh.tuner.command.results import assemble_command
from automesh.tuner.measure.seen_once import StoredVisits, seen_once
from automesh.tuner.study.freshness import changed_versions
from automesh.tuner.study.metadata import Header, Notebook, notebook_of
from automesh.tuner.study.results import result_of, with_ending
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import Study, Trial


def assemble(study: Study, header: Header) -> SearchResult:
    """Reads all that a study has on the script and versions of its header, as a result."""
    if header.facts.searched.template:
        return assemble_command(study, header)
    notebook = notebook_of(study, header)
    judged = header.device_memory.judged
    compiled = {plan: judged(one) for plan, one in outcomes_of(notebook, study.compile).items()}
    measured = outcomes_of(notebook, study.measure)
    screened: dict[Plan, Outcome] = {}
    decision, footer = notebook.decision(), notebook.footer()
    if decision is not None:
        measured |= {**dict(decision.confirmed), **dict(decision.failed)}
    if header.facts.devices.are_absent:
        screened |= {plan: judged(one) for plan, one in outcomes_of(notebook, study.screen).items()}
        candidates = rank_ahead(
            compiled=compiled,
            screened=screened,
            estimates=_estimates(notebook, study.screen) | _estimates(notebook, study.compile),
            baseline=header.baseline,
        )
    else:
        comparisons = () if decision is None else decision.comparisons
        winner = () if decision is None else (decision.winner,)
        visits: StoredVisits | None = notebook.read("visits", StoredVisits)
        if visits is not None:
            once, compared = seen_once(visits, compiled, measured, winner=winner)
            comparisons = (*comparisons, *compared)
            measured |= once
            if decision is not None and compared:
                # A visit bounds no ratio, so nobody knows how much faster a visited plan may be.
                bounds = replace(decision.verification, most_faster=())
                decision = replace(decision, verification=bounds)
        candidates = rank(
            compiled=compiled,
            measured=measured,
            comparisons=comparisons,
            baseline=header.baseline,
            chip=chip_for(header.facts.devices.kind, header.facts.devices.platform),
            winner=winner,
            estimates=_estimates(notebook, study.compile),
        )
    found = result_of(
        header, candidates, _funnel(header, candidates, screened | compiled, measured)
    )
    return replace(
        with_ending(found, decision, footer),
        reference=notebook.reference(),
        notices=(*header.facts.notices, *_notices_of_stale(notebook), *study.skipped.notices()),
    )


def _notices_of_stale(notebook: Notebook) -> tuple[str, ...]:
    """Returns sentences about trials that are kept for other searches than this one."""
    mine = (notebook.source_hash, notebook.versions)
    counts = Counter(
        _other(trial, notebook) if not trial.matches(*mine) else "other search spaces"
        for trial in notebook.study.compile.trials()
        if not trial.matches(*mine) or not notebook.tells_of(trial.plan)
    )
    return tuple(
        f"{count(number, 'trial', 'trials')} of {what} kept, not ranked"
        for what, number in sorted(counts.items())
    )


def _other(trial: Trial, notebook: Notebook) -> str:
    changed = changed_versions(trial.versions, notebook.versions)
    if not changed:
        return "an older script"
    more = f" and {len(changed) - 1} more" if changed[1:] else ""
    return f"other versions ({next(iter(changed))}{more})"


def outcomes_of(notebook: Notebook, rung: Rung) -> dict[Plan, Outcome]:
    """Returns how the plans of a rung ended, for the script and the versions as they are now."""
    return {
        trial.plan: trial.outcome
        for trial in rung.trials()
        if trial.outcome is not None and notebook.is_current(trial)
    }


def _estimates(notebook: Notebook, rung: Rung) -> dict[Plan, Estimated]:
    return {
        trial.plan: trial.estimated
        for trial in rung.trials()
        if trial.estimated is not None and notebook.is_current(trial)
    }


def _funnel(
    header: Header,
    candidates: Sequence[Candidate],
    compiled: Mapping[Plan, Outcome],
    measured: Mapping[Plan, Outcome],
) -> Funnel:
    """Counts the plans; `compiled` has those of any compile effort."""
    screened = [one for one in compiled.values() if _is_low(one)]
    compiled = {plan: one for plan, one in compiled.items() if not _is_low(one)}
    kinds = Counter(type(outcome) for outcome in compiled.values())
    duplicates = sum(
        1 for outcome in compiled.values() if isinstance(outcome, Compiled) and outcome.same_as
    )
    waiting = max(header.plans - len(compiled), 0)
    went_further = sum(
        1
        for candidate in candidates
        if candidate.estimated is not None or _is_low(candidate.compiled)
    )
    told = {one.plan for one in candidates if one.estimated is not None}
    refused_here = sum(
        isinstance(one, Failed) and one.stage in ("build", "lower") and plan not in told
        for plan, one in compiled.items()
    )
    estimated = min(max(header.estimated - went_further, 0), waiting)
    return Funnel(
        enumerated=header.enumerated,
        ruled_out=header.ruled_out,
        legal=header.plans,
        compiled=kinds[Compiled] - duplicates,
        duplicates=duplicates,
        out_of_memory=kinds[OutOfMemory],
        failed=kinds[Failed],
        timed_out=kinds[TimedOut],
        waiting=waiting,
        measured=sum(1 for outcome in measured.values() if isinstance(outcome, Measured)),
        estimated=estimated,
        screened=len(screened),
        # Those that were to be compiled all the same have failed.
        refused=min(
            max(header.refused - refused_here, 0), max(waiting - len(screened) - estimated, 0)
        ),
        failed_in_run=sum(1 for one in measured.values() if isinstance(one, Failure)),
    )


def _is_low(outcome: Outcome | None) -> bool:
    """Whether a plan was compiled at low effort alone."""
    return isinstance(outcome, Compiled) and outcome.effort == "low"
