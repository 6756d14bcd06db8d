"""How a result is put into words: pure functions from nouns to sentences and cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from automesh.mesh.axes import MAPPING, format_setting
from automesh.mesh.mapping import NONE, format_axes
from automesh.outcomes import (
    Compiled,
    Estimated,
    Failed,
    Failure,
    Measured,
    Outcome,
    OutOfMemory,
    ReplayOutcome,
    RuledOut,
    TimedOut,
)
from automesh.report.comparison import COMPARED, EXPORTED, Verification
from automesh.report.result import Candidate, Funnel, SearchResult
from automesh.texts.terminal import clean
from automesh.units import (
    format_bytes,
    format_change,
    format_factor,
    format_percent,
    format_seconds,
    format_wait,
)

Evidence = Literal["measured", "compiled", "estimated", "none"]

_SOURCE = re.compile(r" \([^()\s]+:\d+\)")
_DOING = {
    "start": "starting",
    "load": "loading the script",
    "build": "building",
    "lower": "lowering",
    "compile": "compiling",
    "materialize": "making its arguments",
    "run": "running",
    "replay": "replaying",
}

UNKNOWN = "?"  # In the place of a figure that nobody knows.


def evidence(candidate: Candidate) -> Evidence:
    """Names the evidence for the candidate's step time."""
    match candidate.outcome:
        case Measured():
            return "measured"
        case Compiled():
            return "compiled"
        case Estimated():
            return "estimated"
        case _:
            return "none"


def is_ranked(candidate: Candidate) -> bool:
    """Whether a plan has a place in the ranking: it has a time, and nothing speaks against it."""
    has_time = isinstance(candidate.outcome, Measured | Compiled | Estimated)
    return has_time and candidate.standing.verdict not in ("excluded", "failed")


def is_duplicate(candidate: Candidate) -> bool:
    """Whether a plan's program is another plan's: it has no figures of its own."""
    return isinstance(candidate.outcome, Compiled) and bool(candidate.outcome.same_as)


def compiled_of(candidate: Candidate) -> Compiled | None:
    """Returns the compiler's outcome, whichever field has it."""
    return candidate.outcome if isinstance(candidate.outcome, Compiled) else candidate.compiled


def peak_is_measured(candidate: Candidate) -> bool:
    """Whether the peak is known to come from the device, not from the compiler."""
    compiled = compiled_of(candidate)
    return (
        isinstance(candidate.outcome, Measured)
        and compiled is not None
        and candidate.peak_bytes != compiled.memory.peak_bytes
    )


def step_s(candidate: Candidate) -> float | None:
    """Returns the seconds of one step, measured, predicted or estimated; None if there are none.

    For a plan that was compared with the exported one, by measurements or by predictions, it
    follows from that ratio.
    """
    outcome = candidate.outcome
    if candidate.standing.step_s:
        return candidate.standing.step_s
    return outcome.step_s if isinstance(outcome, Measured | Compiled | Estimated) else None


def half_interval(candidate: Candidate) -> str:
    """Returns `±1.2 %`: the larger half of the 95 % interval; empty if none is known.

    For a plan that was compared with the exported one it is the half of the ratio's interval.
    """
    standing = candidate.standing
    if not standing.step_s or not isinstance(candidate.outcome, Measured):
        return half_of(candidate.outcome)
    low, high = standing.interval
    return _half(standing.ratio, low, high) if low > 0.0 else ""


def half_of(outcome: Outcome) -> str:
    """Returns `±1.2 %`: the larger half of the 95 % interval of a measured time; empty if there is
    none."""
    if not isinstance(outcome, Measured) or outcome.step_s <= 0:
        return ""
    return _half(outcome.step_s, *outcome.interval_s)


def _half(middle: float, low: float, high: float) -> str:
    # An interval of no width comes from a single round: it would claim what nobody knows.
    half = max(high - middle, middle - low)
    return f"\u00b1{format_percent(half / middle)}" if half > 0 else ""


