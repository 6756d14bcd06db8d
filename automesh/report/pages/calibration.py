"""What `automesh calibrate` has to tell: as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    MatmulProbe,
    StreamProbe,
    group_words,
)
from automesh.hardware.calibration.profile import FitError, Profile
from automesh.report.columns import Column, figures_column
from automesh.report.drawing import MIN_WIDTH, draw, glued, labelled, tabulated
from automesh.texts.terminal import clean
from automesh.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    format_wait,
)

# Repeats on an idle machine differ by a few per cent.
_BUSY = 0.15
_FORMS: dict[str, str] = {
    "copy": "copy",
    "map": "sigmoid",
    "reduce": "normalise rows",
    "transpose": "transpose",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """What a calibration measured.

    Attributes:
      profile: as it stands in the file now, points of earlier calibrations included.
      path: of the file.
      measured: probes that this calibration measured.
      spread: of the rounds of one probe, see `Point`; the median over the probes.
      skipped: what the budget did not allow, in words.
      failed: what could not be measured, and why.
      took_s: wall clock.
      interrupted: True after Ctrl-C.
    """

    profile: Profile
    path: str
    measured: int
    spread: float
    skipped: tuple[str, ...]
    failed: tuple[str, ...]
    took_s: float
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what `--json` prints."""
        return asdict(self)

    def table(self, *, width: int, colour: bool) -> str:
        """Text that fits a terminal."""
        return render(self, width=width, colour=colour)


def render(result: CalibrationResult, *, width: int, colour: bool) -> str:
    """Draws what was measured, with the error of each law.

    Args:
      width: columns of the terminal; fewer than 40 are treated as 40.

    Returns:
      Lines that end in a line feed.
    """
    width = max(width, MIN_WIDTH)
    rows = (*_streams(result.profile), *_matmuls(result.profile), *_collectives(result.profile))
    parts: list[RenderableType] = [Text(glued(f"Measured speeds of {result.profile.about()}"))]
    if rows:
        parts += [Text(), tabulated(_columns(rows, width), width=width)]
    parts += [Text(), labelled(_sentences(result))]
    return draw(parts, width=width, colour=colour)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    work: str
    call: str
    speed: str
    error: FitError


def _columns(rows: Sequence[_Row], width: int) -> list[Column]:
    columns = [
        Column(name="work", header="work", cells=tuple(row.work for row in rows), floor=12),
        figures_column("per call", [row.call for row in rows]),
        figures_column("speed", [row.speed for row in rows], justify="left"),
        figures_column("error", [_percent(row.error, row.error.median) for row in rows]),
    ]
    if width >= 72:
        worst = [_percent(row.error, row.error.worst) for row in rows]
        columns.append(figures_column("worst", worst))
    return columns


def _percent(error: FitError, value: float) -> str:
    return format_percent(value) if error.points else "-"


def _streams(profile: Profile) -> list[_Row]:
    rows: list[_Row] = []
    for fit in profile.streams:
        sizes = {
            point.probe.bytes: point.seconds
            for point in profile.points
            if isinstance(point.probe, StreamProbe)
            and point.probe.form == fit.form
            and point.seconds > 0
        }
        largest = max(sizes)
        rows.append(
            _Row(
                work=_FORMS[fit.form],
                call=format_seconds(fit.call_s),
                speed=f"{format_bytes(largest / sizes[largest])}/s",
                error=fit.error,
            )
        )
    return rows


def _matmuls(profile: Profile) -> list[_Row]:
    rows: list[_Row] = []
    for fit in profile.matmuls:
        rates = [
            point.probe.flops / point.seconds
            for point in profile.points
            if isinstance(point.probe, MatmulProbe)
            and point.probe.dtype == fit.dtype
            and point.seconds > 0
        ]
        rows.append(
            _Row(
                work=f"{fit.dtype} matmul",
                call=format_seconds(fit.call_s),
                speed=f"{format_count(min(rates))} to {format_count(max(rates))}FLOP/s",
                error=fit.error,
            )
        )
    return rows


def _collectives(profile: Profile) -> list[_Row]:
    rows: list[_Row] = []
    for fit in profile.collectives:
        sizes = {
            point.probe.payload_bytes: point.seconds
            for point in profile.points
            if isinstance(point.probe, CollectiveProbe)
            and (point.probe.collective, point.probe.group_size, point.probe.granules)
            == (fit.collective, fit.group_size, fit.granules)
            and point.seconds > 0
        }
        largest = max(sizes)
        rows.append(
            _Row(
                work=f"{fit.collective} over {group_words(fit.group_size, fit.granules)}",
                call=format_seconds(fit.call_s),
                speed=f"{format_bytes(largest / sizes[largest])}/s",
                error=fit.error,
            )
        )
    return rows


def _noise(spread: float) -> str:
    text = f"repeats of one point differ by {format_percent(spread)} in the median"
    if spread <= _BUSY:
        return text
    return f"{text}: the machine is busy; calibrate again when it is not"


def _sentences(result: CalibrationResult) -> list[tuple[str, str]]:
    points = len(result.profile.points)
    kept = f", {points} with those of earlier calibrations" if points > result.measured else ""
    stopped = ", interrupted" if result.interrupted else ""
    lines = [
        ("measured", f"{result.measured} points in {format_wait(result.took_s)}{kept}{stopped}"),
        (
            "error",
            "of each law at points that it was not fitted to: in the median, and at worst",
        ),
        ("speed", "per device with all devices at work; of bytes at the largest size measured"),
        ("noise", _noise(result.spread)),
        *(("failed", text) for text in result.failed),
        ("skipped", ", ".join(result.skipped) + ": the budget was spent" if result.skipped else ""),
        ("saved", result.path),
    ]
    return [(label, clean(text)) for label, text in lines if text]
