"""The winner of a search as a rule, evidence included, merged into the user's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from automesh.errors import NoFeasibleMesh
from automesh.hardware import chip_for
from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.evidence import ENVIRONMENT_PREFIXES, NO_FACTS, Evidence, ProgramFacts, RunnerUp
from automesh.mesh.rules.file import format_rules, merge_rule, rules_of
from automesh.mesh.rules.rule import MeshRule, rule_for
from automesh.mesh.rules.shardings import NO_SHARDINGS
from automesh.outcomes import (
    Compiled,
    Estimated,
    Measured,
    OutOfMemory,
    ReplayOutcome,
    is_unsteady,
    open_ended,
)
from automesh.platforms import COMPILED_ABSENT
from automesh.program.infer.search.layout import shardings_of
from automesh.report.check.facts import facts_of
from automesh.report.comparison import COMPARED
from automesh.report.predicted import exposed_s, stage_bytes
from automesh.report.result import Candidate, SearchResult
from automesh.report.words import best_of, funnel_sentence, is_duplicate, reason
from automesh.texts.terminal import clean
from automesh.units import format_bytes, format_seconds

Pairs = tuple[tuple[str, str], ...]


def rule_of(result: SearchResult) -> MeshRule:
    """Makes the rule of the best plan of a search.

    Raises:
      NoFeasibleMesh: nothing was measured, agreed with the reference and was confirmed; or, for
        devices that are not here, nothing was compiled that fits.
    """
    best = best_of(result)
    evidence = None if best is None else _evidence(result, best)
    if best is None or evidence is None:
        raise NoFeasibleMesh(_why_none(result), hint=_what_to_do(result))
    return rule_for(
        best.plan,
        selector=result.facts.devices.target,
        evidence=evidence,
        axis_types=result.facts.searched.axis_types,
        batch_axes=result.facts.searched.batch_axes,
        shardings=shardings_of(result.facts.searched.arguments, best.plan)
        if result.facts.searched.arguments
        else NO_SHARDINGS,
    )


def estimated_rule_of(result: SearchResult, *, within_bytes: int) -> MeshRule:
    """Returns the rule of a dry run, which says that it is estimated: no compiler has seen its
    plan.

    Args:
      within_bytes: of a device; plans that are estimated to need more are passed over.

    Raises:
      NoFeasibleMesh: no plan has an estimate within that.
    """
    fitting = [
        (candidate.plan, candidate.outcome)
        for candidate in result.candidates
        if isinstance(candidate.outcome, Estimated)
        and candidate.outcome.memory_bytes <= within_bytes
    ]
    if not fitting:
        raise NoFeasibleMesh(
            f"no plan is estimated to need at most {format_bytes(within_bytes)} on a device",
            hint="search for more devices, or let the space try what saves memory",
        )
    versions, variables = _versions(result)
    funnel = result.funnel
    (plan, outcome), *others = fitting
    return rule_for(
        plan,
        selector=result.facts.devices.target,
        evidence=Evidence(
            kind="estimated",
            step_s=outcome.step_s,
            hbm_bytes=outcome.memory_bytes,
            uncounted=_uncounted(outcome.uncounted),
            findings=outcome.findings,
            runner_up=RunnerUp(plan=str(others[0][0]), slower=others[0][1].step_s / outcome.step_s)
            if others
            else RunnerUp(),
            tried=(
                ("enumerated", funnel.enumerated),
                ("ruled_out", funnel.enumerated - funnel.legal),
                ("estimated", funnel.estimated),
            ),
            study=Path(result.facts.provenance.results_dir).name,
            not_searched=result.facts.searched.not_searched,
            made=result.footer.made,
            versions=versions,
            environment=variables,
        ),
        axis_types=result.facts.searched.axis_types,
        batch_axes=result.facts.searched.batch_axes,
        shardings=shardings_of(result.facts.searched.arguments, plan)
        if result.facts.searched.arguments
        else NO_SHARDINGS,
    )


def rule_text(result: SearchResult) -> str:
    """Returns the rule as the text of a new rule file.

    Raises:
      NoFeasibleMesh: as `rule_of`.
    """
    return format_rules(rules_of(rule_of(result)))


def has_rule(result: SearchResult) -> bool:
    """Whether a search has found enough for a rule; see `rule_of`."""
    best = best_of(result)
    return best is not None and _evidence(result, best) is not None


def config_of(result: SearchResult) -> MeshConfig:
    """Returns the winner as a `MeshConfig`.

    Raises:
      NoFeasibleMesh: as `rule_of`.
    """
    return Rules(axes=result.facts.searched.axes, rules=(rule_of(result),)).select(
        result.facts.devices.target
    )


def save_rule(
    result: SearchResult, path: Path, *, before: Sequence[MeshRule] | None = None
) -> Path:
    """Merges the rule into a file and returns its path.

    Args:
      before: as in `merge_rule`.

    Raises:
      NoFeasibleMesh: as `rule_of`.
      RuleEdited: as `merge_rule`.
      UsageError: the file is broken or cannot be written; it is left as it was.
    """
    merge_rule(path, rule_of(result), selector=result.facts.devices.target, before=before)
    return path


def _evidence(result: SearchResult, best: Candidate) -> Evidence | None:
    """Returns the evidence for the best plan; None if it does not suffice for a rule."""
    versions, variables = _versions(result)
    funnel = result.funnel
    tried = {"enumerated": funnel.enumerated, "ruled_out": funnel.enumerated - funnel.legal}
    compiled = {"compiled": funnel.compiled + funnel.duplicates}
    evidence = Evidence(
        kind="none",
        hbm_bytes=best.peak_bytes,
        stage_bytes=stage_bytes(best),
        split=result.facts.searched.split,
        not_searched=result.facts.searched.not_searched,
        program=_program(best),
        findings=best.estimated.findings if best.estimated else (),
        runner_up=_runner_up(result, best),
        study=Path(result.facts.provenance.results_dir).name,
        made=result.footer.made,
        versions=versions,
        environment=variables,
    )
    match best.outcome:
        case Measured(confirmed=True) as measured if not is_unsteady(measured):
            tried |= ({} if result.facts.searched.template else compiled) | {
                "measured": funnel.measured
            }
            return replace(
                evidence,
                kind="measured",
                step_s=measured.step_s,
                interval_s=measured.interval_s,
                mfu=_mfu(result, best, measured.step_s),
                tried=tuple(tried.items()),
                values=measured.values,
                reference=result.reference,
                command=result.facts.searched.template,
            )
        case Compiled(effort="default", replay=ReplayOutcome() as replay) if result.is_ahead:
            tried |= {"out_of_memory": funnel.out_of_memory} | compiled
            return replace(
                evidence,
                kind="compiled",
                step_s=replay.step_s,
                bracket_s=replay.bracket_s,
                exposed_s=exposed_s(replay),
                reserve_bytes=result.facts.devices.reserve_bytes,
                mfu=replay.mfu,
                tried=tuple(tried.items()),
                uncounted=_uncounted((*best.outcome.counts.uncounted, *replay.uncounted)),
            )
        case _:
            return None


def _uncounted(said: Sequence[str]) -> tuple[str, ...]:
    """Lists, as a rule has it, operations whose time is unknown."""
    return tuple(clean(text) for text in sorted(open_ended(said)))


def _program(best: Candidate) -> ProgramFacts:
    compiled = best.outcome if isinstance(best.outcome, Compiled) else best.compiled
    is_whole = compiled is not None and compiled.effort == "default"
    return facts_of(compiled) if compiled is not None and is_whole else NO_FACTS


def _versions(result: SearchResult) -> tuple[Pairs, Pairs]:
    """Returns the versions of the packages that made the program, and the environment of that run.

    The environment consists of the variables that `Rules.select` compares: jax's settings belong to
    the script, and the seed of hashes to the search's workers.
    """
    variables = tuple(
        pair
        for pair in result.facts.provenance.versions
        if pair[0].startswith(ENVIRONMENT_PREFIXES)
    )
    # Packages that compile for another platform are nothing that this rule depends on.
    others = [
        one.package_prefix for one in COMPILED_ABSENT if one.name != result.facts.devices.platform
    ]
    versions = tuple(
        pair
        for pair in result.facts.provenance.versions
        # Packages are written in small letters, variables in capitals.
        if pair not in variables and not pair[0].isupper() and not pair[0].startswith(tuple(others))
    )
    return versions, variables


def _mfu(result: SearchResult, best: Candidate, step_s: float) -> float:
    """Returns the FLOPs of the compiled step over the chip's peak; 0 if the peak is not its own."""
    chip = chip_for(result.facts.devices.kind, result.facts.devices.platform)
    if chip.rough or best.compiled is None:
        return 0.0
    return best.compiled.counts.flops / (step_s * chip.flops_per_s)


