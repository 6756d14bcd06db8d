"""The results of a command's runs: figures and losses of the plans, and the result that is printed.

Each run is a trial of the study's rung `measure`. Its label is its purpose: `first` for the first
try of a plan, `again` to check whether losses repeat, `race-ID-NN` for a round of a race,
`fresh-NN` for the figures that are exported. Runs with the same number belong together.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from automesh.errors import UsageError
from automesh.hardware import chip_for
from automesh.limits import MOST_COMMAND_CHARS
from automesh.mesh.axes import Plan
from automesh.outcomes import (
    Failed,
    Failure,
    Measured,
    Numerics,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from automesh.report.result import Funnel, SearchResult
from automesh.report.words import best_of, count
from automesh.tuner.choose.ranking import rank
from automesh.tuner.command.run import FinishedRun
from automesh.tuner.command.template import parse_template
from automesh.tuner.measure.decision import Decision
from automesh.tuner.measure.numerics import compare_losses
from automesh.tuner.measure.statistics import median_interval, t_limit
from automesh.tuner.study.metadata import Header, Notebook, notebook_of
from automesh.tuner.study.results import result_of, with_ending
from automesh.tuner.study.study import Study

FIRST = "first"
AGAIN = "again"
_LEAST_FREEDOM = 3
_NO_LOSSES = "none: the command tells no losses"


def race_label(race: str, number: int) -> str:
    """Returns the label of a round of a race."""
    return f"race-{race}-{number:02d}"


def fresh_label(number: int) -> str:
    """Returns the label of the runs that are compared side by side, row by row."""
    return f"fresh-{number:02d}"


@dataclass(slots=True, kw_only=True)
class Runs:
    """The finished runs of a study, for the command as it is now."""

    found: dict[Plan, dict[str, Outcome]] = field(default_factory=dict[Plan, dict[str, Outcome]])

    def add(self, plan: Plan, label: str, outcome: Outcome) -> None:
        self.found.setdefault(plan, {})[label] = outcome

    def of(self, plan: Plan, label: str) -> Outcome | None:
        return self.found.get(plan, {}).get(label)

    def measured(self, plan: Plan) -> list[Measured]:
        """Returns the runs of a plan that measured a time, in the order in which they were made."""
        return [one for one in self.found.get(plan, {}).values() if isinstance(one, Measured)]

    def failure(self, plan: Plan) -> Failure | None:
        """Returns the first failure among the runs of the plan; None if no run failed."""
        failures = (one for one in self.found.get(plan, {}).values() if isinstance(one, Failure))
        return next(failures, None)

    def first_s(self) -> dict[Plan, float | None]:
        """Returns the seconds per step of the plans that were tried; None for those that failed."""
        tried = {plan: runs[FIRST] for plan, runs in self.found.items() if FIRST in runs}
        return {
            plan: one.step_s if isinstance(one, Measured) and not self.failure(plan) else None
            for plan, one in tried.items()
        }

    def values(self, plan: Plan) -> list[float]:
        """Returns the seconds per step, one value per run, of the runs that can be compared with
        others: those side by side, else those of the last race, else the first run."""
        runs = self.found.get(plan, {})
        fresh = [one for label, one in runs.items() if label.startswith("fresh-")]
        if fresh:
            return [one.step_s for one in fresh if isinstance(one, Measured)]
        raced = [label for label in runs if label.startswith("race-")]
        if raced:
            last = raced[-1].rpartition("-")[0]
            raced = [label for label in raced if label.rpartition("-")[0] == last]
        chosen = [runs[label] for label in raced or [FIRST] if label in runs]
        return [one.step_s for one in chosen if isinstance(one, Measured)]


def runs_of(notebook: Notebook) -> Runs:
    """Returns all runs of a study that still count."""
    runs = Runs()
    for trial in notebook.study.measure.trials():
        if trial.outcome is not None and trial.run and notebook.is_current(trial):
            runs.add(trial.plan, trial.run, trial.outcome)
    return runs


def outcome_of_run(ran: FinishedRun) -> Measured:
    """Returns a run as it is stored; whether its losses agree is only known after other runs."""
    step_s = statistics.median(ran.samples_s)
    span = median_interval(ran.samples_s)
    return Measured(
        step_s=step_s,
        interval_s=span if math.isfinite(span[1]) else (step_s, step_s),
        rounds_s=ran.samples_s,
        losses=ran.losses,
        numerics="not_compared",
        numerics_detail="",
        values="user",
        raced_out=False,
        confirmed=False,
        peak_bytes=0,
        loss_dtype=ran.loss_dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Whether the plans compute the same.

    Attributes:
      reference: a name for the source of the losses that others are compared with.
      plan: the plan of the reference; empty if there is none.
      numerics: the result for every plan that ran, with a sentence if it does not agree.
      notice: a sentence if the command computes something else each time; else empty.
    """

    reference: str
    plan: tuple[Plan, ...]
    numerics: Mapping[Plan, tuple[Numerics, str]]
    notice: str = ""

    @property
    def differing(self) -> tuple[Plan, ...]:
        """Plans that may not be exported."""
        bad = ("differ", "unverified")
        return tuple(plan for plan, (one, _) in self.numerics.items() if one in bad)


