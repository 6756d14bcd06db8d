"""The joint result of races and fresh processes: compares every measured plan with the exported
one.

All ratios have one denominator. Plans that ran in the same fresh processes as the exported plan are
compared by these. Plans that only ran in a race are compared by the rounds that they share with the
exported plan, or with the baseline, whose own ratio to the exported plan is known from fresh
processes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failure, Measured, Numerics, Outcome
from automesh.report.comparison import Comparison, Verdict, Verification
from automesh.tuner.measure.final import FEWEST, LOOKS, Final, FinalRules, verdict_of
from automesh.tuner.measure.fresh_processes import MOST_PASSES
from automesh.tuner.measure.race import Standing
from automesh.tuner.measure.schedule import Calibration
from automesh.tuner.measure.statistics import Ratio, paired_ratio

_NARROW = 0.9  # confidence of two one-sided tests at 5 %
_KNOWN: tuple[Verdict, ...] = ("slower", "equal", "no faster")
Compared = tuple[tuple[Plan, Comparison], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRecord:
    """A finished race, as the study stores it.

    Attributes:
      machine: the machine that ran it.
      rounds: seconds per step of every finalist, round by round.
      beaten: finalists that the race has shown to be slower than another.
      left: finalists that failed during the race.
      sentence: why it ended.
    """

    machine: str
    rounds: tuple[tuple[Plan, tuple[float, ...]], ...]
    beaten: tuple[Plan, ...]
    left: tuple[Plan, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A fresh process, as the study stores it.

    Attributes:
      machine: the machine that ran it.
      seconds: seconds per step of each plan in it.
      took_s: seconds from its start to its end.
      passes: the most passes over its plans; in studies without this entry, the most that are
        allowed.
    """

    machine: str
    seconds: tuple[tuple[Plan, float], ...]
    took_s: float
    passes: int = MOST_PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All races and processes of a search, in order of time."""

    races: tuple[RaceRecord, ...] = ()
    processes: tuple[ProcessRecord, ...] = ()
    failed: tuple[tuple[Plan, Failure], ...] = ()

    @property
    def plans(self) -> frozenset[Plan]:
        """All plans that were in a race or a process."""
        raced = [plan for race in self.races for plan, _ in race.rounds]
        return frozenset([*raced, *(plan for one in self.processes for plan, _ in one.seconds)])

    def of_machine(self, machine: str) -> Records:
        """Returns the records of one machine: seconds of different machines cannot be compared."""
        return Records(
            races=tuple(race for race in self.races if race.machine == machine),
            processes=tuple(process for process in self.processes if process.machine == machine),
            failed=self.failed,
        )

    def final(
        self,
        *,
        rules: FinalRules,
        baseline: Sequence[Plan],
        incumbent: Sequence[Plan],
        excluded: Collection[Plan] = (),
    ) -> Final:
        """Returns the rows of the processes; without the plans in `excluded` and those that
        failed."""
        out = {*excluded, *(plan for plan, _ in self.failed)}
        rows = [
            {plan: seconds for plan, seconds in process.seconds if plan not in out}
            for process in self.processes
        ]
        return Final(
            rules=rules,
            baseline=tuple(baseline),
            incumbent=tuple(incumbent),
            rows=[dict(row) for row in rows],
            failed=out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan to export.

    Attributes:
      winner: the exported plan: the baseline, unless another was shown to be faster.
      comparisons: every other measured plan, compared with it.
      confirmed: figures from fresh processes; only these are exported.
      failed: plans that failed in them.
      sentence: how races and processes ended.
      made: UTC time in ISO 8601.
    """

    winner: Plan
    verification: Verification
    comparisons: Compared
    confirmed: tuple[tuple[Plan, Measured], ...]
    sentence: str
    made: str
    failed: tuple[tuple[Plan, Failure], ...] = ()

    @property
    def undecided(self) -> Compared:
        """Plans of which it is not known whether they are faster, the likeliest first."""
        return tuple(pair for pair in self.comparisons if pair[1].verdict == "undecided")


