"""The winner of a search as a rule, evidence included, merged into the user's file."""

from __future__ import annotations

from pathlib import Path

from automesh.errors import NoFeasibleMesh
from automesh.hardware import chip_for
from automesh.mesh.config import MeshConfig, Rules
from automesh.mesh.evidence import ENVIRONMENT_PREFIXES, Evidence, RunnerUp
from automesh.mesh.rules import MeshRule, rule_for
from automesh.mesh.rules_file import merge_rule
from automesh.outcomes import Measured
from automesh.results.result import Candidate, SearchResult
from automesh.results.words import best_of, funnel_sentence, reason

# The names that rule files and presets use for axes that split the batch.
BATCH_AXES = ("dp", "fsdp")


def rule_of(result: SearchResult) -> MeshRule:
    """The rule that a search has earned.

    Raises:
      NoFeasibleMesh: nothing was measured, agreed with the reference and was confirmed.
    """
    best = best_of(result)
    if best is None or not isinstance(best.outcome, Measured) or not best.outcome.confirmed:
        raise NoFeasibleMesh(_why_none(result), hint=_what_to_do(result))
    return rule_for(
        best.plan, selector=result.target, evidence=_evidence(result, best, best.outcome)
    )


def config_of(result: SearchResult) -> MeshConfig:
    """The winner as a `MeshConfig`.

    Raises:
      NoFeasibleMesh: as `rule_of`.
    """
    rules = Rules(axes=result.axes, batch_axes=_batch_axes(result), rules=(rule_of(result),))
    return rules.select(result.target)


def save_rule(result: SearchResult, path: Path) -> Path:
    """Merges the rule into a file and returns its path.

    Raises:
      NoFeasibleMesh: as `rule_of`.
      UsageError: the file is broken or cannot be written; it is left as it was.
    """
    merge_rule(
        path,
        rule_of(result),
        selector=result.target,
        axes=result.axes,
        batch_axes=_batch_axes(result),
    )
    return path


def _batch_axes(result: SearchResult) -> tuple[str, ...]:
    return tuple(axis for axis in result.axes if axis in BATCH_AXES)


def _evidence(result: SearchResult, best: Candidate, measured: Measured) -> Evidence:
    funnel = result.funnel
    tried = {
        "enumerated": funnel.enumerated,
        "ruled_out": funnel.enumerated - funnel.legal,
        "compiled": funnel.compiled + funnel.duplicates,
        "measured": funnel.measured,
    }
    variables = [pair for pair in result.versions if pair[0].startswith(ENVIRONMENT_PREFIXES)]
    return Evidence(
        kind="measured",
        step_s=measured.step_s,
        interval_s=measured.interval_s,
        hbm_bytes=best.peak_bytes,
        mfu=_mfu(result, best, measured.step_s),
        runner_up=_runner_up(result, best),
        tried=tuple(tried.items()),
        study=Path(result.results_dir).name,
        made=result.made,
        values=measured.values,
        reference=result.reference,
        versions=tuple(pair for pair in result.versions if pair not in variables),
        environment=tuple(variables),
    )


def _mfu(result: SearchResult, best: Candidate, step_s: float) -> float:
    """FLOPs of the compiled step over the chip's peak; 0 where the peak is a stand-in."""
    chip = chip_for(result.device, result.platform)
    if chip.rough or best.compiled is None:
        return 0.0
    return best.compiled.counts.flops / (step_s * chip.flops_per_s)


def _runner_up(result: SearchResult, best: Candidate) -> RunnerUp:
    others = [
        one
        for one in result.candidates
        if one.plan != best.plan and one.standing.verdict in ("tie", "slower")
    ]
    if not others:
        return RunnerUp()
    second = min(others, key=lambda one: one.standing.ratio)
    return RunnerUp(plan=str(second.plan), slower=second.standing.ratio)


def _why_none(result: SearchResult) -> str:
    if not result.candidates:
        return "no plan was tried"
    measured = [one for one in result.candidates if isinstance(one.outcome, Measured)]
    excluded = [one for one in measured if one.standing.verdict == "excluded"]
    if excluded and len(excluded) == len(measured):
        return f"none of the measured plans may be exported: {reason(excluded[0])}"
    if measured:
        return "nothing was measured to the end and confirmed"
    return f"no plan could be measured: {funnel_sentence(result.funnel)}"


def _what_to_do(result: SearchResult) -> str:
    if result.reference.startswith("none"):
        return "name a mesh that is known to train with --baseline: its losses are the reference"
    if result.funnel.waiting or result.interrupted:
        return "run the same command again to go on, or give it more --budget"
    return f"`automesh show {result.results_dir}` lists the reasons; the logs are beside it"