def judge(runs: Runs, baseline: Sequence[Plan]) -> Judged:
    """Compares the losses of all plans with those of the baseline, else of the plan tried first.

    If the reference's own runs differ, nothing can be compared with it, and all plans are accepted.
    """
    ran = {plan: found for plan in runs.found if (found := runs.measured(plan))}
    told = [plan for plan, found in ran.items() if found[0].losses]
    chosen = [plan for plan in baseline if plan in told] or told[:1]
    if not chosen:
        none = dict.fromkeys(ran, ("not_compared", ""))
        return Judged(reference=_NO_LOSSES, plan=(), numerics=none)
    reference = chosen[0]
    name = f"the baseline {reference}" if reference in baseline else f"the plan {reference}"
    first, *others = ran[reference]
    odd = [other for other in others if _compared(first, other)[0] == "differ"]
    if odd:
        return Judged(
            reference=f"none: two runs of {reference} computed different losses",
            plan=(reference,),
            numerics=dict.fromkeys(ran, ("not_compared", "")),
            notice=f"two runs of {reference} computed different losses, so that losses of meshes "
            "cannot be compared: fix the seeds of the command",
        )
    numerics: dict[Plan, tuple[Numerics, str]] = {}
    for plan, found in ran.items():
        numerics[plan] = _compared(first, found[0])
        if plan == reference and numerics[plan][0] == "agree":
            numerics[plan] = ("reference", "")
    return Judged(reference=name, plan=(reference,), numerics=numerics)


def _compared(reference: Measured, one: Measured) -> tuple[Numerics, str]:
    if not one.losses:
        return "unverified", "it told no losses"
    # A run may have been ended early, so the two may have recorded different numbers of losses.
    common = min(len(reference.losses), len(one.losses))
    found = compare_losses(
        reference.losses[:common], one.losses[:common], one.loss_dtype or "bfloat16"
    )
    return found.verdict, found.detail


def outcomes_of_plans(runs: Runs, judged: Judged, decision: Decision | None) -> dict[Plan, Outcome]:
    """Returns the outcome of each plan that was tried, by its best evidence."""
    noise = _noise(runs)
    found: dict[Plan, Outcome] = {}
    for plan in runs.found:
        failure = runs.failure(plan)
        values = runs.values(plan)
        if failure is not None:
            found[plan] = failure
        elif values:
            found[plan] = measured_of(runs, judged, plan, values, noise=noise)
    if decision is not None:
        found |= {plan: one for plan, one in decision.confirmed if plan in found}
    return found


