"""The report of `automesh calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    MatmulProbe,
    StreamProbe,
    group_words,
)
from automesh.hardware.calibration.profile import FitError, Profile
from automesh.report.blocks.columns import figures_column, text_column
from automesh.report.blocks.nouns import Report, Section, Table, lines_of
from automesh.report.blocks.reportable import Reportable
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
# Longer than the name of any work: rather than fold one, a narrow terminal does without `worst`.
_UNFOLDED = 72
_FORMS: dict[str, str] = {
    "copy": "copy",
    "map": "sigmoid",
    "reduce": "normalise rows",
    "transpose": "transpose",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult(Reportable):
    """The result of a calibration.

    Attributes:
      profile: as it is in the file now, points of earlier calibrations included.
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

    def to_report(self) -> Report:
        """Makes a table of what was measured, with the error of each law."""
        profile = self.profile
        rows = (*_streams(profile), *_matmuls(profile), *_collectives(profile))
        return Report(
            title=f"Measured speeds of {profile.about()}",
            sections=(
                Section(blocks=(_table(rows),) if rows else ()),
                Section(blocks=(lines_of(*_sentences(self)),)),
            ),
            facts=lambda: asdict(self),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CalibrationRow:
    work: str
    call: str
    speed: str
    error: FitError


def _table(rows: Sequence[_CalibrationRow]) -> Table:
    works = [row.work for row in rows]
    return Table(
        columns=(
            text_column("work", works, most=_UNFOLDED),
            figures_column("per call", [row.call for row in rows]),
            figures_column("speed", [row.speed for row in rows], justify="left"),
            figures_column("error", [_percent(row.error, row.error.median) for row in rows]),
            figures_column("worst", [_percent(row.error, row.error.worst) for row in rows]),
        ),
        dropped=("worst",),
        narrow=(text_column("work", works, most=12),),
    )


def _percent(error: FitError, value: float) -> str:
    return format_percent(value) if error.points else "-"


def _streams(profile: Profile) -> list[_CalibrationRow]:
    rows: list[_CalibrationRow] = []
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
            _CalibrationRow(
                work=_FORMS[fit.form],
                call=format_seconds(fit.call_s),
                speed=f"{format_bytes(largest / sizes[largest])}/s",
                error=fit.error,
            )
        )
    return rows


def _matmuls(profile: Profile) -> list[_CalibrationRow]:
    rows: list[_CalibrationRow] = []
    for fit in profile.matmuls:
        rates = [
            point.probe.flops / point.seconds
            for point in profile.points
            if isinstance(point.probe, MatmulProbe)
            and point.probe.dtype == fit.dtype
            and point.seconds > 0
        ]
        rows.append(
            _CalibrationRow(
                work=f"{fit.dtype} matmul",
                call=format_seconds(fit.call_s),
                speed=f"{format_count(min(rates))} to {format_count(max(rates))}FLOP/s",
                error=fit.error,
            )
        )
    return rows


def _collectives(profile: Profile) -> list[_CalibrationRow]:
    rows: list[_CalibrationRow] = []
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
            _CalibrationRow(
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
    return [(label, clean(text)) for label, text in lines]
