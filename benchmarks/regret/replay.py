"""Strategies against a recorded table: what each finds, and what it spends on finding it.

Every strategy pays for a plan what the sweep paid for all of its visits, so that each spends the
same repeats on a plan. Compiling and estimating are not device time and are not counted.
"""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from scipy import stats

from automesh.cost.correction import PredictedPlan, refine
from automesh.hardware import chip_for
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Counts, Estimated, Measured, Memory, Outcome
from automesh.tuner.choose.finalists import (
    COMPILES_PER_FINALIST,
    challengers,
    finalists,
    raceable,
    to_compile,
)
from automesh.tuner.choose.state import SearchState
from benchmarks.regret.sweep import Row

SHARE = 0.1  # of the sweep's device time: what a search may spend
TOP = 8  # finalists of a race, as in a search
APART = 0.05  # pairs that differ by less are not asked about
_CONFIDENCE = 1.96
_MEDIAN_SPREAD = 1.2533  # standard error of a median over that of a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the sweep of one example measured.

    Attributes:
      step_s: plan -> seconds of a step: the median over rounds, drift between rounds taken off.
      cost_s: plan -> device seconds of its visits.
      program: plan -> fingerprint; equal programs share their figures.
      noise: two plans that are equal differ by more than this share once in twenty times.
    """

    step_s: Mapping[Plan, float]
    cost_s: Mapping[Plan, float]
    program: Mapping[Plan, str]
    noise: float

    @property
    def best_s(self) -> float:
        return min(self.step_s.values())

    @property
    def sweep_s(self) -> float:
        """Device seconds of the whole sweep, each program once."""
        return sum({self.program[plan]: cost for plan, cost in self.cost_s.items()}.values())

    def regret(self, plan: Plan) -> float:
        """How much slower than the best; nothing if that is inside the noise."""
        lost = self.raw_regret(plan)
        return lost if lost > self.noise else 0.0

    def raw_regret(self, plan: Plan) -> float:
        """How much slower than the fastest median, which is one that luck has helped."""
        return self.step_s[plan] / self.best_s - 1


def record_of(rows: Sequence[Row], plans: Sequence[Plan]) -> Record:
    """Reads the rows of plans that were measured in every round."""
    by_text = {str(plan): plan for plan in plans}
    rounds = max(len(row.rounds_s) for row in rows)
    full = [row for row in rows if len(row.rounds_s) == rounds and row.plan in by_text]
    logs = np.log([row.rounds_s for row in full])
    middles = np.median(logs, axis=1, keepdims=True)
    drift = np.median(logs - middles, axis=0, keepdims=True)
    steady = logs - drift
    medians = np.median(steady, axis=1)
    return Record(
        step_s={by_text[row.plan]: float(np.exp(at)) for row, at in zip(full, medians)},
        cost_s={by_text[row.plan]: sum(row.visits_s) for row in full},
        program={by_text[row.plan]: row.fingerprint for row in full},
        noise=_noise(steady),
    )


def _noise(logs: np.ndarray) -> float:
    """The difference of two medians of rounds that chance alone exceeds once in twenty times.

    The median of the plans' variances, since some plan is always disturbed.

    Args:
      logs: [plans, rounds] of log seconds.
    """
    freedom = logs.shape[1] - 1
    if freedom < 1:
        return 0.0
    expected = float(stats.chi2.ppf(0.5, freedom)) / freedom
    spread = (float(np.median(logs.var(axis=1, ddof=1))) / expected) ** 0.5
    of_median = _MEDIAN_SPREAD * spread / logs.shape[1] ** 0.5
    return float(np.expm1(_CONFIDENCE * 2**0.5 * of_median))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a strategy found.

    Attributes:
      plan: the fastest that it measured.
      measured: how many programs it measured.
      spent_s: device seconds.
    """

    plan: Plan
    measured: tuple[Plan, ...]
    spent_s: float


class Purse:
    """Device seconds to spend on a recorded table; the same program is paid for once."""

    def __init__(self, record: Record, budget_s: float) -> None:
        self.record = record
        self.left_s = budget_s
        self.spent_s = 0.0
        self.bought: dict[str, Plan] = {}

    def measure(self, plan: Plan) -> float | None:
        """Seconds of a step; None if there is not enough left for it."""
        program = self.record.program[plan]
        if program not in self.bought:
            cost_s = self.record.cost_s[plan]
            if cost_s > self.left_s and self.bought:
                return None
            self.left_s -= cost_s
            self.spent_s += cost_s
            self.bought[program] = plan
        return self.record.step_s[plan]

    def found(self) -> Found:
        plans = tuple(self.bought.values())
        best = min(plans, key=lambda plan: self.record.step_s[plan])
        return Found(plan=best, measured=plans, spent_s=self.spent_s)