def measured_of(
    runs: Runs,
    judged: Judged,
    plan: Plan,
    values: Sequence[float],
    *,
    noise: float = 0.0,
    confirmed: bool = False,
) -> Measured:
    """Returns a plan's figure from several runs.

    Args:
      values: seconds per step, one per run.
      noise: for a single run: half of its interval, as a logarithm; 0 if it is not known.
    """
    step_s = float(np.median(values))
    span = median_interval(values)
    if len(values) < 2:
        span = (step_s * math.exp(-noise), step_s * math.exp(noise))
    numerics, detail = judged.numerics[plan]
    return replace(
        runs.measured(plan)[0],
        step_s=step_s,
        interval_s=span,
        rounds_s=tuple(values),
        numerics=numerics,
        numerics_detail=detail,
        confirmed=confirmed,
    )


def _noise(runs: Runs) -> float:
    """Returns half of the 95 % interval of a single run, as a logarithm; 0 if too few plans ran
    again.

    It assumes that the runs of each plan differ by the same amount.
    """
    groups = [np.log(values) for plan in runs.found if len(values := runs.values(plan)) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < _LEAST_FREEDOM:
        return 0.0
    squares = sum(float(np.sum((group - group.mean()) ** 2)) for group in groups)
    return t_limit(0.025, freedom) * math.sqrt(squares / freedom)


def assemble_command(study: Study, header: Header) -> SearchResult:
    """Reads everything that a study contains about a command, as of its last search."""
    notebook = notebook_of(study, header)
    runs = runs_of(notebook)
    judged = judge(runs, header.baseline)
    decision, footer = notebook.decision(), notebook.footer()
    outcomes = outcomes_of_plans(runs, judged, decision)
    candidates = rank(
        compiled={},
        measured=outcomes,
        comparisons=() if decision is None else decision.comparisons,
        baseline=header.baseline,
        chip=chip_for(header.facts.devices.kind, header.facts.devices.platform),
        winner=() if decision is None else (decision.winner,),
    )
    result = replace(
        with_ending(result_of(header, candidates, _funnel(header, outcomes)), decision, footer),
        reference=judged.reference,
        notices=_notices(notebook, header, judged),
    )
    best = best_of(result)
    return result if best is None else replace(result, best_command=_command(header, best.plan))


def _command(header: Header, plan: Plan) -> str:
    """Returns the command that runs a plan; empty if the stored template does not fit the plan.
    Another user may have written the template."""
    try:
        words = parse_template(header.facts.searched.template).for_plan(plan, run_dir="RUN_DIR")
    except (UsageError, KeyError):
        return ""
    text = shlex.join(words)
    return text if text.isprintable() and len(text) <= MOST_COMMAND_CHARS else ""


def _funnel(header: Header, outcomes: Mapping[Plan, Outcome]) -> Funnel:
    kinds = Counter(type(outcome) for outcome in outcomes.values())
    return Funnel(
        enumerated=header.enumerated,
        ruled_out=header.ruled_out,
        legal=header.plans,
        compiled=0,
        duplicates=0,
        out_of_memory=kinds[OutOfMemory],
        failed=kinds[Failed],
        timed_out=kinds[TimedOut],
        waiting=max(header.plans - len(outcomes), 0),
        measured=kinds[Measured],
    )


def _notices(notebook: Notebook, header: Header, judged: Judged) -> tuple[str, ...]:
    mine = (notebook.source_hash, notebook.versions)
    trials = notebook.study.measure.trials()
    stale = sum(not trial.matches(*mine) for trial in trials)
    outside = sum(trial.matches(*mine) and not notebook.tells_of(trial.plan) for trial in trials)
    return tuple(
        notice
        for notice in (
            *header.facts.notices,
            judged.notice,
            f"{count(stale, 'run')} of an older script or other versions kept, not ranked"
            if stale
            else "",
            f"{count(outside, 'run')} of other search spaces kept, not ranked" if outside else "",
            *notebook.study.skipped.notices(),
        )
        if notice
    )