def _runner_up(result: SearchResult, best: Candidate) -> RunnerUp:
    kind = type(best.outcome)
    others = [
        candidate
        for candidate in result.candidates
        if candidate.plan != best.plan
        and (
            candidate.standing.verdict in COMPARED
            or (
                result.is_ahead
                and isinstance(candidate.outcome, kind)
                and not is_duplicate(candidate)
            )
        )
    ]
    if not others:
        return RunnerUp()
    second = min(others, key=lambda other: other.standing.ratio)
    return RunnerUp(plan=str(second.plan), slower=second.standing.ratio)


def _why_none(result: SearchResult) -> str:
    if not result.candidates:
        return "no plan was tried"
    measured = [
        candidate for candidate in result.candidates if isinstance(candidate.outcome, Measured)
    ]
    excluded = [one for one in measured if one.standing.verdict == "excluded"]
    if excluded and len(excluded) == len(measured):
        return f"none of the measured plans may be exported: {reason(excluded[0])}"
    if unsteady := _unsteady(result):
        return f"undecided: {unsteady}"
    if measured:
        return "nothing was measured to the end and confirmed"
    if result.is_ahead:
        return f"no plan was compiled that fits: {funnel_sentence(result.funnel)}{_least(result)}"
    return f"no plan could be measured: {funnel_sentence(result.funnel)}"


