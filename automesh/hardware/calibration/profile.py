"""What a calibration knows about devices of one kind: measured points, and laws fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automesh.hardware.calibration.points import (
    CollectiveProbe,
    KernelProbe,
    MatmulProbe,
    Point,
    StreamProbe,
)

SCHEMA = 1
Versions = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far a law is off at points that it was not fitted to, each left out in turn.

    Attributes:
      median, worst: relative; 0 where `points` is 0.
      points: that were left out; 0 if there are too few to leave any out.
    """

    median: float
    worst: float
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulFit:
    """Seconds of one multiplication: a sum of what is named here times its number.

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
    """Seconds of a kernel that multiplies nothing: `call_s + byte_s * bytes`."""

    form: str
    call_s: float
    byte_s: float
    error: FitError


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """Seconds of a collective over groups of one size.

    Attributes:
      call_s: of a call that moves next to nothing.
      slowness: what its bytes take, as a multiple of what they take at the links' nominal speed.
    """

    collective: str
    group_size: int
    call_s: float
    slowness: float
    error: FitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured speeds of devices of one kind.

    Attributes:
      num_devices: of the calibration that was made last.
      host: model and number of the cores that virtual CPU devices share; empty for accelerators.
      made: when the newest point was measured, ISO 8601 in UTC.
      kernel_s: of starting one kernel; 0 if not measured.
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

    def about(self) -> str:
        """What was measured where: `8 x cpu on AMD EPYC, 2 cores`."""
        where = f" on {self.host}" if self.host else ""
        return f"{self.num_devices} x {self.device_kind}{where}"


def make_profile(
    points: Sequence[Point],
    *,
    platform: str,
    device_kind: str,
    num_devices: int,
    host: str,
    versions: Versions,
) -> Profile:
    """Fits laws to the points."""
    from automesh.hardware.calibration.fit import fit_collectives, fit_matmuls, fit_streams

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
        streams=fit_streams(ordered),
        collectives=fit_collectives(ordered),
    )


def merge(older: Profile, newer: Profile) -> Profile:
    """One profile of the points of both; of a probe that both have, the point made last counts.

    Raises:
      ValueError: they are not of the same devices.
    """
    if identity(older) != identity(newer):
        raise ValueError(f"profiles of {older.about()} and of {newer.about()} do not merge")
    points = {point.probe: point for point in older.points}
    for point in newer.points:
        known = points.get(point.probe)
        if known is None or known.made <= point.made:
            points[point.probe] = point
    return make_profile(
        tuple(points.values()),
        platform=newer.platform,
        device_kind=newer.device_kind,
        num_devices=newer.num_devices,
        host=newer.host,
        versions=newer.versions,
    )


def identity(profile: Profile) -> tuple[str, str, int, str]:
    """What two profiles must share: for virtual CPU devices also their number and their host."""
    count = profile.num_devices if profile.platform == "cpu" else 0
    return profile.platform, profile.device_kind, count, profile.host


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
                (one.group_size, one.stride, one.payload_bytes),
            )
        case KernelProbe():
            words, sizes = ("kernel",), ()
    return (*words, *(f"{size:020}" for size in sizes))
