"""What a race and its confirmation decided, kept in the study so that it is not decided twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