def _unsteady(result: SearchResult) -> str:
    """Says that the processes of the best plan disagree too much for a rule; empty if not."""
    best = best_of(result)
    outcome = best.outcome if best is not None else None
    if best is None or not isinstance(outcome, Measured):
        return ""
    if not outcome.confirmed or not is_unsteady(outcome):
        return ""
    fastest, slowest = map(format_seconds, (min(outcome.rounds_s), max(outcome.rounds_s)))
    return (
        f"{best.plan} took {fastest} in one process and {slowest} in another, so that its time is "
        "not known well enough for a rule"
    )


def _least(result: SearchResult) -> str:
    """Says what the smallest of the plans needs that are too large."""
    outcomes = [candidate.outcome for candidate in result.candidates]
    refused = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, OutOfMemory)
        and outcome.limit_bytes == result.facts.devices.memory_bytes
    ]
    if not refused:
        return ""
    least = min(one.needed_bytes for one in refused)
    limit = format_bytes(result.facts.devices.memory_bytes)
    return f"; the smallest of these needs {format_bytes(least)} of {limit}"


def _what_to_do(result: SearchResult) -> str:
    if result.is_ahead and result.funnel.out_of_memory:
        return (
            "search for more devices, or let the space try what saves memory (remat, microbatches)"
        )
    if result.reference.startswith("none"):
        return "name a mesh that is known to train with --baseline: its losses are the reference"
    if _unsteady(result):
        return "leave the machine to the search and run the same command again: it goes on"
    is_begun = any(isinstance(one.outcome, Measured) for one in result.candidates)
    is_open = is_begun and best_of(result) is not None
    if result.funnel.waiting or result.footer.interrupted or is_open:
        return "run the same command again to go on, or give it more --budget"
    folder = result.facts.provenance.results_dir
    return f"`automesh show {folder}` lists the reasons; the logs are beside it"