def search(record: Record, estimates: Mapping[Plan, Estimated], usual: Plan) -> Found:
    """The choices of `automesh search`: races of the most promising, each refining the model."""
    plans = tuple(record.step_s)
    start = SearchState(
        plans=plans,
        estimates={plan: estimates[plan] for plan in plans if plan in estimates},
        programs={},
        results={},
        baseline=(),
        usual=usual,
        chip=chip_for("cpu", "cpu"),
        top=TOP,
        device_memory_bytes=0,
    )
    purse = Purse(record, SHARE * record.sweep_s)
    measured: dict[Plan, Outcome] = {}
    chosen = to_compile(start, wanted=COMPILES_PER_FINALIST * TOP)
    compiled: dict[Plan, Outcome] = {plan: _compiled(record, plan) for plan in chosen}
    race = finalists(start.knowing(compiled, measured))
    while race:
        for plan in race:
            seconds = purse.measure(plan)
            if seconds is None:
                return purse.found()
            measured[plan] = _measured(seconds, record.noise)
        state = start.knowing(compiled, measured)
        likely = challengers(state)[:TOP]
        compiled |= {plan: _compiled(record, plan) for plan in likely}
        race = raceable(start.knowing(compiled, measured), likely)
    return purse.found()


def _compiled(record: Record, plan: Plan) -> Compiled:
    """As far as the choices depend on it: which program it is."""
    return Compiled(
        fingerprint=record.program[plan],
        memory=Memory(
            argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0, peak_bytes=0
        ),
        counts=Counts(flops=0, hbm_bytes=0, collectives=()),
        step_s=0.0,
        compile_s=0.0,
    )


def _measured(seconds: float, noise: float) -> Measured:
    return Measured(
        step_s=seconds,
        interval_s=(seconds * (1 - noise), seconds * (1 + noise)),
        rounds_s=(seconds,),
        losses=(),
        numerics="agree",
        numerics_detail="",
        values="user",
        raced_out=False,
        confirmed=False,
        peak_bytes=0,
    )


def at_random(record: Record, budget_s: float, seed: int) -> Found:
    """Plans drawn at random, none twice."""
    purse = Purse(record, budget_s)
    plans = list(record.step_s)
    random.Random(seed).shuffle(plans)
    for plan in plans:
        if purse.measure(plan) is None:
            break
    return purse.found()


