"""Windowed multiplications: a gather or scatter cut into a ring of steps around a multiplication.

XLA's SPMD partitioner replaces `all-gather; dot` and `dot; reduce-scatter` by loops that multiply
one shard while the next ones travel (`spmd/dot_handler.cc`). On TPU that hides the transfer but
reads or accumulates a whole activation in every step of the ring. Shards travel both ways, and a
step multiplies one of each direction: a ring of n devices takes n/2 steps. A compiler option sets
the minimum size of the whole operand that would be gathered, or of the whole result that would be
scattered.

The partitioner leaves the gather where a ring would not pay: where the longer of multiplication and
transfer, and two more steps of the transfer, take as long as both one after the other
(`disable_windowed_einsum` there). With n steps of a transfer that takes t and a multiplication that
takes c, that is min(c, t) <= 2 t / n: two devices never have a ring, and more of them only where n
times the FLOPs for each byte are more than the chip does while two bytes travel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.terms import Terms
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats, Route
from automesh.mesh.axes import Scalar
from automesh.platforms import PLATFORMS, scheduling_of
from automesh.platforms.platform import PlatformName

# From ahead-of-time schedules of libtpu 0.0.42 for 16 chips of v5e (45 programs of three models).
# Two devices: none were windowed; four: all were.
SMALLEST_RING = 4
# libtpu 0.0.50.1: rings of 32 chips of v5e and v5p, none of 64, whatever is multiplied.
LARGEST_RING = 32
THRESHOLDS: dict[PlatformName, str] = {
    platform.name: platform.scheduling.window_option
    for platform in PLATFORMS
    if platform.scheduling.window_option
}
"""The option with the minimum size in MiB, by platform."""


def windows(
    terms: Terms,
    ring: NDArray[np.integer] | Floats,
    whole_bytes: Floats,
    intensity: Floats,
) -> NDArray[np.bool_]:
    """Whether a multiplication that may be windowed is: [meshes].

    Args:
      terms: have the compiler's platform and its threshold.
      ring: devices of the ring, [meshes].
      whole_bytes: of the operand or the result that a ring does not gather or scatter, [meshes].
      intensity: FLOPs of the multiplication for each of these bytes, [meshes].
    """
    if not scheduling_of(terms.platform).window_option:
        return np.zeros(len(ring), np.bool_)
    is_size = (ring >= SMALLEST_RING) & (ring <= LARGEST_RING)
    pays = intensity * ring >= terms.window_flops_per_byte
    return is_size & pays & (whole_bytes >= terms.window_threshold_bytes)


def repeats(ring: NDArray[np.integer] | Floats) -> Floats:
    """Counts the steps of a ring that read or write an activation again: all but one.

    Programs of libtpu 0.0.42 for 16 chips of v5e: 8 accumulations in a ring of 16 devices, 4 in one
    of 8, 2 in one of 4.
    """
    return np.ceil(ring / 2) - 1.0


def ring_seconds(payload_bytes: Floats, route: Route, speeds: Speeds) -> Floats:
    """Computes the time of the permutes of one ring, one after another.

    Every shard goes round, half of them each way, and one more before the first step: 17 permutes
    of two directions for 16 devices, in programs of libtpu 0.0.42 for v5e.

    Args:
      payload_bytes: the full array that is gathered or scattered, [meshes].

    Returns:
      Latency, ICI and DCN seconds, [3, meshes].
    """
    devices = route.ici_size * route.dcn_size
    steps = (devices + 1.0) / 2.0
    # Of both ways at once.
    shared = replace(route, ici_step_share=route.ici_pair_share)
    once = speeds.collective_s("collective-permute", payload_bytes / devices, shared)
    return np.stack([steps * once.latency_s, steps * once.ici_s, steps * once.dcn_s])


def for_windows(terms: Terms, speeds: Speeds) -> Terms:
    """Adds to the terms the figure of a chip that decides whether a ring pays."""
    return replace(terms, window_flops_per_byte=speeds.window_flops_per_byte)


def with_threshold(terms: Terms, value: Scalar) -> Terms:
    """Applies the option of `THRESHOLDS`, in MiB, to the terms; see `PricedOption.apply`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return terms
    return replace(terms, window_threshold_bytes=float(value) * 2**20)