def record_of(standings: Sequence[Standing[Plan]], *, machine: str, sentence: str) -> RaceRecord:
    """Returns a race as the study stores it."""
    return RaceRecord(
        machine=machine,
        rounds=tuple((standing.finalist, standing.rounds_s) for standing in standings),
        beaten=tuple(standing.finalist for standing in standings if standing.state == "slower"),
        left=tuple(standing.finalist for standing in standings if standing.state == "left"),
        sentence=sentence,
    )


def raced_against(
    races: Sequence[RaceRecord], final: Final, reference: Plan, *, out: Collection[Plan] = ()
) -> Compared:
    """Compares plans with `reference` by races alone; returns the likeliest to be faster first.

    Args:
      out: plans that are left out.
    """
    found: dict[Plan, Comparison] = {}
    for race in races:
        rounds = dict(race.rounds)
        for plan, values in race.rounds:
            is_asked = plan != reference and plan not in out and plan not in final.failed
            if not is_asked or not values:
                continue
            ratios = _ratios(values, rounds, final, reference)
            if ratios is not None:
                # A later race has compared the plan with better ones, one of which may have failed
                # since, or may not be searched any more.
                is_whole = not any(one in final.failed for one in rounds)
                is_beaten = is_whole and plan in race.beaten
                found[plan] = _comparison(*ratios, is_beaten=is_beaten, rules=final.rules)
    return _fastest_first(found)


def _fastest_first(found: Mapping[Plan, Comparison]) -> Compared:
    return tuple(sorted(found.items(), key=lambda pair: (pair[1].ratio, str(pair[0]))))


def _ratios(
    values: Sequence[float],
    rounds: Mapping[Plan, Sequence[float]],
    final: Final,
    reference: Plan,
) -> tuple[Ratio, Ratio] | None:
    """Compares a plan with the reference: returns the ratio with a 95 % interval, and with the
    interval for equality; None if unknown."""
    if rounds.get(reference):
        own = rounds[reference]
        return paired_ratio(values, own), paired_ratio(values, own, confidence=_NARROW)
    for between in final.baseline:
        known = final.compare(between, reference)
        if rounds.get(between) and known.processes >= FEWEST:
            own, (low, high) = rounds[between], known.interval
            link = Ratio(value=known.ratio, low=low, high=high)
            return (
                _chained(paired_ratio(values, own), link),
                _chained(paired_ratio(values, own, confidence=_NARROW), link),
            )
    return None


def _chained(first: Ratio, second: Ratio) -> Ratio:
    """Returns the product of two independent ratios; the half widths of their intervals add as
    squares."""
    value = first.value * second.value
    below = math.hypot(_log(first.value, first.low), _log(second.value, second.low))
    above = math.hypot(_log(first.high, first.value), _log(second.high, second.value))
    return Ratio(value=value, low=value * math.exp(-below), high=value * math.exp(above))


def _log(over: float, under: float) -> float:
    return math.log(over / under) if under > 0.0 and math.isfinite(over) else math.inf


def _comparison(ratio: Ratio, narrow: Ratio, *, is_beaten: bool, rules: FinalRules) -> Comparison:
    verdict = verdict_of(_logs(ratio), _logs(narrow), rules.margin)
    if is_beaten and verdict not in _KNOWN:
        verdict = "no faster"
    if verdict == "faster":
        verdict = "undecided"  # A race alone cannot prove this: fresh processes must.
    high = ratio.high if math.isfinite(ratio.high) else ratio.value
    return Comparison(
        verdict=verdict,
        ratio=ratio.value,
        interval=(ratio.low, high),
        basis="race",
        more_processes=LOOKS[0] if verdict == "undecided" else 0,
    )


def _logs(ratio: Ratio) -> tuple[float, float]:
    low = math.log(ratio.low) if ratio.low > 0.0 else -math.inf
    return low, math.log(ratio.high) if math.isfinite(ratio.high) else math.inf


