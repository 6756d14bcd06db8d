"""The end of a race: its figures as outcomes, and the plan to export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from automesh.ladder.confirm import Confirmation, Figure
from automesh.ladder.racing import Standing
from automesh.ladder.verdict import Decision, RaceVerdict, kept_or_beaten
from automesh.ladder.visits import Calibration
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failure, Measured, Numerics, Outcome
from automesh.results.result import Verification


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


def final_outcome(
    calibration: Calibration,
    compiled: Outcome | None,
    numerics: tuple[Numerics, str],
    standing: Standing[Plan],
    figure: Figure | Failure | None,
) -> Outcome:
    """A finalist's outcome: of the confirmation if it took part in it, else of the race."""
    if isinstance(figure, Figure):
        return measured_outcome(
            calibration,
            compiled,
            numerics,
            figure.rounds_s,
            step_s=figure.step_s,
            interval_s=figure.interval_s,
            confirmed=True,
        )
    if figure is not None:
        return figure
    return measured_outcome(
        calibration,
        compiled,
        numerics,
        standing.rounds_s,
        step_s=standing.step_s,
        interval_s=standing.interval_s,
        raced_out=standing.verdict == "slower",
    )


def figures_of(
    confirmation: Confirmation, winner: Plan, baseline: Sequence[Plan]
) -> dict[Plan, Figure | Failure]:
    """What the confirmation says of the winner and of the baseline, as far as it says anything."""
    pairs = [(winner, confirmation.winner), *((plan, confirmation.baseline) for plan in baseline)]
    figures: dict[Plan, Figure | Failure] = {}
    for plan, figure in pairs:
        if figure is not None:
            figures.setdefault(plan, figure)
    return figures


def decide(
    verdict: RaceVerdict,
    confirmation: Confirmation,
    confirmed: Mapping[Plan, Measured],
    *,
    baseline: Sequence[Plan],
) -> Decision:
    """Winner or baseline: whichever is exported, with what it was compared to.

    Args:
      confirmed: figures from fresh processes, the winner's among them. They alone decide: that a
        race could not tell the two apart says less than five processes in which both ran.
    """
    ratio = confirmation.to_winner
    compared = [plan for plan in baseline if ratio is not None or plan == verdict.winner]
    verification = Verification(
        processes=len(confirmed[verdict.winner].rounds_s),
        baseline=str(compared[0]) if compared else "",
        speedup=ratio.value if ratio else 1.0,
        speedup_interval=(ratio.low, ratio.high) if ratio else (1.0, 1.0),
        is_tie=ratio is not None and ratio.low <= 1.0,
    )
    return Decision(
        winner=kept_or_beaten(verdict.winner, baseline, verification, confirmed),
        verification=verification,
        race=verdict,
        confirmed=tuple(confirmed.items()),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )
