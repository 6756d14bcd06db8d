"""A time that no step can beat: the only figure that may rule a plan out.

Kept apart from the estimate. It assumes of the hardware only `Speeds.bound_*` (no device of the
kind can do more) and of the program only

- that every multiplication in the terms is done, none by an algorithm that needs fewer operations
  (XLA has none): the terms hold what is left after common subexpressions and dead code are gone;
- that the arguments, which lie in device memory when a step starts, cross the memory bus once: a
  train step reads all of them, since it updates all parameters. A step that leaves a part of its
  arguments unread (a look-up in a frozen table) has kernels that touch less, so that no more than
  the kernels' bytes are counted.

The two may overlap completely, hence the larger one and not the sum. Communication is left out: a
compiler may find a cheaper way to move data than the collectives that the terms name.
"""

from __future__ import annotations

import numpy as np

from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats


def bound_s(peak_s: Floats, argument_bytes: Floats, kernel_bytes: Floats, speeds: Speeds) -> Floats:
    """Seconds that a step takes at least; 0 where the speeds know no bound.

    Args:
      peak_s: all multiplications of the step at `Speeds.bound_flops_per_s`.
      argument_bytes: of one device.
      kernel_bytes: read and written by all kernels of a step.
    """
    if speeds.bound_memory_bytes_per_s <= 0.0:
        return peak_s
    through_memory = np.minimum(argument_bytes, kernel_bytes)
    return np.maximum(peak_s, through_memory / speeds.bound_memory_bytes_per_s)