def by_tpe(record: Record, budget_s: float, seed: int, *, by_axis: bool) -> Found:
    """Optuna's TPE sampler, told the time of every plan that it asks for.

    Args:
      by_axis: suggest the size of every axis by itself, where sizes that give no legal plan cost
        nothing and are told as failures; else the mesh as one choice among the legal ones.
    """
    purse = Purse(record, budget_s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        suggest = _by_axis(record) if by_axis else _by_mesh(record)
        # Many suggestions repeat what is known, or are not legal: neither takes device time.
        for _ in range(40 * len(record.step_s)):
            trial = study.ask()
            plan = suggest(trial)
            if plan is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            seconds = purse.measure(plan)
            if seconds is None:
                break
            study.tell(trial, seconds)
            if len(purse.bought) == len(set(record.program.values())) or len(study.trials) > 600:
                break
    if not purse.bought:  # never a legal plan: then one at random, as a user would
        return at_random(record, budget_s, seed)
    return purse.found()


Suggest = Callable[[optuna.Trial], Plan | None]


def _by_mesh(record: Record) -> Suggest:
    known = {(plan.mesh, plan.knobs): plan for plan in record.step_s}
    meshes = sorted({plan.mesh for plan in record.step_s})
    knobs = _knob_values(record)

    def suggest(trial: optuna.Trial) -> Plan | None:
        mesh = str(trial.suggest_categorical("mesh", meshes))
        return known.get((mesh, _suggested(trial, knobs)))

    return suggest


def _by_axis(record: Record) -> Suggest:
    known = {(tuple(plan.sizes.values()), plan.knobs): plan for plan in record.step_s}
    names = [axis.name for axis in next(iter(record.step_s)).axes]
    devices = next(iter(record.step_s)).num_devices
    knobs = _knob_values(record)

    def suggest(trial: optuna.Trial) -> Plan | None:
        most = devices.bit_length() - 1
        sizes = tuple(2 ** trial.suggest_int(f"log2 {name}", 0, most) for name in names)
        return known.get((sizes, _suggested(trial, knobs)))

    return suggest


def _knob_values(record: Record) -> dict[str, list[bool | int | float | str]]:
    values: dict[str, list[bool | int | float | str]] = {}
    for plan in record.step_s:
        for name, value in plan.knobs:
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return values


def _suggested(
    trial: optuna.Trial, knobs: Mapping[str, Sequence[bool | int | float | str]]
) -> tuple[tuple[str, bool | int | float | str], ...]:
    # By place in the list: what Optuna gives back has lost its type.
    return tuple(
        (name, of[int(trial.suggest_categorical(name, range(len(of))))])
        for name, of in knobs.items()
    )


def by_rule(record: Record, usual: Plan) -> Plan:
    """The largest fsdp that divides, all else at its default."""
    plain = [plan for plan in record.step_s if plan.knobs == usual.knobs]
    return max(plain, key=lambda plan: plan.sizes.get("fsdp", 1))


def ordered(record: Record, predicted_s: Mapping[Plan, float]) -> tuple[float, int]:
    """Share of the pairs whose times differ for certain that a prediction has in order, and their
    number."""
    plans = [plan for plan in record.step_s if plan in predicted_s]
    least = np.log1p(max(APART, record.noise))
    real = np.log([record.step_s[plan] for plan in plans])
    guess = np.log([predicted_s[plan] for plan in plans])
    first, second = np.triu_indices(len(plans), 1)
    differs = np.abs(real[first] - real[second]) > least
    agrees = (real[first] - real[second]) * (guess[first] - guess[second]) > 0
    return float(agrees[differs].mean()) if differs.any() else 1.0, int(differs.sum())


def refined(
    record: Record, estimates: Mapping[Plan, Estimated], measured: Sequence[Plan]
) -> dict[Plan, float]:
    """The predictions after a search has measured some plans."""
    plans = [plan for plan in record.step_s if plan in estimates]
    subjects = [
        PredictedPlan(
            predicted_s=estimates[plan].step_s,
            causes=estimates[plan].causes,
            settings=(*plan.knobs, *plan.compiler_options),
        )
        for plan in plans
    ]
    times = {plans.index(plan): record.step_s[plan] for plan in measured if plan in plans}
    fitted = refine(subjects, times)
    return {plan: float(seconds) for plan, seconds in zip(plans, fitted.step_s)}


def figures(
    record: Record, estimates: Mapping[Plan, Estimated], usual: Plan, *, seeds: int
) -> dict[str, float | int]:
    """All figures of one example."""
    predicted = {plan: estimates[plan].step_s for plan in record.step_s if plan in estimates}
    ranking = sorted(predicted, key=lambda plan: predicted[plan])
    found = search(record, estimates, usual)
    after = refined(record, estimates, found.measured)
    pairs, number = ordered(record, predicted)
    budget_s = found.spent_s
    drawn = [at_random(record, budget_s, seed) for seed in range(seeds)]
    # Of two ways to ask it, the one that does better.
    sampled = min(
        (
            [by_tpe(record, budget_s, seed, by_axis=way) for seed in range(seeds // 5)]
            for way in (False, True)
        ),
        key=lambda found: _mean(record.raw_regret, found),
    )
    by_thumb = by_rule(record, usual)
    times = sorted(record.step_s.values())
    return {
        "plans": len(record.step_s),
        "programs": len(set(record.program.values())),
        "estimated": len(predicted),
        "spread": round(times[-1] / times[0], 3),
        "noise": round(record.noise, 4),
        "top1_regret": round(record.regret(ranking[0]), 4),
        "top5_regret": round(min(record.regret(plan) for plan in ranking[:5]), 4),
        "raw_top1_regret": round(record.raw_regret(ranking[0]), 4),
        "raw_top5_regret": round(min(record.raw_regret(plan) for plan in ranking[:5]), 4),
        "raw_search_regret": round(record.raw_regret(found.plan), 4),
        "pairs": number,
        "pairs_ordered": round(pairs, 4),
        "refined_top1_regret": round(record.regret(min(after, key=lambda plan: after[plan])), 4),
        "refined_pairs_ordered": round(ordered(record, after)[0], 4),
        "search_regret": round(record.regret(found.plan), 4),
        "search_measured": len(found.measured),
        "cost_ratio": round(found.spent_s / record.sweep_s, 4),
        "sweep_device_s": round(record.sweep_s, 1),
        "tpe_regret": round(_mean(record.regret, sampled), 4),
        "random_regret": round(_mean(record.regret, drawn), 4),
        "rule_regret": round(record.regret(by_thumb), 4),
        "raw_tpe_regret": round(_mean(record.raw_regret, sampled), 4),
        "raw_random_regret": round(_mean(record.raw_regret, drawn), 4),
        "raw_rule_regret": round(record.raw_regret(by_thumb), 4),
    }


def _mean(regret: Callable[[Plan], float], found: Sequence[Found]) -> float:
    return statistics.fmean(regret(one.plan) for one in found)
