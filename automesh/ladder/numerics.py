"""Do two meshes compute the same function: their losses compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# What reordered sums may change, relative, by the coarsest type in the step. A loss that is itself
# rounded to 16 bits may land on the neighbouring value: at least one unit in the last place, 2^-7
# for bfloat16, 2^-10 for float16. Beyond that, losses are means, in which the roundings of
# activations average out. For 32 and 64 bits a thousand, respectively half a million units: sums of
# millions of terms, approximations of exp and a few optimizer steps come between. A forgotten
# collective changes the loss, a gradient's norm or a later step by per cents.
_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
_NARROW_TOLERANCE = 5e-2  # float8 and narrower: half a unit in the last place of e4m3 is 6e-2
_SMALL = (
    1e-3  # a scalar below this share of the largest is compared at that size: zero has no scale
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How losses compare with the reference's; `detail` is a sentence, empty if they agree."""

    verdict: Literal["agree", "differ", "unverified"]
    detail: str = ""


def loss_tolerance(dtype: str) -> float:
    """Relative difference of losses that reordering alone may cause.

    Args:
      dtype: the coarsest float type that takes part in the step, as numpy or ml_dtypes name it.

    Raises:
      ValueError: not a float type.
    """
    if dtype in _TOLERANCE:
        return _TOLERANCE[dtype]
    if dtype.startswith(("float8", "float6", "float4")):
        return _NARROW_TOLERANCE
    raise ValueError(f"`{dtype}` is not a float type whose tolerance is known")


def compare_losses(reference: Sequence[float], losses: Sequence[float], dtype: str) -> Agreement:
    """Compares the scalar outputs of a plan's first steps with those of the reference.

    Args:
      reference: scalars of the reference, all of step 1, then of step 2, ...
      losses: scalars of the plan, in the same order.
      dtype: the coarsest float type that takes part in either step.

    Raises:
      ValueError: as `loss_tolerance`.
    """
    tolerance = loss_tolerance(dtype)
    if len(reference) != len(losses):
        counts = f"{len(losses)} scalars here, {len(reference)} on the reference"
        return Agreement(verdict="differ", detail=f"the step returns {counts}")
    if not losses:
        return Agreement(verdict="unverified", detail="the step returns no scalar to compare")
    for whose, values in (("here", losses), ("on the reference", reference)):
        for index, value in enumerate(values):
            if not math.isfinite(value):
                return Agreement(
                    verdict="unverified", detail=f"scalar {index + 1} is {value} {whose}"
                )
    floor = _SMALL * max(abs(value) for value in reference)
    worst, distance = 0, 0.0
    for index, (expected, got) in enumerate(zip(reference, losses)):
        scale = max(abs(expected), abs(got), floor)
        apart = abs(got - expected) / scale if scale else 0.0
        if apart > distance:
            worst, distance = index, apart
    if distance <= tolerance:
        return Agreement(verdict="agree")
    return Agreement(
        verdict="differ",
        detail=(
            f"scalar {worst + 1} of {len(losses)} is {losses[worst]:.6g} here and "
            f"{reference[worst]:.6g} on the reference: {distance:.1e} apart, "
            f"{tolerance:.0e} allowed for {dtype}"
        ),
    )
