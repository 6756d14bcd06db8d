"""A study's trials and notes as one result: what `search` and `show` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from automesh.hardware import chip_for
from automesh.mesh.axes import Plan
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from automesh.report.result import Candidate, Funnel, SearchResult
from automesh.report.words import count
from automesh.tuner.choose.ranking import rank, rank_ahead
from automesh.tuner.command.results import assemble_command
from automesh.tuner.measure.decision import Decision
from automesh.tuner.study.freshness import changed_versions
from automesh.tuner.study.metadata import Footer, Header, Notebook, batch_axes_of
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import Study, Trial


def assemble(study: Study, header: Header) -> SearchResult:
    """Reads everything that a study knows for the script and versions of its header."""
    if header.template:
        return assemble_command(study, header)
    notebook = Notebook(
        study=study,
        source_hash=header.source_hash,
        versions=header.versions,
        outside=frozenset(header.outside),
    )
    judged = header.room.judged
    compiled = {plan: judged(one) for plan, one in outcomes_of(notebook, study.compile).items()}
    measured = outcomes_of(notebook, study.measure)
    screened: dict[Plan, Outcome] = {}
    decision, footer = notebook.decision(), notebook.footer()
    if decision is not None:
        measured |= {**dict(decision.confirmed), **dict(decision.failed)}
    if header.is_ahead:
        screened |= {plan: judged(one) for plan, one in outcomes_of(notebook, study.screen).items()}
        candidates = rank_ahead(
            compiled=compiled,
            screened=screened,
            estimates=_estimates(notebook, study.screen) | _estimates(notebook, study.compile),
            baseline=header.baseline,
        )
    else:
        candidates = rank(
            compiled=compiled,
            measured=measured,
            comparisons=() if decision is None else decision.comparisons,
            baseline=header.baseline,
            chip=chip_for(header.device_kind, header.platform),
            winner=() if decision is None else (decision.winner,),
            estimates=_estimates(notebook, study.compile),
        )
    notices = [*header.notices, *_notices_of_stale(notebook)]
    return SearchResult(
        workload=header.workload,
        target=header.target,
        platform=header.platform,
        device=header.device_kind,
        device_count=header.device_count,
        axes=header.axes,
        axis_types=header.axis_types,
        batch_axes=batch_axes_of(header),
        candidates=candidates,
        funnel=_funnel(header, candidates, screened | compiled, measured),
        reference=notebook.reference(),
        verifications=() if decision is None else (decision.verification,),
        stop_reason="the search has not ended yet" if footer is None else footer.stop_reason,
        notices=tuple(notices),
        details=header.details,
        made_up=header.made_up,
        tokens_per_step=header.tokens_per_step,
        study=header.location,
        results_dir=header.results_dir,
        rules_path="" if footer is None else footer.rules_path,
        command=header.command,
        made=_made(decision, footer),
        versions=header.versions,
        interrupted=footer is not None and footer.interrupted,
        speeds=header.speeds,
        certificate="" if footer is None else footer.certificate,
        belief="" if footer is None else footer.belief,
        is_ahead=header.is_ahead,
        split=header.split,
        device_memory_bytes=header.room.limit_bytes,
        reserve_bytes=header.room.reserve_bytes,
    )


def _notices_of_stale(notebook: Notebook) -> tuple[str, ...]:
    """What is said of trials that are kept for searches other than this."""
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


def _made(decision: Decision | None, footer: Footer | None) -> str:
    if decision is not None:
        return decision.made
    return "" if footer is None else footer.made


def outcomes_of(notebook: Notebook, rung: Rung) -> dict[Plan, Outcome]:
    """What became of the plans of a rung, for the script and the versions as they are now."""
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
    """Counts the plans; `compiled` at any effort."""
    screened = [one for one in compiled.values() if _is_low(one)]
    compiled = {plan: one for plan, one in compiled.items() if not _is_low(one)}
    kinds = Counter(type(outcome) for outcome in compiled.values())
    duplicates = sum(
        1 for outcome in compiled.values() if isinstance(outcome, Compiled) and outcome.same_as
    )
    waiting = max(header.plans - len(compiled), 0)
    went_further = sum(
        1 for one in candidates if one.estimated is not None or _is_low(one.compiled)
    )
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
        estimated=min(max(header.estimated - went_further, 0), waiting),
        screened=len(screened),
    )


def _is_low(outcome: Outcome | None) -> bool:
    """Whether a plan was compiled at low effort alone."""
    return isinstance(outcome, Compiled) and outcome.effort == "low"
