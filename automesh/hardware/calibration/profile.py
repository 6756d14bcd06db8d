"""The result of calibrating devices of one kind: measured points, and laws fitted to them."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Point,
    StreamProbe,
)

SCHEMA = 1
METHOD = 3
"""Number of the method that measures points. In method 1, every point included the cost of a turn
of its loop; method 2 compared a loop of few kernels with one of many, which a GPU runs differently,
and took the speed of caches for that of memory."""
# No cache of an accelerator is so large (the largest known has 256 MB), so that a kernel of this
# size measures the device's memory.
_FAR_BYTES = 512 * 2**20
Versions = tuple[tuple[str, str], ...]
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """The error of a law at points that it was not fitted to, each left out in turn.

    Attributes:
      median, worst: relative; 0 where `points` is 0.
      points: number of points that were left out; 0 if there are too few to leave any out.
    """

    median: float
    worst: float
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulFit:
    """Law for the seconds of one multiplication: a sum of these constants, each times its count.

    Attributes:
      call_s: per multiplication.
      batch_s: per matrix of the batch.
      left_s, right_s, result_s: per element of the `[m, k]`, `[k, n]` and `[m, n]` matrices.
      flop_s: per FLOP.
    """

    dtype: str
    call_s: float
    batch_s: float
    left_s: float
    right_s: float
    result_s: float
    flop_s: float
    error: FitError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFit:
    """Law for the seconds of a kernel without products: `call_s + byte_s * bytes`.

    Attributes:
      byte_s: of the device's memory.
    """

    form: str
    call_s: float
    byte_s: float
    error: FitError


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """Law for the seconds of a collective over groups of one size.

    Attributes:
      group_size: devices of a group inside a granule.
      call_s: of a call that moves hardly any bytes.
      slowness: time of its bytes, divided by their time at the links' nominal speed.
      granules: that a group spans.
    """

    collective: str
    group_size: int
    call_s: float
    slowness: float
    error: FitError
    granules: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured speeds of devices of one kind.

    Attributes:
      num_devices: of the calibration that was made last.
      host: model and number of the cores that virtual CPU devices share; empty for accelerators.
      made: when the newest point was measured, ISO 8601 in UTC.
      kernel_s: of starting one kernel; 0 if not measured.
      num_granules: of the calibration that was made last.
      method: how its points were measured, see `METHOD`.
    """

    schema: int
    platform: str
    device_kind: str
    num_devices: int
    host: str
    made: str
    versions: Versions
    points: tuple[Point, ...]
    kernel_s: float
    matmuls: tuple[MatmulFit, ...]
    streams: tuple[StreamFit, ...]
    collectives: tuple[CollectiveFit, ...]
    num_granules: int = 1
    method: int = 1

    def about(self) -> str:
        """Describes the devices: `8 x cpu on AMD EPYC, 2 cores`."""
        apart = f" in {self.num_granules} granules" if self.num_granules > 1 else ""
        where = f" on {self.host}" if self.host else ""
        return f"{self.num_devices} x {self.device_kind}{apart}{where}"


def make_profile(
    points: Sequence[Point],
    *,
    platform: str,
    device_kind: str,
    num_devices: int,
    host: str,
    versions: Versions,
    num_granules: int = 1,
) -> Profile:
    """Fits laws to the points."""
    ordered = tuple(sorted(points, key=lambda point: _order(point)))
    kernels = [point.seconds for point in ordered if isinstance(point.probe, KernelProbe)]
    return Profile(
        schema=SCHEMA,
        platform=platform,
        device_kind=device_kind,
        num_devices=num_devices,
        host=host,
        made=max((point.made for point in ordered), default=""),
        versions=tuple(sorted(versions)),
        points=ordered,
        kernel_s=kernels[-1] if kernels else 0.0,
        matmuls=fit_matmuls(ordered),
        streams=fit_streams(ordered, platform),
        collectives=fit_collectives(ordered),
        num_granules=num_granules,
        method=METHOD,
    )


def merge(older: Profile, newer: Profile) -> Profile:
    """Merges the points of two profiles; of a probe that both have, the newer point counts.

    Points of a former method cannot be compared with others, and are left out.

    Raises:
      ValueError: they describe different devices.
    """
    if identity(older) != identity(newer):
        raise ValueError(f"profiles of {older.about()} and of {newer.about()} do not merge")
    kept = older.points if older.method == newer.method else ()
    points = {point.probe: point for point in kept}
    for point in newer.points:
        known = points.get(point.probe)
        if known is None or known.made <= point.made:
            points[point.probe] = point
    made = make_profile(
        tuple(points.values()),
        platform=newer.platform,
        device_kind=newer.device_kind,
        num_devices=newer.num_devices,
        host=newer.host,
        versions=newer.versions,
        num_granules=newer.num_granules,
    )
    return replace(made, method=newer.method)


def identity(profile: Profile) -> tuple[str, str, int, int, str]:
    """Returns what two profiles of the same devices have in common.

    For virtual CPU devices this includes their number, the number of their processes, and the host.
    """
    count, granules = 0, 0
    if profile.platform == "cpu":
        count, granules = profile.num_devices, profile.num_granules
    return profile.platform, profile.device_kind, count, granules, profile.host


