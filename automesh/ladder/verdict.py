"""What a race and its confirmation decided, kept in the study so that it is not decided twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from automesh.ladder.racing import Standing
from automesh.ladder.ranking import Comparison, may_be_exported
from automesh.mesh.axes import Plan
from automesh.outcomes import Measured, Outcome
from automesh.results.result import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceVerdict:
    """How the last race ended.

    Attributes:
      winner: the fastest, before the confirmation.
      comparisons: every other finalist against it.
      sentence: why the race ended.
    """

    winner: Plan
    comparisons: tuple[Comparison, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """A race that was run.

    Attributes:
      standings: of those that ran, in earlier races too.
      was_decided: False if the budget cut it short.
    """

    verdict: RaceVerdict
    standings: Mapping[Plan, Standing[Plan]]
    was_decided: bool

    def kept(self, rivals: Sequence[Plan]) -> list[Plan]:
        """Those of `rivals` that were not shown to be slower than the winner."""
        slower = {one.plan for one in self.verdict.comparisons if one.verdict == "slower"}
        return [plan for plan in rivals if plan not in slower and plan != self.verdict.winner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan to export.

    Attributes:
      winner: the race's winner, or the baseline where that is as fast within the noise.
      confirmed: figures from fresh processes, which alone are exported.
      made: UTC time in ISO 8601.
    """

    winner: Plan
    verification: Verification
    race: RaceVerdict
    confirmed: tuple[tuple[Plan, Measured], ...]
    made: str


def comparison_of(standing: Standing[Plan]) -> Comparison:
    """A finalist against the winner; it must have run a round that the winner ran, too."""
    ratio = standing.to_winner
    assert ratio is not None
    high = ratio.high if ratio.high != float("inf") else ratio.value
    return Comparison(
        plan=standing.finalist,
        verdict="slower" if standing.verdict == "slower" else "tie",
        ratio=ratio.value,
        interval=(ratio.low, high),
    )


def merged(before: Raced, after: Raced) -> Raced:
    """The later race, with what the earlier one said of others.

    What it said of them against its winner only holds if both have the same.
    """
    standings = {**before.standings, **after.standings}
    if before.verdict.winner != after.verdict.winner:
        return replace(after, standings=standings)
    known = {one.plan: one for one in (*before.verdict.comparisons, *after.verdict.comparisons)}
    verdict = replace(after.verdict, comparisons=tuple(known.values()))
    return replace(after, verdict=verdict, standings=standings)


def is_compared(decision: Decision | None, rivals: Sequence[Plan]) -> bool:
    """Whether a decision says how the winner compares with all of `rivals`."""
    known = {} if decision is None else dict(decision.confirmed)
    return all(plan in known for plan in rivals)


def undecided_of(decision: Decision | None, done: Mapping[Plan, Outcome]) -> list[Plan]:
    """Measured plans of which one may be faster than what was decided for.

    Those are left behind by a search that was stopped between a race and its confirmation.
    """
    eligible = {plan: one for plan, one in done.items() if may_be_exported(one)}
    found = {plan: one for plan, one in eligible.items() if isinstance(one, Measured)}
    if decision is None:
        upper_s = min((one.interval_s[1] for one in found.values()), default=0.0)
        return [plan for plan, one in found.items() if one.interval_s[0] <= upper_s]
    settled = {decision.winner, *(one.plan for one in decision.race.comparisons)}
    settled |= {plan for plan, _ in decision.confirmed}
    best_s = dict(decision.confirmed)[decision.winner].interval_s[0]
    return [
        plan for plan, one in found.items() if plan not in settled and one.interval_s[1] < best_s
    ]


def kept_or_beaten(
    winner: Plan,
    baseline: Sequence[Plan],
    verification: Verification,
    measured: Mapping[Plan, Outcome],
) -> Plan:
    """The baseline if the winner's advantage over it is inside the noise, else the winner.

    Changing a mesh for nothing costs somebody a review, and the script's own is known to train.
    """
    for plan in baseline:
        if verification.is_tie and may_be_exported(measured.get(plan)):
            return plan
    return winner
