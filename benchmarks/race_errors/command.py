"""How often a race is wrong: identical finalists called different, a slower one not found.

First simulated races under six kinds of noise, of a machine and of each plan by itself, by the race
of the package, by the former one and by a fixed number of rounds; how often 95 % intervals of a
ratio hold the truth; and simulated finals in fresh processes, which decide what is exported. Then
real races of five, run by the package's own driver through a worker process on virtual CPU devices:
a third of them have five identical finalists, in the others one does 10 % or 5 % more of the same
work. The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from scipy import stats

from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failure
from automesh.program.nouns import Entry, Inspection, StepRef
from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.racing import RaceReport, run_race
from automesh.tuner.measure.schedule import (
    Calibration,
    Subject,
    VisitRules,
    calibrate,
)
from automesh.units import format_percent, format_seconds, format_wait
from automesh.worker.messages import InspectJob, Surroundings
from automesh.worker.pool import Pool
from benchmarks.race_errors.finals import METHODS as FINALS
from benchmarks.race_errors.finals import figures
from benchmarks.race_errors.noise import (
    IN_TIME,
    METHODS,
    NOISES,
    PROCESSES,
    SAMPLINGS,
    Sampling,
    coverage,
    rates,
)
from benchmarks.support.visitors import Visitors, ask

FINALISTS = 5
DEVICES = 2
RACES_PER_PROCESS = 4  # a process has luck of its own (addresses): races should not all share it
# As a search measures, but for the warm-up: these steps are warm after one.
RULES = VisitRules(warmup_s=0.002, loss_steps=1, timeout_s=120.0)

SCRIPT = '''\
"""A train step of `20 + extra` equal matrix products; `copy` changes nothing."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

WIDTH, ROWS = 128, 256


def build(mesh, copy=0, extra=0):
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(weights, batch):
        def layer(x, _):
            return jnp.tanh(x @ weights), None

        x, _ = jax.lax.scan(layer, batch, length=20 + extra)
        loss = jnp.mean(x**2)
        return weights * (1.0 - 1e-6 * loss), loss

    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=whole)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    return step, (weights, batch)