def bracket(outcome: Outcome) -> str:
    """Returns `10.1 ms to 13.0 ms`: with all possible overlap, and with none; empty if unknown."""
    match outcome:
        case Estimated(bracket_s=(low, high)):
            return f"{format_seconds(low)} to {format_seconds(high)}"
        case Compiled(replay=ReplayOutcome(bracket_s=(low, high))):
            return f"{format_seconds(low)} to {format_seconds(high)}"
        case _:
            return ""


def versus_exported(candidate: Candidate) -> str:
    """Returns `kept`, `new`, `equal`, `undecided`, `+6.0 %` or `2.40x`; empty for a plan that is
    not compared.

    `?` where the predicted time leaves out work that those of others do not.
    """
    standing = candidate.standing
    if not is_ranked(candidate):
        return ""
    if candidate.partly_counted:
        return UNKNOWN
    if standing.verdict not in ("faster", "slower", "not_measured"):
        return standing.verdict
    slower = standing.ratio - 1
    if slower >= 1:
        return format_factor(standing.ratio)
    return f"{'+' if slower >= 0 else '-'}{format_percent(abs(slower))}"


def reason(candidate: Candidate) -> str:
    """Says in one line why a plan is not in the ranking; empty if it is."""
    match candidate.outcome:
        case OutOfMemory() | Failed() | TimedOut() as failure:
            return failure_reason(failure)
        case RuledOut(rule=rule, detail=detail):
            return f"ruled out by {clean(rule)}" + (f": {clean(detail)}" if detail else "")
        case Measured(numerics="other_arguments", numerics_detail=detail):
            return clean(detail) or "the arguments of the step differ between two runs"
        case Measured(numerics="differ" | "unverified" as numerics, numerics_detail=detail):
            return f"numerics {numerics}" + (f": {clean(detail)}" if detail else "")
        case Measured() | Compiled() | Estimated():
            verdict = candidate.standing.verdict
            return "may not become a rule" if verdict in ("excluded", "failed") else ""


def failure_reason(failure: Failure) -> str:
    """Says in one line why something was not done; of a gang, on which host."""
    reason = _reason(failure)
    return f"{clean(failure.where)}: {reason}" if failure.where else reason


def _reason(failure: Failure) -> str:
    match failure:
        case OutOfMemory():
            return _out_of_memory(failure)
        case Failed(stage=stage, reason=text):
            return f"failed in {clean(stage)}: {clean(text) or 'no reason was given'}"
        case TimedOut(stage=stage, limit_s=limit_s):
            doing = _DOING.get(stage, f"in {clean(stage)}")
            return f"timed out after {format_wait(limit_s)} while {doing}"


def _out_of_memory(outcome: OutOfMemory) -> str:
    where = _DOING.get(outcome.stage, clean(outcome.stage))
    if outcome.needed_bytes and outcome.limit_bytes:
        needs = f"needs {format_bytes(outcome.needed_bytes)} of {format_bytes(outcome.limit_bytes)}"
        if outcome.reserve_bytes:
            needs += f", of which {format_bytes(outcome.reserve_bytes)} stay in reserve"
    elif outcome.needed_bytes:
        needs = f"needs {format_bytes(outcome.needed_bytes)}"
    else:
        needs = clean(outcome.detail) or "the amount is not known"
    return f"out of memory: {needs}" + (f" (while {where})" if where else "")


