"""What `--json` prints: the whole result as plain JSON values.

Schema 1. Names carry their units (`_s` seconds, `_bytes`); a figure that is not finite or not
known is null. Keys are only ever added within a schema number.

    schema, workload, target, device, device_count, axes, made, versions {name: text}, interrupted
    best        {plan, evidence, step_s, speedup, speedup_interval, is_tie, most_faster, bracket_s,
                exposed_s, mfu} or null; the speedup is over the script's own mesh, from fresh
                processes, null where nothing was confirmed; most_faster is the share by which no
                measured plan is faster, null where that is not bounded; bracket_s, exposed_s and
                mfu are predicted, null where nothing was replayed
    baseline    text of the script's own plan or null
    candidates  best first, failures last:
                {plan, mesh, axes {name: {ici, dcn}}, mapping {logical axis: mesh axis, list of
                them or null}, knobs, compiler_options, evidence, is_baseline, standing, outcome,
                compiled, estimated, partly_counted, bound_by, peak_bytes, reason};
                partly_counted: its time leaves out work that others' times have;
                evidence is measured, compiled, estimated or none; reason says why it is not in the
                ranking
    funnel      counts; `ruled_out` [{rule, count}]
    reference, verifications, stop_reason, notices, details, made_up, tokens_per_step, study,
    results_dir, rules_path, command, speeds, certificate, belief
    findings    what costs memory or time and was not asked for: {rule, title, why, plans, best};
                `plans` have it, of which `best` is first in the ranking; `automesh lint` says
                where, and what would mend it
    device_memory_bytes, reserve_bytes
                what a program could use of one device, and what of it plans leave free, or null
    split       of a script without `build`, axes of its mesh that are several, or null
    not_searched
                of such a script, what it does besides its jitted step, or null
    data_by_mesh
                says that its step takes other amounts of data on other meshes, or null
    template, best_command
                of a search by a command: the template, and the command of the best plan, or null
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automesh import jsonio
from automesh.mesh.axes import Plan
from automesh.mesh.mapping import LogicalMapping
from automesh.outcomes import Compiled, Estimated, Outcome
from automesh.report import words
from automesh.report.comparison import Comparison, Verification
from automesh.report.findings import RULES
from automesh.report.predicted import exposed_s, replay_of
from automesh.report.result import Candidate, Funnel, SearchResult
from automesh.texts.storage_url import masked

SCHEMA = 1


def facts_of(result: SearchResult) -> dict[str, Any]:
    """Returns the result as plain values; see the module."""
    baseline = words.baseline_of(result)
    return {
        "schema": SCHEMA,
        "workload": result.facts.searched.workload,
        "target": result.facts.devices.target,
        "device": result.facts.devices.kind,
        "device_count": result.facts.devices.count,
        "axes": list(result.facts.searched.axes),
        "made": result.footer.made,
        "versions": dict(result.facts.provenance.versions),
        "interrupted": result.footer.interrupted,
        "best": _best(result),
        "baseline": str(baseline.plan) if baseline else None,
        "candidates": [_candidate(candidate) for candidate in result.candidates],
        "funnel": _funnel(result.funnel),
        "reference": result.reference,
        "verifications": [_verification(one) for one in result.verifications],
        "stop_reason": result.footer.stop_reason,
        "notices": list(result.notices),
        "details": list(result.facts.details),
        "made_up": list(result.facts.searched.made_up),
        "tokens_per_step": result.facts.searched.tokens_per_step or None,
        "study": masked(result.facts.provenance.location),
        "results_dir": result.facts.provenance.results_dir,
        "rules_path": result.footer.rules_path or None,
        "command": masked(result.command),
        "speeds": result.facts.provenance.speeds or None,
        "certificate": result.footer.certificate or None,
        "belief": result.footer.belief or None,
        "findings": _findings(result.candidates),
        "device_memory_bytes": result.facts.devices.memory_bytes or None,
        "reserve_bytes": result.facts.devices.reserve_bytes or None,
        "split": result.facts.searched.split or None,
        "not_searched": result.facts.searched.not_searched or None,
        "data_by_mesh": result.facts.searched.data_by_mesh or None,
        "template": result.facts.searched.template or None,
        "best_command": result.best_command or None,
    }


def _best(result: SearchResult) -> dict[str, Any] | None:
    best = words.best_of(result)
    if best is None:
        return None
    verification = result.verifications[-1] if result.verifications else None
    has_gain = verification is not None and words.baseline_of(result) is not None
    replay = replay_of(best.outcome)
    return {
        "plan": str(best.plan),
        "evidence": words.evidence(best),
        "step_s": words.step_s(best),
        "speedup": verification.speedup if verification and has_gain else None,
        "speedup_interval": list(verification.speedup_interval)
        if verification and has_gain
        else None,
        "is_tie": verification.is_tie if verification and has_gain else None,
        "most_faster": verification.most_faster[0]
        if verification and verification.most_faster
        else None,
        "bracket_s": list(replay.bracket_s) if replay else None,
        "exposed_s": exposed_s(replay) if replay else None,
        "mfu": replay.mfu or None if replay else None,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    compiled = words.compiled_of(candidate)
    return {
        "plan": str(candidate.plan),
        **_plan(candidate.plan),
        "evidence": words.evidence(candidate),
        "is_baseline": candidate.is_baseline,
        "standing": _standing(candidate.standing),
        "outcome": jsonio.to_json(candidate.outcome, Outcome),
        "compiled": jsonio.to_json(compiled, Compiled) if compiled else None,
        "estimated": jsonio.to_json(candidate.estimated, Estimated)
        if candidate.estimated
        else None,
        "partly_counted": candidate.partly_counted,
        "bound_by": candidate.bound_by or None,
        "peak_bytes": candidate.peak_bytes or None,
        "reason": words.reason(candidate) or None,
    }


def _standing(one: Comparison) -> dict[str, Any]:
    return {
        "verdict": one.verdict,
        "ratio": one.ratio,
        "interval": list(one.interval),
        "step_s": one.step_s,
        "more_s": one.more_s,
    }


def _verification(one: Verification) -> dict[str, Any]:
    return {
        "processes": one.processes,
        "baseline": one.baseline,
        "speedup": one.speedup,
        "speedup_interval": list(one.speedup_interval),
        "is_tie": one.is_tie,
        "most_faster": list(one.most_faster),
    }


def _findings(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Lists findings by rule, those of the best plans first."""
    plans: dict[str, list[Plan]] = {}
    for candidate in candidates:
        for rule in candidate.estimated.findings if candidate.estimated else ():
            plans.setdefault(rule, []).append(candidate.plan)
    return [
        {
            "rule": rule,
            "title": RULES[rule].title if rule in RULES else rule,
            "why": RULES[rule].why if rule in RULES else None,
            "plans": len(having),
            "best": str(having[0]),
        }
        for rule, having in plans.items()
    ]


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "mesh": plan.mesh,
        "axes": {axis.name: {"ici": axis.ici, "dcn": axis.dcn} for axis in plan.axes},
        "mapping": dict(LogicalMapping(plan.mapping)),
        "knobs": dict(plan.knobs),
        "compiler_options": dict(plan.compiler_options),
    }


def _funnel(funnel: Funnel) -> dict[str, Any]:
    data: dict[str, Any] = jsonio.to_json(funnel, Funnel)
    data["ruled_out"] = [{"rule": rule, "count": count} for rule, count in funnel.ruled_out]
    return data
