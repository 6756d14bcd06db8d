"""The page's content as one document of plain JSON values: what the code of the page renders.

Schema 1. Names carry their units (`_s` seconds, `_bytes`); what is not known is null. Keys are only
ever added within a schema number. All texts are plain: the page never reads one as HTML.

    schema, title, workload, target, device, device_count, made, interrupted
    verdict     {label, sentence, undecided, evidence, is_exported, plan, baseline, step_s,
                step_text, half, bracket, speedup, speedup_interval, is_tie, memory, peak_bytes};
                the speedup is over the script's own plan: from fresh processes where it has an
                interval, else predicted
    rule        {text, path, missing}: the rule file, or why there is no rule
    summary     [[label, sentence]] as `automesh show --verbose` prints it
    versions    {name: text}
    memory      {limit_bytes, reserve_bytes} or null each
    plans       {columns, rows}: see `plan_rows`
    causes      [{plan, evidence, cause, seconds}] of the plans that are shown stacked
    funnel      {steps [{step, count}], lost [{reason, step, count}]}
    predictions {basis, known, factor, rows [{plan, predicted_s, known_s, residual}]} or null
    explained   [{... as one side of `explain --json`, collectives_left_out {count, seconds},
                points [{source, bytes}]}]
    verdicts    {"0,1": sentence}
    rounds      [{number, where, plan, step_s}]
    timelines   [{plan, kind, step_s, tracks, slices [[track, start_s, seconds, name, cause, kind,
                source]], left_out, held [{rank, at_s, bytes}]}]
    wiring      {...} or null; placements [{plan, axes, devices, granule, place}]
    left_out    {section: sentence}
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from automesh import jsonio
from automesh.cost.replay.timeline import Slice
from automesh.errors import NoFeasibleMesh
from automesh.outcomes import Compiled, Estimated, Measured, OutOfMemory
from automesh.report import words
from automesh.report.blocks.json import finite
from automesh.report.comparison import EXPORTED
from automesh.report.explain.json import facts_of_one
from automesh.report.files.rule import has_rule, rule_text
from automesh.report.html.nouns import DrawnTimeline, EstimatedPlan, Placed, StudyPage, Wiring
from automesh.report.predicted import exposed_s, memory_sentence, replay_of
from automesh.report.result import Candidate, SearchResult
from automesh.report.table import summary
from automesh.texts.terminal import clean, clean_lines
from automesh.units import format_seconds

SCHEMA = 1
MOST_STACKED = 24
"""Plans whose causes are shown stacked: more bars than that are not read."""
MOST_COLLECTIVES = 80
"""Most collectives of one plan that are listed; the others are counted and summed."""
MOST_SLICES = 3000
"""Most slices of one timeline: more are slow to draw, so the shortest are left out."""

COLUMNS = (
    *("plan", "mesh", "settings", "rank", "evidence", "verdict", "is_baseline"),
    *("step_s", "low_s", "high_s", "half", "ratio", "ratio_low", "ratio_high", "versus"),
    *("peak_bytes", "peak_kind", "bound_by", "estimated_s", "compiled_s", "exposed_s", "mfu"),
    "reason",
)


def document_of(page: StudyPage) -> dict[str, Any]:
    """Makes the document of a study; see the module."""
    result = page.result
    rows = plan_rows(result, page.estimated)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "title": clean(words.title(result)),
        "workload": result.facts.searched.workload,
        "target": result.facts.devices.target,
        "device": result.facts.devices.kind,
        "device_count": result.facts.devices.count,
        "made": result.footer.made or None,
        "interrupted": result.footer.interrupted,
        "verdict": _verdict(result, rows),
        "rule": _rule(result),
        "summary": [list(line) for line in summary(result, verbose=True).lines],
        "versions": dict(result.facts.provenance.versions),
        "memory": {
            "limit_bytes": result.facts.devices.memory_bytes or None,
            "reserve_bytes": result.facts.devices.reserve_bytes or None,
        },
        "plans": {
            "columns": list(COLUMNS),
            "rows": [[row.get(name) for name in COLUMNS] for row in rows],
        },
        "causes": list(_causes(result, page.estimated)),
        "funnel": _funnel(result),
        "predictions": _predictions(result),
        "explained": [
            {
                **_with_most_collectives(facts_of_one(one)),
                "points": [jsonio.to_json(point, type(point)) for point in points],
            }
            for one, points in zip(page.explained, page.points, strict=True)
        ],
        "verdicts": {f"{first},{second}": said for (first, second), said in page.verdicts},
        "rounds": [jsonio.to_json(one, type(one)) for one in page.rounds],
        "timelines": [_timeline(one) for one in page.timelines],
        "wiring": jsonio.to_json(page.wiring, Wiring) if page.wiring else None,
        "placements": [_placement(one) for one in page.placements],
        "left_out": dict(page.left_out or {}),
    }
    return finite(_cleaned(data))


def plan_rows(
    result: SearchResult, estimated: Sequence[EstimatedPlan] = ()
) -> list[dict[str, Any]]:
    """Makes a row of `COLUMNS` for every plan: the best trials first, then mere estimates.

    `half` is the longer side of the 95 % interval as text, `versus` what the terminal shows against
    the exported plan, `settings` the knobs, logical axes and options as text.
    """
    rows: list[dict[str, Any]] = []
    rank = 0
    for candidate in result.candidates:
        row = _candidate_row(candidate)
        if words.is_ranked(candidate) and not words.is_duplicate(candidate):
            rank += 1
            row["rank"] = rank
        rows.append(row)
    best = words.best_of(result)
    known = _estimate_of(best) if best is not None else None
    usual_s = (
        known.step_s
        if known is not None
        else min((one.step_s for one in estimated if not one.reason), default=0.0)
    )
    first_failure = next((n for n, row in enumerate(rows) if row["verdict"] == "failed"), len(rows))
    mere = [_estimated_row(one, usual_s) for one in sorted(estimated, key=_fastest_first)]
    return [*rows[:first_failure], *mere, *rows[first_failure:]]


def _fastest_first(one: EstimatedPlan) -> tuple[bool, float]:
    return bool(one.reason), one.step_s


def _estimate_of(candidate: Candidate) -> Estimated | None:
    outcome = candidate.outcome
    return outcome if isinstance(outcome, Estimated) else candidate.estimated


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    standing, outcome = candidate.standing, candidate.outcome
    ranked = words.is_ranked(candidate)
    compiled, estimate = words.compiled_of(candidate), _estimate_of(candidate)
    replay = replay_of(outcome)
    low_s, high_s = _interval(candidate)
    compared = ranked and standing.interval[0] < standing.interval[1]
    peak_kind = "measured" if words.peak_is_measured(candidate) else "compiled"
    if compiled is None:
        peak_kind = "estimated" if isinstance(outcome, Estimated) else "measured"
    return {
        "plan": str(candidate.plan),
        "mesh": candidate.plan.mesh,
        "settings": str(candidate.plan).removeprefix(candidate.plan.mesh).strip(),
        "rank": None,
        "evidence": words.evidence(candidate) if ranked else _what_fell(candidate),
        "verdict": standing.verdict,
        "is_baseline": candidate.is_baseline,
        "step_s": words.step_s(candidate),
        "low_s": low_s,
        "high_s": high_s,
        "half": words.half_interval(candidate) or None,
        "ratio": standing.ratio if ranked else None,
        "ratio_low": standing.interval[0] if compared else None,
        "ratio_high": standing.interval[1] if compared else None,
        "versus": words.versus_exported(candidate) or None,
        "peak_bytes": candidate.peak_bytes or _needed(candidate),
        "peak_kind": peak_kind if candidate.peak_bytes else None,
        "bound_by": candidate.bound_by or None,
        "estimated_s": estimate.step_s if estimate else None,
        "compiled_s": compiled.step_s if compiled and compiled.effort == "default" else None,
        "exposed_s": exposed_s(replay) if replay else None,
        "mfu": replay.mfu or None if replay else None,
        "reason": words.reason(candidate)
        or (f"the same program as {compiled.same_as}" if compiled and compiled.same_as else None),
    }


def _what_fell(candidate: Candidate) -> str:
    """Says in a word or two why a plan is not in the ranking."""
    kind = candidate.outcome.kind
    if isinstance(candidate.outcome, Measured):
        return f"numerics {candidate.outcome.numerics}"
    return kind.replace("_", " ")


def _needed(candidate: Candidate) -> int | None:
    outcome = candidate.outcome
    return (outcome.needed_bytes or None) if isinstance(outcome, OutOfMemory) else None


def _interval(candidate: Candidate) -> tuple[float | None, float | None]:
    """Returns the 95 % interval of a measured time, or the bracket of a prediction."""
    outcome, standing = candidate.outcome, candidate.standing
    replay = replay_of(outcome)
    if isinstance(outcome, Measured) and standing.step_s and standing.interval[0] > 0.0:
        one_s = standing.step_s / standing.ratio
        return one_s * standing.interval[0], one_s * standing.interval[1]
    if isinstance(outcome, Measured) and outcome.interval_s[0] < outcome.interval_s[1]:
        return outcome.interval_s
    if isinstance(outcome, Estimated):
        return outcome.bracket_s
    # A bracket of a prediction does not compare with a measured time.
    return replay.bracket_s if replay and not standing.step_s else (None, None)


def _estimated_row(one: EstimatedPlan, usual_s: float) -> dict[str, Any]:
    settings = " ".join(f"{name}={text}" for name, text in one.settings)
    ratio = one.step_s / usual_s if usual_s and not one.reason else None
    versus = None
    if ratio is not None:
        versus = f"{ratio:.2f}x" if ratio >= 2 else f"{100 * (ratio - 1):+.1f} %"
    return {
        "plan": f"{one.mesh} {settings}".strip(),
        "mesh": one.mesh,
        "settings": settings,
        "evidence": "not estimated" if one.reason else "estimated",
        "verdict": "failed" if one.reason else "not_measured",
        "is_baseline": False,
        "step_s": one.step_s or None,
        "low_s": one.bracket_s[0] or None,
        "high_s": one.bracket_s[1] or None,
        "ratio": ratio,
        "versus": versus,
        "peak_bytes": one.memory_bytes or None,
        "peak_kind": "estimated" if one.memory_bytes else None,
        "bound_by": one.causes[0][0] if one.causes else None,
        "estimated_s": one.step_s or None,
        "reason": one.reason or None,
    }


def _verdict(result: SearchResult, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    best, baseline = words.best_of(result), words.baseline_of(result)
    last = result.verifications[-1] if result.verifications else None
    seconds = words.step_s(best) if best else None
    # Older figures than those of the decision say nothing about the plan that is exported now.
    has_gain = last is not None and baseline is not None and last.baseline == str(baseline.plan)
    sentence = words.best_sentence(result)
    mere = next((row for row in rows if row["evidence"] == "estimated"), None)
    if not sentence and mere is not None:
        sentence = (
            f"nothing was compiled or measured yet: {mere['plan']} has the lowest estimate, "
            f"{format_seconds(mere['step_s'])}"
        )
    return {
        "label": words.best_label(result),
        "sentence": sentence or "nothing was tried",
        "undecided": words.undecided_sentence(result) or None,
        "evidence": words.evidence(best) if best else "none",
        "is_exported": best is not None and best.standing.verdict in EXPORTED,
        "plan": str(best.plan) if best else None,
        "baseline": str(baseline.plan) if baseline else None,
        "step_s": seconds,
        "step_text": format_seconds(seconds) if seconds else None,
        "half": (words.half_interval(best) or words.half_of(best.outcome) or None)
        if best
        else None,
        "bracket": words.bracket(best.outcome) or None if best else None,
        "speedup": last.speedup if last and has_gain else _predicted_gain(best, baseline),
        "speedup_interval": list(last.speedup_interval) if last and has_gain else None,
        "is_tie": last.is_tie if last and has_gain else None,
        "memory": memory_sentence(result, best) if best else None,
        "peak_bytes": (best.peak_bytes or None) if best else None,
    }


def _predicted_gain(best: Candidate | None, baseline: Candidate | None) -> float | None:
    """Returns how many times slower the script's own plan is by the same kind of figure; None where
    it has none, or where measured times were not compared in fresh processes."""
    if best is None or baseline is None or best is baseline or not words.is_ranked(baseline):
        return None
    evidence = words.evidence(best)
    is_prediction = evidence in ("compiled", "estimated")
    return (
        baseline.standing.ratio if is_prediction and evidence == words.evidence(baseline) else None
    )


def _rule(result: SearchResult) -> dict[str, Any]:
    try:
        text = rule_text(result)
    except NoFeasibleMesh as error:
        hint = f" ({error.hint})" if error.hint else ""
        return {"text": None, "path": None, "missing": f"{error.message}{hint}"}
    return {"text": text, "path": result.footer.rules_path or None, "missing": None}


def _causes(result: SearchResult, estimated: Sequence[EstimatedPlan]) -> Iterable[dict[str, Any]]:
    """Returns seconds by cause of the first plans that have any: of a replay or an estimate."""
    shown = [one for one in result.candidates if words.is_ranked(one)]
    shown = [one for one in shown if not words.is_duplicate(one)]
    chosen = shown[:MOST_STACKED]
    chosen += [one for one in shown[MOST_STACKED:] if one.is_baseline]
    number = 0
    for candidate in chosen:
        compiled, estimate = words.compiled_of(candidate), _estimate_of(candidate)
        replay = compiled.replay if compiled else None
        found = replay or estimate
        if found is None:
            continue
        number += 1
        evidence = "compiled" if replay else "estimated"
        for cause, seconds in found.causes:
            yield _cause(str(candidate.plan), evidence, cause, seconds, number)
    mere = [one for one in estimated if not one.reason]
    for one in sorted(mere, key=_fastest_first)[: max(MOST_STACKED // 2 - number, 0)]:
        number += 1
        settings = " ".join(f"{name}={text}" for name, text in one.settings)
        plan = f"{one.mesh} {settings}".strip()
        for cause, seconds in one.causes:
            yield _cause(plan, "estimated", cause, seconds, number)


def _cause(plan: str, evidence: str, cause: str, seconds: float, number: int) -> dict[str, Any]:
    return {
        "plan": plan,
        "evidence": evidence,
        "cause": cause,
        "seconds": seconds,
        "order": number,
    }


def _funnel(result: SearchResult) -> dict[str, Any]:
    funnel = result.funnel
    has_estimates = any(_estimate_of(one) is not None for one in result.candidates)
    steps = [("enumerated", funnel.enumerated), ("legal", funnel.legal)]
    if funnel.estimated or has_estimates:
        told = sum(_estimate_of(one) is not None for one in result.candidates)
        steps.append(("estimated", min(max(funnel.estimated + told, 0), funnel.legal)))
    if not result.facts.searched.template:
        steps.append(("compiled", funnel.compiled + funnel.duplicates))
    if not result.is_ahead:
        steps.append(("measured", funnel.measured))
    steps.append(("exported", int(has_rule(result))))
    lost = [(rule, "ruled out", number) for rule, number in funnel.ruled_out]
    lost += [
        ("out of memory", "failures", funnel.out_of_memory),
        ("failed", "failures", funnel.failed),
        ("timed out", "failures", funnel.timed_out),
        ("failed when run", "failures", funnel.failed_in_run),
        ("the same program as another plan", "duplicates", funnel.duplicates),
        ("compiled at low effort only", "not reached", funnel.screened),
        ("estimated only", "not reached", funnel.estimated),
        ("refused by the step", "failures", funnel.refused),
        ("not reached", "not reached", funnel.not_reached),
    ]
    return {
        "sentence": words.funnel_sentence(funnel),
        "steps": [{"step": step, "count": number} for step, number in steps],
        "lost": [
            {"reason": clean(reason), "step": step, "count": number}
            for reason, step, number in lost
            if number > 0
        ],
    }


def _predictions(result: SearchResult) -> dict[str, Any] | None:
    """Pairs predicted with measured times; for absent devices, estimated with replayed ones.

    The line is `known = factor * predicted`, `factor` the geometric mean; a residual is the share
    by which a plan is off that line.
    """
    pairs: list[tuple[str, str, float, float]] = []
    for candidate in result.candidates:
        outcome, estimate = candidate.outcome, _estimate_of(candidate)
        compiled = words.compiled_of(candidate)
        if isinstance(outcome, Measured) and outcome.step_s > 0:
            if estimate is not None:
                pairs.append(("estimated", str(candidate.plan), estimate.step_s, outcome.step_s))
            if compiled is not None and compiled.effort == "default":
                pairs.append(
                    (
                        "from the compiled program",
                        str(candidate.plan),
                        compiled.step_s,
                        outcome.step_s,
                    )
                )
        elif isinstance(outcome, Compiled) and outcome.replay and not outcome.same_as and estimate:
            pairs.append(("estimated", str(candidate.plan), estimate.step_s, outcome.step_s))
    pairs = [one for one in pairs if one[2] > 0 and one[3] > 0]
    if not pairs:
        return None
    factors = {
        basis: math.exp(
            statistics.fmean(math.log(one[3] / one[2]) for one in pairs if one[0] == basis)
        )
        for basis in dict.fromkeys(one[0] for one in pairs)
    }
    return {
        "known": "replayed" if result.is_ahead else "measured",
        "factors": factors,
        "belief": result.footer.belief or None,
        "rows": [
            {
                "basis": basis,
                "plan": plan,
                "predicted_s": predicted_s,
                "known_s": known_s,
                "residual": known_s / (factors[basis] * predicted_s) - 1.0,
            }
            for basis, plan, predicted_s, known_s in pairs
        ],
    }


def _with_most_collectives(side: dict[str, Any]) -> dict[str, Any]:
    """Keeps the most expensive collectives of a side; counts those that are left out."""
    shown, rest = side["collectives"][:MOST_COLLECTIVES], side["collectives"][MOST_COLLECTIVES:]
    left_out = {"count": len(rest), "seconds": sum(one["seconds"] for one in rest)}
    return {**side, "collectives": shown, "collectives_left_out": left_out}


def _timeline(one: DrawnTimeline) -> dict[str, Any]:
    slices = one.timeline.slices
    if len(slices) > MOST_SLICES:
        least = sorted((each.seconds for each in slices), reverse=True)[MOST_SLICES]
        kept = [each for each in slices if each.seconds > least]
    else:
        kept = list(slices)
    return {
        "plan": str(one.plan),
        "kind": one.kind,
        "step_s": one.timeline.step_s,
        "tracks": list(one.timeline.tracks),
        "slices": [_slice(each) for each in kept],
        "left_out": len(slices) - len(kept),
        "held": [jsonio.to_json(held, type(held)) for held in one.held],
    }


def _slice(one: Slice) -> list[Any]:
    start_s, seconds = float(f"{one.start_s:.6g}"), float(f"{one.seconds:.6g}")
    return [one.track, start_s, seconds, one.name, one.cause, one.kind, one.source]


def _placement(one: Placed) -> dict[str, Any]:
    return {
        "plan": str(one.plan),
        "axes": [{"name": name, "size": size} for name, size in one.axes],
        "devices": list(one.devices),
        "granule": list(one.granule),
        "place": [list(place) for place in one.place],
    }


def _cleaned(value: Any) -> Any:
    """Removes control characters from every text; line feeds stay."""
    if isinstance(value, str):
        return clean_lines(value)
    if isinstance(value, dict):
        return {clean(str(key)): _cleaned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    return value