def _order(point: Point) -> tuple[str, ...]:
    """Sorts points as people read them: by kind of work, then by size."""
    match point.probe:
        case MatmulProbe() as one:
            sizes = (one.batch * one.m * one.n * one.k, one.batch, one.m, one.n, one.k)
            words = ("matmul", one.dtype)
        case StreamProbe() as one:
            words, sizes = ("stream", one.form), (one.bytes,)
        case CollectiveProbe() as one:
            words, sizes = (
                ("collective", one.collective),
                (one.granules, one.group_size, one.stride, one.payload_bytes),
            )
        case KernelProbe():
            words, sizes = ("kernel",), ()
    return (*words, *(f"{size:020}" for size in sizes))


# The laws: non-negative constants, fitted to measured points by their relative errors.


def fit_law(rows: Sequence[Row], seconds: Sequence[float]) -> Row:
    """Fits constants c >= 0 so that `rows @ c` is near `seconds`: least squares of relative errors.

    Args:
      rows: [points, constants].
      seconds: [points], above zero.
    """
    from scipy.optimize import nnls  # Slow, and only for fits.

    weighted = np.array(rows, float) / np.array(seconds, float)[:, None]
    # Scales the columns to equal length: seconds per FLOP are 1e10 times smaller than per call.
    lengths = np.linalg.norm(weighted, axis=0)
    scales = np.where(lengths > 0, lengths, 1.0)
    solution, _ = nnls(weighted / scales, np.ones(len(seconds)))
    return tuple(float(one) for one in solution / scales)


def held_out_error(
    rows: Sequence[Row], seconds: Sequence[float], groups: Sequence[Hashable]
) -> FitError:
    """Returns the relative errors at the points of each group, from a law fitted to all other
    groups.

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
    """Returns the factors of the constants of `MatmulFit`, in their order."""
    return (1.0, batch, batch * m * k, batch * k * n, batch * m * n, 2 * batch * m * n * k)


def fit_matmuls(points: Sequence[Point]) -> tuple[MatmulFit, ...]:
    """Fits one law per number type that was measured."""
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


def fit_streams(points: Sequence[Point], platform: str) -> tuple[StreamFit, ...]:
    """Fits one law per form of kernel that was measured in at least two sizes.

    For accelerators, a line from the smallest size through those that exceed every cache, where two
    of these were measured. Sizes in between are faster than the line, and its error does not
    include them.
    """
    of_form: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if isinstance(point.probe, StreamProbe) and point.seconds > 0:
            of_form.setdefault(point.probe.form, []).append((point.probe.bytes, point.seconds))
    found: list[StreamFit] = []
    for form, measured in of_form.items():
        law = _through_smallest(measured) if platform != "cpu" else None
        if law is not None:
            call_s, byte_s, error = law
            found.append(StreamFit(form=form, call_s=call_s, byte_s=byte_s, error=error))
            continue
        line = _Line()
        for size, seconds in measured:
            line.add(float(size), size, seconds)
        for call, byte, error in line.fitted():
            found.append(StreamFit(form=form, call_s=call, byte_s=byte, error=error))
    return tuple(found)


def _through_smallest(
    measured: Sequence[tuple[int, float]],
) -> tuple[float, float, FitError] | None:
    """Returns constant, slope and error; None if fewer than two sizes exceed every cache.

    Args:
      measured: bytes and seconds.
    """
    least, least_s = min(measured)
    far = [
        (size, seconds)
        for size, seconds in measured
        if size >= max(_FAR_BYTES, 2 * least) and seconds > least_s
    ]
    sizes = [size for size, _ in far]
    if len(set(sizes)) < 2:
        return None
    rows = [(float(size - least),) for size in sizes]
    more_s = [seconds - least_s for _, seconds in far]
    (slope,) = fit_law(rows, more_s)
    return max(least_s - slope * least, 0.0), slope, held_out_error(rows, more_s, sizes)


def fit_collectives(points: Sequence[Point]) -> tuple[CollectiveFit, ...]:
    """Fits one law per kind and group that was measured in at least two sizes."""
    lines: dict[tuple[str, int, int], _Line] = {}
    for point in points:
        if isinstance(point.probe, CollectiveProbe) and point.seconds > 0:
            one = point.probe
            line = lines.setdefault((one.collective, one.group_size, one.granules), _Line())
            line.add(one.link_s, one.payload_bytes, point.seconds)
    return tuple(
        CollectiveFit(
            collective=kind,
            group_size=size,
            call_s=call,
            slowness=slope,
            error=error,
            granules=granules,
        )
        for (kind, size, granules), line in lines.items()
        for call, slope, error in line.fitted()
    )


class _Line:
    """The points of one law `constant + slope * amount`."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def add(self, amount: float, size: int, seconds: float) -> None:
        self._rows.append((1.0, amount))
        self._sizes.append(size)
        self._seconds.append(seconds)

    def fitted(self) -> tuple[tuple[float, float, FitError], ...]:
        """Returns constant, slope and error; nothing if only one size was measured."""
        if len(set(self._sizes)) < 2:
            return ()
        constant, slope = fit_law(self._rows, self._seconds)
        error = held_out_error(self._rows, self._seconds, self._sizes)
        return ((constant, slope, error),)
