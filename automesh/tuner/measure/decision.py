"""The end of a race and of its fresh processes: figures as outcomes, and the plan to export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Measured, Numerics, Outcome
from automesh.tuner.measure.final import Final
from automesh.tuner.measure.fresh_processes import Figure
from automesh.tuner.measure.schedule import Calibration
from automesh.tuner.measure.verdict import Decision, Records, comparisons_of, verification_of


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


def confirmed_outcome(
    calibration: Calibration,
    compiled: Outcome | None,
    numerics: tuple[Numerics, str],
    figure: Figure,
) -> Measured:
    """What fresh processes say of a plan."""
    return measured_outcome(
        calibration,
        compiled,
        numerics,
        figure.rounds_s,
        step_s=figure.step_s,
        interval_s=figure.interval_s,
        confirmed=True,
    )


def decide(
    records: Records,
    final: Final,
    exported: Plan,
    confirmed: Mapping[Plan, Measured],
    *,
    process_s: float,
    sentence: str,
) -> Decision:
    """What is exported, with what everything else was compared to.

    Args:
      exported: as `final` says.
      confirmed: figures from fresh processes, those of `exported` among them.
      process_s: what a process takes.
      sentence: how it ended.
    """
    compared = comparisons_of(records, final, exported, process_s=process_s)
    return Decision(
        winner=exported,
        verification=verification_of(final, exported, compared),
        comparisons=compared,
        confirmed=tuple(confirmed.items()),
        sentence=sentence,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        failed=records.failed,
    )
