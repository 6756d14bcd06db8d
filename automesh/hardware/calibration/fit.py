"""Fits laws with non-negative constants to measured points, by their relative errors."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.optimize import nnls

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    MatmulProbe,
    Point,
    StreamProbe,
)
from automesh.hardware.calibration.profile import CollectiveFit, FitError, MatmulFit, StreamFit

Row = tuple[float, ...]


def fit_law(rows: Sequence[Row], seconds: Sequence[float]) -> Row:
    """Non-negative constants c with `rows @ c` near `seconds`, by least squares of relative errors.

    Args:
      rows: [points, constants].
      seconds: [points], above zero.
    """
    weighted = np.array(rows, float) / np.array(seconds, float)[:, None]
    # Columns of one length each: seconds per FLOP are 1e10 times smaller than seconds per call.
    lengths = np.linalg.norm(weighted, axis=0)
    scales = np.where(lengths > 0, lengths, 1.0)
    solution, _ = nnls(weighted / scales, np.ones(len(seconds)))
    return tuple(float(one) for one in solution / scales)


def held_out_error(
    rows: Sequence[Row], seconds: Sequence[float], groups: Sequence[Hashable]
) -> FitError:
    """Relative errors at the points of each group in turn, by the law fitted to all others.

    Args:
      groups: [points]; points of equal groups, such as repeats, are left out together.
    """
    errors: list[float] = []
    for left_out in dict.fromkeys(groups):
        kept = [place for place, group in enumerate(groups) if group != left_out]
        if len({groups[place] for place in kept}) < 2:
            return FitError(median=0.0, worst=0.0, points=0)
        law = fit_law([rows[place] for place in kept], [seconds[place] for place in kept])
        for place, group in enumerate(groups):
            if group == left_out:
                predicted = float(np.dot(rows[place], law))
                errors.append(abs(predicted / seconds[place] - 1))
    return FitError(
        median=statistics.median(errors) if errors else 0.0,
        worst=max(errors, default=0.0),
        points=len(errors),
    )


def matmul_row(batch: float, m: float, n: float, k: float) -> Row:
    """What the constants of `MatmulFit` are multiplied with, in their order."""
    return (1.0, batch, batch * m * k, batch * k * n, batch * m * n, 2 * batch * m * n * k)


def fit_matmuls(points: Sequence[Point]) -> tuple[MatmulFit, ...]:
    """One law per number type that was measured."""
    found: list[MatmulFit] = []
    of_type: dict[str, list[tuple[MatmulProbe, float]]] = {}
    for point in points:
        if isinstance(point.probe, MatmulProbe) and point.seconds > 0:
            of_type.setdefault(point.probe.dtype, []).append((point.probe, point.seconds))
    for dtype, measured in of_type.items():
        rows = [matmul_row(one.batch, one.m, one.n, one.k) for one, _ in measured]
        seconds = [each for _, each in measured]
        call, batch, left, right, result, flop = fit_law(rows, seconds)
        found.append(
            MatmulFit(
                dtype=dtype,
                call_s=call,
                batch_s=batch,
                left_s=left,
                right_s=right,
                result_s=result,
                flop_s=flop,
                error=held_out_error(rows, seconds, range(len(rows))),
            )
        )
    return tuple(found)


def fit_streams(points: Sequence[Point]) -> tuple[StreamFit, ...]:
    """One law per form of kernel that was measured in at least two sizes."""
    lines: dict[str, _Line] = {}
    for point in points:
        if isinstance(point.probe, StreamProbe) and point.seconds > 0:
            line = lines.setdefault(point.probe.form, _Line())
            line.add(float(point.probe.bytes), point.probe.bytes, point.seconds)
    return tuple(
        StreamFit(form=form, call_s=call, byte_s=byte, error=error)
        for form, line in lines.items()
        for call, byte, error in line.fitted()
    )


def fit_collectives(points: Sequence[Point]) -> tuple[CollectiveFit, ...]:
    """One law per kind and size of group that was measured in at least two sizes."""
    lines: dict[tuple[str, int], _Line] = {}
    for point in points:
        if isinstance(point.probe, CollectiveProbe) and point.seconds > 0:
            one = point.probe
            line = lines.setdefault((one.collective, one.group_size), _Line())
            line.add(one.link_s, one.payload_bytes, point.seconds)
    return tuple(
        CollectiveFit(collective=kind, group_size=size, call_s=call, slowness=slope, error=error)
        for (kind, size), line in lines.items()
        for call, slope, error in line.fitted()
    )


class _Line:
    """Points of one law `constant + slope * amount`."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def add(self, amount: float, size: int, seconds: float) -> None:
        self._rows.append((1.0, amount))
        self._sizes.append(size)
        self._seconds.append(seconds)

    def fitted(self) -> tuple[tuple[float, float, FitError], ...]:
        """Constant, slope and error; nothing if one size alone was measured."""
        if len(set(self._sizes)) < 2:
            return ()
        constant, slope = fit_law(self._rows, self._seconds)
        error = held_out_error(self._rows, self._seconds, self._sizes)
        return ((constant, slope, error),)