def count(number: int, one: str, many: str = "") -> str:
    """Returns `1 plan` or `2 plans`; `many` is the plural if it is not formed with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def funnel_sentence(funnel: Funnel) -> str:
    """Says how many plans reached which rung; numbers outside the brackets add up to the whole.

    For example `315 plans: 120 compiled (9 measured, 20 duplicates), 180 ruled out, 15 failed`.
    """
    ran = [
        (funnel.measured, "measured"),
        (funnel.failed_in_run, "failed when run"),
        (funnel.duplicates, "duplicates"),
    ]
    inside = ", ".join(f"{number} {what}" for number, what in ran if number)
    compiled = funnel.compiled + funnel.duplicates
    parts = [
        (compiled, "compiled" + (f" ({inside})" if inside else "")),
        (0 if compiled else funnel.measured, "measured"),
        (sum(number for _, number in funnel.ruled_out), "ruled out"),
        (funnel.out_of_memory, "out of memory"),
        (funnel.failed, "failed"),
        (funnel.timed_out, "timed out"),
        (funnel.screened, "compiled at low effort only"),
        (funnel.estimated, "estimated only"),
        (funnel.refused, "refused by the step"),
        (funnel.not_reached, "not reached"),
    ]
    said = ", ".join(f"{number} {what}" for number, what in parts if number)
    return f"{count(funnel.enumerated, 'plan')}{': ' if said else ''}{said}"


def partly_counted_notice(number: int) -> str:
    """Says how many plans are ranked behind others because some of their work is not counted."""
    if not number:
        return ""
    stands = "stands" if number == 1 else "stand"
    return (
        f"{count(number, 'plan')} with work of unknown length, which other plans do not have, "
        f"{stands} behind these, whatever the figures: only a run tells how long it takes"
    )


def uncounted_notices(estimates: Sequence[Estimated], most: int = 3) -> list[str]:
    """Says what the estimates leave out, one sentence each, the most frequent first."""
    counted = Counter(
        what
        for estimate in estimates
        for what in dict.fromkeys(_SOURCE.sub("", said) for said in estimate.uncounted)
    )
    said = [
        f"not counted in {'any' if number == len(estimates) else number} "
        f"of {count(len(estimates), 'estimate')}: {clean(what)}"
        for what, number in counted.most_common(most)
    ]
    if len(counted) > most:
        said.append(f"{len(counted) - most} more things are not counted in some estimates")
    return said


def ruled_out_sentence(funnel: Funnel, most: int = 4) -> str:
    """Names the rules that exclude most plans, with their counts; empty if none did."""
    shown = [f"{clean(rule)} ({number})" for rule, number in funnel.ruled_out[:most]]
    rest = funnel.ruled_out[most:]
    if rest:
        total = sum(number for _, number in rest)
        shown.append(f"{count(len(rest), 'other rule')} ({total})")
    return ", ".join(shown)


def numerics_sentence(result: SearchResult) -> str:
    """Says which losses are the reference, and how many plans disagree; empty if nothing ran."""
    ran = [
        candidate.outcome
        for candidate in result.candidates
        if isinstance(candidate.outcome, Measured)
    ]
    if not ran:
        return ""
    if all(outcome.numerics == "not_compared" for outcome in ran):
        why = clean(result.reference) or "there was no time for a reference"
        return f"no losses were compared: {why}"
    differ = sum(outcome.numerics == "differ" for outcome in ran)
    unverified = sum(outcome.numerics == "unverified" for outcome in ran)
    # A command shows its losses alone.
    what = "losses" if result.facts.searched.template else "losses and first updates"
    if not result.facts.searched.template and not any(outcome.losses for outcome in ran):
        what = "no loss: first updates"
    text = f"{what} compared with those of {clean(result.reference) or 'no other plan'}"
    others = sum(outcome.numerics == "other_arguments" for outcome in ran)
    verdicts = [
        (differ, "differs" if differ == 1 else "differ"),
        (unverified, "unverified"),
        (others, "had other arguments"),
    ]
    said = ", ".join(f"{number} {what}" for number, what in verdicts if number)
    return f"{text}: {said or 'all agree'}"


def title(result: SearchResult) -> str:
    """Says what was searched, and for which devices."""
    searched, devices = result.facts.searched, result.facts.devices
    shown = f"{devices.count} x {clean(devices.kind)}" if devices.kind else ""
    shown = shown or count(devices.count, "device")
    return f"{clean(searched.workload)} on {clean(devices.target)} ({shown})"


def best_of(result: SearchResult) -> Candidate | None:
    """Returns the exported candidate, or the best if nothing was exported yet."""
    winners = (
        candidate
        for candidate in result.candidates
        if candidate.standing.verdict in EXPORTED and is_ranked(candidate)
    )
    return next(winners, None)


def baseline_of(result: SearchResult) -> Candidate | None:
    """Returns the candidate that is the script's own mesh."""
    return next((candidate for candidate in result.candidates if candidate.is_baseline), None)


