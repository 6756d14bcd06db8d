"""Windowed multiplications: a gather or scatter cut into a ring of steps around a multiplication.

XLA's SPMD partitioner replaces `all-gather; dot` and `dot; reduce-scatter` by loops that multiply
one shard while the next one travels (`spmd/dot_handler.cc`). On TPU that hides the transfer but
reads or accumulates a whole activation in every step of the ring.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.fabric import Floats

# Both fitted by hand on ahead-of-time schedules of libtpu 0.0.42 for 16 chips of v5e (45 programs
# of three models), never on a running TPU. Two devices: none were windowed; four: all were.
SMALLEST_RING = 4
# The ring's permutes against the gather that they replace: they share one direction of a link.
PERMUTE_COST = 1.8


def windows(platform: str, ring: NDArray[np.integer] | Floats) -> NDArray[np.bool_]:
    """Where a multiplication that may be windowed is: [meshes].

    Args:
      platform: whose compiler makes the program.
      ring: devices of the ring, [meshes].
    """
    return (ring >= SMALLEST_RING) & (platform == "tpu")
