"""What races and fresh processes say together: every measured plan against the exported one.

One denominator: plans that ran in the same fresh processes as the exported plan are compared by
those. What only a race has seen is compared by the rounds that it shares with the exported plan, or
with the baseline, whose own ratio to the exported plan is then known from fresh processes.
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
    """A race that is over, kept in the study.

    Attributes:
      machine: where it was run.
      rounds: seconds per step of every finalist, round by round.
      beaten: finalists that the race has shown to be slower than another.
      left: finalists that failed on the way.
      sentence: why it ended.
    """

    machine: str
    rounds: tuple[tuple[Plan, tuple[float, ...]], ...]
    beaten: tuple[Plan, ...]
    left: tuple[Plan, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A fresh process, kept in the study.

    Attributes:
      machine: where it ran.
      seconds: per step, of each plan in it.
      took_s: from its start to its end.
      passes: over its plans, at most; in studies that do not say it as many as there may be.
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
        """All that were in a race or a process."""
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
        """Returns the rows of the processes; those of `excluded` and of what failed are left
        out."""
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
      comparisons: every other plan that was measured, against it.
      confirmed: figures from fresh processes, which alone are exported.
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
        """Plans of which it is open whether they are faster, the likeliest first."""
        return tuple(pair for pair in self.comparisons if pair[1].verdict == "undecided")


def record_of(standings: Sequence[Standing[Plan]], *, machine: str, sentence: str) -> RaceRecord:
    """Returns a race as it is kept."""
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
    """What races alone say of plans against `reference`, the likeliest to be faster first.

    Args:
      out: plans that are not asked about.
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
                # A later race has seen the plan beside better ones.
                # Perhaps by one that has failed since, or is not searched any more.
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
    """Returns a plan against the reference: at 95 %, and at the level of equality; None if
    unknown."""
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
    """Returns the product of two independent ratios; halves of the intervals add as squares."""
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
        verdict = "undecided"  # A race is no evidence of that: fresh processes have to say so.
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
    """Every plan that was measured against the exported one, the fastest first.

    Args:
      process_s: what a process takes, to say what deciding would.
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
    """How a search ended whose time was used up."""
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


# The end of a race and of its fresh processes: figures as outcomes, and the plan to export.


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
    """What was measured of a plan, with what its first visit and the compiler said."""
    first = calibration.first
    peak = first.peak_bytes
    if not peak and isinstance(compiled, Compiled):
        peak = compiled.memory.peak_bytes
    # A single round bounds nothing; its own value stands for both ends.
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
    """What is exported, with what everything else was compared to.

    Args:
      exported: as `final` says.
      confirmed: figures from fresh processes, those of `exported` among them.
      process_s: what a process takes.
      sentence: how it ended; if empty, time was used up before all was decided.
      waiting: plans that were to be raced and were not.
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