def best_label(result: SearchResult) -> str:
    """Returns `keep` if the answer is the script's own mesh and was measured, else `best`."""
    best = best_of(result)
    return "keep" if best is not None and best.standing.verdict == "kept" else "best"


def best_sentence(result: SearchResult) -> str:
    """Says the answer: the plan, its time with the evidence, the gain over the script's mesh."""
    said = _answer(result)
    differs = clean(result.facts.searched.data_by_mesh)
    return f"{said}; {differs}" if differs and best_of(result) is not None else said


def _answer(result: SearchResult) -> str:
    best = best_of(result)
    if best is None and not result.candidates:
        return ""  # Nothing was tried: a dry run, or a search that was stopped at once.
    if best is None:
        return "none: no plan may become a rule"
    time = _time_and_evidence(best, result.verifications)
    gain = _gain(best, baseline_of(result), result.verifications)
    if best.standing.verdict == "kept":
        return clean(f"{plan_shown(best)}, {_own(best)}, {time}: {_most_faster(result)}")
    if gain and _is_shown_faster(result):
        return clean(f"{plan_shown(best)} is {gain}: {time}")
    return clean(", ".join(part for part in (plan_shown(best), time, gain) if part))


def plan_shown(row: Candidate) -> str:
    """Returns the plan as text; where shardings are inferred, without what splits nothing on its
    mesh."""
    if row.is_scripts:
        return str(row.plan)
    settings = settings_shown(row).items()
    return " ".join([row.plan.mesh, *(format_setting(name, value) for name, value in settings)])


def settings_shown(row: Candidate) -> dict[str, str]:
    """Returns the settings of a plan by name, as text. Where shardings are inferred, it leaves out
    logical axes that split nothing on the plan's mesh, and says over which axes the others
    split."""
    if row.is_scripts:
        return {name: str(value) for name, value in row.plan.settings}
    sizes = row.plan.sizes
    over = {
        f"{MAPPING}{name}": format_axes(tuple(axis for axis in axes if sizes[axis] > 1))
        for name, axes in row.plan.mapping
    }
    rest = {name: str(value) for name, value in (*row.plan.knobs, *row.plan.compiler_options)}
    return {name: axes for name, axes in over.items() if axes != NONE} | rest


def _is_shown_faster(result: SearchResult) -> bool:
    """Whether fresh processes have shown the exported plan to be faster than the script's own."""
    baseline = baseline_of(result)
    last = result.verifications[-1:]
    return any(
        baseline is not None
        and is_ranked(baseline)
        and one.baseline == str(baseline.plan)
        and one.speedup_interval[0] > 1.0
        for one in last
    )


def _most_faster(result: SearchResult) -> str:
    if not any(candidate.standing.verdict in COMPARED for candidate in result.candidates):
        return _why_nothing_compares(result)
    most = result.verifications[-1].most_faster if result.verifications else ()
    if not most:
        return "whether others are faster is not known"
    share = "" if most[0] < 0.0005 else f" more than {format_percent(most[0])}"
    return f"no measured mesh is{share} faster"


def _why_nothing_compares(result: SearchResult) -> str:
    out = [one for one in result.candidates if one.standing.verdict == "excluded"]
    if not out:
        return "no other mesh was measured"
    kinds = {one.outcome.numerics for one in out if isinstance(one.outcome, Measured)}
    if kinds == {"other_arguments"}:
        return f"no other mesh could be compared: {reason(out[0])}"
    which = "the other mesh that ran" if len(out) == 1 else f"none of {len(out)} other meshes"
    return f"{which} computes {'something else' if len(out) == 1 else 'the same'}"


