"""The errors that nothing of a step can be split, in one sentence (no jax)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from automesh.errors import UsageError
from automesh.program.infer.nouns import DimensionClass, Role, StepClasses

_TRAINED = (Role.PARAMETER, Role.FROZEN, Role.MOMENT)


def nothing_to_split(
    classes: StepClasses, num_devices: int, script: str, *, mesh: str, most: int
) -> UsageError:
    """Makes the error that nothing can be split, or not over so many devices.

    Args:
      mesh: which mesh the script has, as the words after its name: `makes no mesh`.
      most: product of the possible parts of all classes.
    """
    if num_devices < 2:
        return UsageError(
            f"{script} {mesh}, and there is one device: nothing can be split",
            hint="name several with `--target`: `cpu:8` for virtual ones, `tpu-v5p-16`",
        )
    if not classes.batches and not any(one.role in _TRAINED for one in classes.arguments):
        return UsageError(
            f"{script} {mesh}, and its step trains nothing: no array has a gradient, and no "
            "dimension is a batch, so that nothing tells what could be split",
            hint="choose the training step with `--step NAME`, or split the arrays in the script",
        )
    sizes = _sizes(classes.classes[:4])
    # A batch is changed more easily than a model.
    changed = classes.batches or classes.classes
    cures = next((f"`{one.name}`: {one.cure}" for one in changed if one.cure), "")
    if (fewer := math.gcd(most, num_devices)) > 1:
        return UsageError(
            f"{script} {mesh}, and the dimensions of its step can be split over {fewer} "
            f"devices, not over {num_devices}: {sizes}",
            hint=f"search it for {fewer} devices, or give it a batch that {num_devices} divide"
            if classes.batches
            else f"it has no batch, and one device may be right; else search it for {fewer}",
        )
    return UsageError(
        f"{script} {mesh}, and no dimension of its step can be split over {num_devices} "
        f"devices: {sizes or 'it has none'}",
        hint=cures or "give it a batch that the devices divide",
    )


def nothing_spans(classes: StepClasses, num_granules: int, script: str, *, mesh: str) -> UsageError:
    """Makes the error that the step can be split inside of a slice or node, and not over several.

    Args:
      mesh: as for `nothing_to_split`.
    """
    whole = [one for one in classes.batches if one.whole]
    why, cures = "and it has none", ""
    if classes.batches:
        why = f"which no argument of it has: {_sizes(classes.batches[:2])}"
        cures = "give the batch to the step as an argument"
    if whole:
        why = f"which cannot be split: {_sizes(whole[:2])}"
        cures = next((f"`{one.name}`: {one.cure}" for one in whole if one.cure), "")
    return UsageError(
        f"{script} {mesh}, and of its step only a batch may be split over {num_granules} slices or "
        f"nodes, {why}; tensor parallelism needs the fast links inside of one",
        hint=cures or "search it for one slice or node, or give it a batch that they divide",
    )


def _sizes(classes: Sequence[DimensionClass]) -> str:
    return ", ".join(
        f"`{one.name}` {one.size}" + (f" ({one.whole})" if one.whole else "") for one in classes
    )


def nothing_held(script: str, *, mesh: str) -> UsageError:
    """Makes the error that a step takes no arrays; `mesh` is as for `nothing_to_split`."""
    return UsageError(
        f"{script} {mesh}, and its step takes no arrays: it computes with those that it "
        "holds, as they were when `jax.jit` first traced it",
        hint="give the step its parameters and its batch as arguments, and return the parameters",
    )