'''
EXTRA = 2  # of 20 equal products: 10 % more work by construction
LITTLE = 1  # 5 %
EQUALS = 5  # simulated races of equals for each with a slower one, of the package's race


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the races showed.

    Attributes:
      slower: finalists wrongly called slower, one number per race of identical ones.
      found: whether the one that is 10 % slower was called so, one per race that had it.
      found_little: likewise for 5 %.
      rounds: rounds until the end, one per race.
      loser_rounds: rounds until the slower one was out.
      ratios: how much slower the slower one was measured.
      noise: relative spread of a finalist's rounds about those of its rivals.
    """

    slower: list[int] = field(default_factory=list[int])
    found: list[bool] = field(default_factory=list[bool])
    found_little: list[bool] = field(default_factory=list[bool])
    rounds: list[int] = field(default_factory=list[int])
    loser_rounds: list[int] = field(default_factory=list[int])
    ratios: list[float] = field(default_factory=list[float])
    noise: list[float] = field(default_factory=list[float])


def plan(copy: int, extra: int) -> Plan:
    """A finalist: the same mesh, a copy of the same program, or one with more work."""
    axis = MeshAxis(name="dp", ici=DEVICES)
    return Plan(axes=(axis,), knobs=(("copy", copy), ("extra", extra)))


def inspect(pool: Pool, directory: Path) -> Subject:
    """Writes the script and reads what a visit to it needs."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    entry = Entry(kind="script", location=str(script))
    found = ask(pool, InspectJob(step=StepRef(entry=entry), axis_names=("dp",)), 120.0)
    if not isinstance(found, Inspection):
        raise SystemExit(f"the benchmark's own script cannot be inspected: {found}")
    cache = directory / "cache"
    return Subject(
        step=StepRef(entry=entry, axis_types=found.axis_types, facts=found.facts),
        cache_dir=str(cache),
    )


def calibrated(visitors: Visitors, subject: Subject, plans: list[Plan]) -> dict[Plan, Calibration]:
    """First visits in a fresh process."""
    visitors.recycle()
    found: dict[Plan, Calibration] = {}
    for one in plans:
        calibration = calibrate(visitors, subject, one, rules=RULES, clock=time.monotonic)
        if not isinstance(calibration, Calibration):
            raise SystemExit(f"the benchmark's own step failed: {calibration}")
        found[one] = calibration
    return found


def race(
    visitors: Visitors, subject: Subject, calibrations: dict[Plan, Calibration], seed: int
) -> RaceReport:
    """One race over the calibrated plans."""

    def fail(one: Plan, failure: Failure) -> None:
        raise SystemExit(f"the benchmark's own step `{one}` failed: {failure}")

    return run_race(
        visitors,
        subject,
        Race(tuple(calibrations), rules=RaceRules(), seed=seed),
        calibrations,
        rules=RULES,
        deadline_s=time.monotonic() + 600.0,
        first_round_s=time.monotonic() + 600.0,
        clock=time.monotonic,
        on_round=lambda *_: None,
        on_failure=fail,
    )


def count(tally: Tally, report: RaceReport, slow: Plan | None) -> None:
    """Adds a race to the tally; `slow` is the finalist with more work, if there is one."""
    called = {one.finalist for one in report.standings if one.state == "slower"}
    tally.rounds.append(max(len(one.rounds_s) for one in report.standings))
    for one in report.standings:
        if one.state == "open" and report.winner is not None:
            ratios = [a / b for a, b in zip(one.rounds_s, report.winner.rounds_s)]
            # Of a ratio of two: each has its share of the variance.
            tally.noise.append(1.4826 * stats.median_abs_deviation(ratios) / 2**0.5)
    if slow is None:
        tally.slower.append(len(called))
        return
    if dict(slow.knobs)["extra"] == LITTLE:
        tally.found_little.append(slow in called)
        return
    tally.found.append(slow in called)
    loser = next(one for one in report.standings if one.finalist == slow)
    if slow in called and loser.to_winner is not None:
        tally.loser_rounds.append(len(loser.rounds_s))
        tally.ratios.append(loser.to_winner.value)


def summary(tally: Tally, seconds: float) -> dict[str, float | int]:
    """The figures; comparisons are finalists of races of identical ones."""
    comparisons = FINALISTS * len(tally.slower)
    wrong = sum(tally.slower)
    upper = stats.binomtest(wrong, comparisons).proportion_ci(method="wilson").high
    return {
        "races_identical": len(tally.slower),
        "races_with_slower": len(tally.found),
        "comparisons": comparisons,
        "wrongly_different": wrong,
        "races_wrong": sum(number > 0 for number in tally.slower),
        "rounds_mean": round(statistics.mean(tally.rounds), 1),
        "rounds_until_found_mean": round(statistics.mean(tally.loser_rounds or [0]), 1),
        "slower_measured": round(statistics.median(tally.ratios or [0.0]), 4),
        "round_noise": round(statistics.median(tally.noise or [0.0]), 4),
        "seconds": round(seconds),
        "false_positive_upper": round(float(upper), 4),
        "false_positive_rate": round(wrong / comparisons, 4),
        "detection_rate_5_percent": round(statistics.mean(tally.found_little or [0]), 4),
        "detection_rate": round(statistics.mean(tally.found), 4),
    }


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def simulate(races: int, seed: int) -> dict[str, object]:
    """Simulated races of five and of ten at 2 and 5 % noise, and the coverage of intervals."""
    found: dict[str, object] = {}
    wrong: dict[str, float] = {}
    rounds: dict[str, dict[str, float]] = {}
    for where, kinds in (("machine", IN_TIME), ("plan", NOISES)):
        for kind, (finalists, size) in itertools.product(
            kinds, itertools.product((5, 10), (0.02, 0.05))
        ):
            case = f"{where}, {kind}, {finalists} finalists, {size:.0%}"
            for name, method, sampling in methods(where):
                one = rates(
                    METHODS[method],
                    kind,
                    races=races,
                    finalists=finalists,
                    size=size,
                    slower=(0.1, 0.05),
                    seed=seed,
                    sampling=sampling,
                    equals=EQUALS if method == "race" else 1,
                )
                said = {
                    "wrong": round(one.wrong, 4),
                    "found": {key: round(value, 4) for key, value in one.found.items()},
                    "rounds": {key: round(value, 1) for key, value in one.rounds.items()},
                    "visits": {key: round(value) for key, value in one.visits.items()},
                }
                found[f"{case}, {name}"] = said
                say(f"{case}, {name}: {said}")
                rounds.setdefault(case, {})[name] = one.rounds["10%"]
                if method == "race":
                    wrong[f"{case}, {name}"] = one.wrong
    found["summary"] = {**summary_of(wrong, rounds), "coverage": covered(races, seed)}
    say(f"summary: {found['summary']}")
    return found


def methods(where: str) -> list[tuple[str, str, Sampling]]:
    """Name, method and how it samples, for a machine's noise or that of each plan."""
    if where == "machine":
        return [(name, method, sampling) for name, (method, sampling) in SAMPLINGS.items()]
    return [(name, name, "own") for name in METHODS]


def summary_of(
    wrong: dict[str, float], rounds: dict[str, dict[str, float]]
) -> dict[str, float | dict[str, float]]:
    """What the package's race may be held to.

    Args:
      wrong: share of races of equals with a wrong verdict, by case.
      rounds: that one who is 10 % slower ran, by case and method.

    Returns:
      The most wrong, with and without the drift of each plan by itself; rounds beside those of the
      former method, over all cases of a machine's noise and for each.
    """
    own_drift = {case: value for case, value in wrong.items() if "drift" in case}
    others = {case: value for case, value in wrong.items() if case not in own_drift}
    timed = {case: values for case, values in rounds.items() if case.startswith("machine")}
    ratios = {case: values["race"] / values["former"] for case, values in timed.items()}
    spent = {
        name: sum(values[name] for values in timed.values())
        for name in ("race", "race, apart", "former")
    }
    return {
        "wrong_at_most": round(max(others.values()), 4),
        "wrong_under_drift_of_a_plan": round(max(own_drift.values()), 4),
        "rounds_to_former": round(spent["race"] / spent["former"], 3),
        "rounds_to_former_apart": round(spent["race, apart"] / spent["former"], 3),
        "rounds_to_former_by_case": {case: round(one, 3) for case, one in ratios.items()},
    }


def covered(races: int, seed: int) -> dict[str, dict[str, float]]:
    """How often 95 % intervals hold the truth, by noise and number of processes."""
    return {
        kind: {
            str(count): round(
                coverage(kind, processes=count, draws=20 * races, size=0.05, seed=seed), 4
            )
            for count in PROCESSES
        }
        for kind in NOISES
    }


def main(
    races: Annotated[int, typer.Option(min=0, help="Real races of each of the three sorts.")] = 60,
    simulated: Annotated[int, typer.Option(min=0, help="Simulated races of each sort.")] = 200,
    seed: Annotated[int, typer.Option(help="Of all shuffling.")] = 0,
    apart: Annotated[
        bool,
        typer.Option("--apart", help="Visit plans one after the other, as if memory were short."),
    ] = False,
) -> None:
    """Runs races of identical finalists and races with one slower, and counts the errors."""
    found = simulate(simulated, seed) if simulated else {}
    finals = simulate_finals(simulated, seed) if simulated else {}
    real = run_races(races, seed, is_together=not apart) if races else {}
    print(json.dumps({"simulated": found, "finals": finals, **real}))


def simulate_finals(finals: int, seed: int) -> dict[str, object]:
    """Finals of a baseline and two challengers, of which none or one is faster."""
    found: dict[str, object] = {}
    for kind in NOISES:
        for name, method in FINALS.items():
            for faster in (0.0, 0.03, 0.05, 0.1):
                one = figures(method, kind, finals=finals, size=0.05, faster=faster, seed=seed)
                found[f"{kind}, {name}, {faster:.0%} faster"] = one
                say(f"{kind}, {name}, one {faster:.0%} faster: {one}")
    return found


def run_races(races: int, seed: int, *, is_together: bool) -> dict[str, float | int]:
    """Real races on this machine.

    Args:
      is_together: sample plans in turns, as a search does where memory suffices.
    """
    began_s, tally, luck = time.monotonic(), Tally(), random.Random(seed)
    everyone = [plan(copy, 0) for copy in range(FINALISTS)]
    slow, little = plan(0, EXTRA), plan(0, LITTLE)
    with tempfile.TemporaryDirectory() as directory:
        surroundings = Surroundings(platforms="cpu", cpu_devices=DEVICES)
        with Pool(
            size=1,
            surroundings=surroundings,
            log_dir=Path(directory) / "logs",
            memory_limit_bytes=4 * 2**30,
        ) as pool:
            visitors, subject = Visitors(pool=pool), inspect(pool, Path(directory))
            subject = replace(subject, fits=lambda _: is_together)
            known: dict[Plan, Calibration] = {}
            for number in range(3 * races):
                if number % RACES_PER_PROCESS == 0:
                    known = calibrated(visitors, subject, [*everyone, slow, little])
                entrants, loser = list(everyone), (None, slow, little)[number % 3]
                if loser is not None:
                    entrants[luck.randrange(FINALISTS)] = loser
                chosen = {one: known[one] for one in entrants}
                report = race(visitors, subject, chosen, luck.randrange(2**31))
                count(tally, report, loser)
                tell(number, races, tally, report, time.monotonic() - began_s)
    return summary(tally, time.monotonic() - began_s)


def tell(number: int, races: int, tally: Tally, report: RaceReport, spent_s: float) -> None:
    """One line per race."""
    winner = report.winner
    assert winner is not None
    what = ("identical", "one 10 % slower", "one 5 % slower")[number % 3]
    found = (tally.found, tally.found_little)[number % 3 - 1]
    verdict = "found" if found and found[-1] else "not found"
    if number % 3 == 0:
        verdict = f"{tally.slower[-1]} wrong"
    left_s = spent_s / (number + 1) * (3 * races - number - 1)
    say(
        f"{number + 1:3}/{3 * races} {what:15} {verdict:10} {tally.rounds[-1]:2} rounds, "
        f"{report.ended}, {format_seconds(winner.step_s)}, "
        f"noise {format_percent(tally.noise[-1]) if tally.noise else '?'}, "
        f"{format_wait(left_s)} left"
    )