def undecided_sentence(result: SearchResult) -> str:
    """Says which plans may still be faster, and what would decide it; empty if none may."""
    waiting = [
        candidate for candidate in result.candidates if candidate.standing.verdict == "undecided"
    ]
    waiting = [one for one in waiting if one.standing.more_s > 0]
    if not waiting:
        return ""
    first = waiting[0]
    standing = first.standing
    low, high = standing.interval
    change = f"{format_change(standing.ratio)} step time"
    others = f" and {count(len(waiting) - 1, 'other')}" if waiting[1:] else ""
    if low > 0:
        found = f"may be faster: {change} ({format_change(low)} to {format_change(high)})"
    else:  # In fewer processes than an interval takes.
        found = f"{'were' if others else 'was'} timed too little to tell: {change} so far"
    more_s = sum(one.standing.more_s for one in waiting)
    return clean(
        f"{first.plan}{others} {found}; "
        f"about {format_wait(more_s)} more would decide, with the same command"
    )


def _time_and_evidence(best: Candidate, verifications: Sequence[Verification]) -> str:
    match best.outcome:
        case Measured(step_s=seconds, confirmed=confirmed):
            if not confirmed:
                return f"{format_seconds(seconds)} measured, not yet confirmed in fresh processes"
            fresh = sum(verification.processes for verification in verifications)
            where = f"in {count(fresh, 'fresh process', 'fresh processes')}"
            return f"{format_seconds(seconds)} measured {where if fresh else 'again'}"
        case Compiled(step_s=seconds, replay=ReplayOutcome()) as outcome:
            return (
                f"{format_seconds(seconds)} predicted by a replay of the compiled program "
                f"({bracket(outcome)}), not measured"
            )
        case Compiled(step_s=seconds):
            return f"{format_seconds(seconds)} predicted from the compiled program, not measured"
        case Estimated(step_s=seconds) as outcome:
            return f"{format_seconds(seconds)} estimated ({bracket(outcome)}), not compiled"
        case _:
            return ""


def _own(best: Candidate) -> str:
    """Describes the exported plan if it is the baseline."""
    return "the script's own mesh" if best.is_scripts else "the baseline"


def _gain(
    best: Candidate, baseline: Candidate | None, verifications: Sequence[Verification]
) -> str:
    if baseline is None:
        return ""
    if best.is_baseline:
        return _own(best)
    is_told = baseline.plan.mesh == best.plan.mesh
    whose = "the script's" if baseline.is_scripts else "the baseline"
    whose += f" {baseline.plan if is_told else baseline.plan.mesh}"
    if not is_ranked(baseline):
        return f"while {whose} gives no time ({reason(baseline)})"
    # A decision of a search with another baseline, or with none, says nothing about this one.
    if verifications and verifications[-1].baseline == str(baseline.plan):
        last = verifications[-1]
        return _compared(last.speedup, last.speedup_interval, is_tie=last.is_tie, whose=whose)
    if evidence(best) != evidence(baseline):
        return ""
    standing = baseline.standing
    is_tie = standing.verdict not in ("slower", "not_measured")
    said = _compared(standing.ratio, standing.interval, is_tie=is_tie, whose=whose)
    prefix = {"measured": "", "estimated": "estimated "}.get(evidence(best), "predicted ")
    return prefix + said


def _compared(speedup: float, interval: tuple[float, float], *, is_tie: bool, whose: str) -> str:
    low, high = interval
    if speedup < 1 and not is_tie:
        speedup, low, high = (1 / max(one, 1e-9) for one in (speedup, high, low))
        verb = f"{format_factor(speedup)} slower than"
    else:
        verb = f"{format_factor(speedup)} faster than"
        if is_tie:
            verb = "not shown to be faster than"
        elif speedup < 1.005:  # "1.00x faster" would say nothing.
            share = format_percent(speedup - 1)
            verb = "as fast as" if share == format_percent(0.0) else f"{share} faster than"
    span = f" ({format_factor(low)} to {format_factor(high)})" if low < high else ""
    return f"{verb} {whose}{span}"
