"""The output of `explain --json`.

Schema 1. Names carry their units (`_s` seconds, `_bytes`); a figure that is not finite or not known
is null. Keys are only ever added within a schema number.

    schema, workload, target, device, device_count, speeds, study, notices
    why         the sentence: for one mesh where its time goes, for two why one wins
    one         {plan, mesh, why, failure, links, step_s {estimated, bracket, bound, compiled,
                measured, measured_interval}, replay {step_s, bracket_s, causes, communication_s,
                busy_s, mfu, uncounted} or null, causes [{cause, seconds, share}],
                reasons [{reason, axes,
                seconds, source}], collectives [{kind, axes, source, array, region, in_loop, runs,
                payload_bytes, device_bytes, sent_bytes, latency_s, ici_s, dcn_s, seconds,
                granules}], flops, memory_traffic_bytes, memory {estimated_bytes, argument_bytes,
                output_bytes, alias_bytes, temporary_bytes, peak_source, compiled_bytes,
                measured_bytes},
                uncounted [{what, why, source}], findings [{rule, array, axes, source, bytes, count,
                what, why, cure}]: what costs memory or time and was not asked for}
    against     the same for the other mesh, or null
    changes     null without it, else {causes [{cause, one_s, against_s}], collectives [{kind, axes,
                source, region, change, one_s, against_s}]}; `change` is appears, vanishes, grows,
                shrinks or same, seen from `one`

`links` says for each axis along which physical dimensions of a torus it lies; empty elsewhere.

Bytes of collectives are those of one run. `payload_bytes` is the full array of one group of
devices, `device_bytes` what one device holds of it before or after the run, whichever is more, and
`sent_bytes` what one device sends. The table and the sentences show `device_bytes`.

Seconds of causes and reasons are what remains of them in the estimated step; those of collectives
are as if nothing else ran at the same time. All are estimated, except those called compiled or
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automesh import jsonio
from automesh.cost.breakdown import CollectiveCost, MeshCost
from automesh.cost.comparison import Share, compare_causes, compare_collectives, shares_of
from automesh.cost.terms import Finding, value_of
from automesh.outcomes import ReplayOutcome
from automesh.report.explain.nouns import Explained, Explanation
from automesh.report.explain.words import verdict_sentence, why_sentence
from automesh.report.findings import RULES

SCHEMA = 1


def facts_of(explanation: Explanation) -> dict[str, Any]:
    """Returns the explanation as plain values; see the module."""
    one, against = explanation.one, explanation.against
    return {
        "schema": SCHEMA,
        "workload": explanation.workload,
        "target": explanation.target,
        "device": explanation.device,
        "device_count": explanation.device_count,
        "speeds": explanation.speeds,
        "study": explanation.study or None,
        "notices": list(explanation.notices),
        "why": verdict_sentence(explanation) if against else why_sentence(one),
        "one": facts_of_one(one),
        "against": facts_of_one(against) if against else None,
        "changes": _changes(one, against) if against else None,
    }


def facts_of_one(one: Explained) -> dict[str, Any]:
    """Returns one side of an explanation as plain values; see the module."""
    total = one.estimated.step_s
    return {
        "plan": str(one.plan),
        "mesh": one.plan.mesh,
        "why": why_sentence(one),
        "failure": one.failure or None,
        "links": list(one.placement),
        "step_s": _step(one),
        "causes": [
            {"cause": cause, "seconds": seconds, "share": seconds / total}
            for cause, seconds in one.estimated.causes
            if total > 0
        ],
        "replay": jsonio.to_json(one.replay, ReplayOutcome) if one.replay else None,
        "reasons": [_share(share) for share in shares_of(one.cost, one.estimated)],
        "collectives": [_collective(each) for each in one.cost.collectives],
        "flops": one.cost.flops,
        "memory_traffic_bytes": one.cost.memory_traffic_bytes,
        "host_bytes": one.cost.host_bytes,
        "memory": _memory(one),
        "uncounted": [
            {"what": missing.what, "why": missing.why, "source": missing.source or None}
            for missing in one.cost.uncounted
        ],
        "findings": [_finding(found, dict(one.cost.sizes)) for found in one.cost.findings],
    }


def _finding(found: Finding, sizes: Mapping[str, int]) -> dict[str, Any]:
    words = RULES[found.rule]
    return {
        "rule": found.rule,
        "array": found.array,
        "axes": list(found.axes),
        "source": found.source or None,
        "bytes": value_of(found.bytes, sizes),
        "count": value_of(found.count, sizes),
        "what": words.what(found, sizes),
        "why": words.why,
        "cure": words.cure(found),
    }


def _step(one: Explained) -> dict[str, Any]:
    estimated, measured = one.estimated, one.measured
    return {
        "estimated": estimated.step_s,
        "bracket": list(estimated.bracket_s),
        "bound": estimated.bound_s or None,
        "compiled": one.compiled.step_s if one.compiled else None,
        "measured": measured.step_s if measured else None,
        "measured_interval": list(measured.interval_s) if measured else None,
    }


def _share(share: Share) -> dict[str, Any]:
    piece = share.collective or share.kernel or share.copy
    return {
        "reason": share.reason,
        "axes": list(share.axes),
        "seconds": share.seconds,
        "source": piece.source or None if piece else None,
    }


def _collective(one: CollectiveCost) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": list(one.axes),
        "source": one.source or None,
        "array": one.operand or None,
        "region": one.region,
        "in_loop": one.in_loop,
        "runs": one.count,
        "payload_bytes": one.payload_bytes,
        "device_bytes": one.device_bytes,
        "sent_bytes": one.sent_bytes,
        "latency_s": one.latency_s,
        "ici_s": one.ici_s,
        "dcn_s": one.dcn_s,
        "seconds": one.seconds,
        "granules": one.granules,
    }


def _memory(one: Explained) -> dict[str, Any]:
    cost: MeshCost = one.cost
    return {
        "estimated_bytes": one.estimated.memory_bytes,
        "argument_bytes": cost.argument_bytes,
        "output_bytes": cost.output_bytes,
        "alias_bytes": cost.alias_bytes,
        "temporary_bytes": cost.peak_temporary_bytes,
        "peak_source": cost.peak_source or None,
        "compiled_bytes": one.compiled.memory.peak_bytes if one.compiled else None,
        "measured_bytes": one.measured.peak_bytes or None if one.measured else None,
    }


def _changes(one: Explained, against: Explained) -> dict[str, Any]:
    causes = compare_causes(one.estimated, against.estimated)
    collectives = compare_collectives(one.cost, against.cost)
    return {
        "causes": [
            {
                "cause": change.cause,
                "one_s": change.first_s,
                "against_s": change.second_s,
            }
            for change in causes
        ],
        "collectives": [
            {
                "kind": change.shown.kind,
                "axes": list(change.shown.axes),
                "source": change.shown.source or None,
                "region": change.shown.region,
                "change": change.change,
                "one_s": change.first_s,
                "against_s": change.second_s,
            }
            for change in collectives
        ],
    }