def comparisons_of(records: Records, final: Final, exported: Plan, *, process_s: float) -> Compared:
    """Compares every measured plan with the exported one, the fastest first.

    Args:
      process_s: seconds of a process, from which the time for a decision follows.
    """
    found = dict(raced_against(records.races, final, exported))
    for plan in dict.fromkeys(plan for row in final.rows for plan in row):
        comparison = final.compare(plan, exported)
        if plan == exported or plan in final.failed or comparison.processes < FEWEST:
            continue
        found[plan] = comparison
    return _fastest_first(
        {plan: replace(one, more_s=one.more_processes * process_s) for plan, one in found.items()}
    )


def _ending_of(decision: Decision, unraced: int) -> str:
    """Returns a sentence about the end of a search whose time was used up."""
    waiting = len(decision.undecided) + unraced
    if not waiting:
        return "all of them are decided"
    return (
        f"the time was used up before {waiting} of them {'was' if waiting == 1 else 'were'} decided"
    )


def verification_of(final: Final, exported: Plan, comparisons: Compared) -> Verification:
    """Compares the exported plan with the script's own."""
    kept = exported in final.baseline
    own = [] if kept else [(plan, one) for plan, one in comparisons if plan in final.baseline]
    lows = [one.interval[0] for _, one in comparisons]
    is_bounded = all(low > 0.0 for low in lows)
    most = max((1 / low - 1 for low in lows if low > 0.0), default=0.0)
    most_faster = (max(most, 0.0),) if is_bounded else ()
    for plan, gain in own:
        if gain.processes:
            return Verification(
                processes=final.count(exported, plan),
                baseline=str(plan),
                gain=gain,
                most_faster=most_faster,
            )
    return Verification(
        processes=final.count(exported),
        baseline=str(exported) if kept else "",
        most_faster=most_faster,
    )


# The end of a race and its fresh processes: figures as outcomes, and the plan to export.


def measured_outcome(
    calibration: Calibration,
    compiled: Outcome | None,
    numerics: tuple[Numerics, str],
    rounds_s: Sequence[float],
    *,
    step_s: float,
    interval_s: tuple[float, float],
    raced_out: bool = False,
    confirmed: bool = False,
) -> Measured:
    """Joins the measurements of a plan with the results of its first visit and of the compiler."""
    first = calibration.first
    peak = first.peak_bytes
    if not peak and isinstance(compiled, Compiled):
        peak = compiled.memory.peak_bytes
    # A single round bounds nothing, so both ends are its own value.
    span = interval_s if interval_s[1] != float("inf") else (step_s, step_s)
    return Measured(
        step_s=step_s,
        interval_s=span,
        rounds_s=tuple(rounds_s),
        losses=first.losses,
        numerics=numerics[0],
        numerics_detail=numerics[1],
        values=first.values,
        raced_out=raced_out,
        confirmed=confirmed,
        peak_bytes=peak,
    )


def decide(
    records: Records,
    final: Final,
    exported: Plan,
    confirmed: Mapping[Plan, Measured],
    *,
    process_s: float,
    sentence: str,
    waiting: int = 0,
) -> Decision:
    """Decides what is exported, and compares everything else with it.

    Args:
      exported: the plan that `final` exports.
      confirmed: figures from fresh processes, including those of `exported`.
      process_s: seconds of a process.
      sentence: how the search ended; if empty, the time was used up before everything was decided.
      waiting: plans that should have been raced, but were not.
    """
    compared = comparisons_of(records, final, exported, process_s=process_s)
    decision = Decision(
        winner=exported,
        verification=verification_of(final, exported, compared),
        comparisons=compared,
        confirmed=tuple(confirmed.items()),
        sentence=sentence,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        failed=records.failed,
    )
    return decision if sentence else replace(decision, sentence=_ending_of(decision, waiting))
