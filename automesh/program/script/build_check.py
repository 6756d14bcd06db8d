"""Checks whether the step of a plan can be built and traced on its mesh, without a compile
(jax)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding

from automesh.plugins.pipelines import pipelines_of
from automesh.program.lower.lowering import TracedStep, lower_here, trace_here
from automesh.program.lower.static_args import leaf_shape
from automesh.program.nouns import BuildAnswer
from automesh.program.script.build import Built
from automesh.program.script.contexts import entered
from automesh.program.script.data_arguments import data_arguments
from automesh.program.script.workload import leaf_names_of
from automesh.program.spec_entries import entries_of
from automesh.space.mapping import SplitArray, SplitDimension


def check_build(built: Built, *, platforms: tuple[str, ...] | None = None) -> BuildAnswer:
    """Traces a step as a compile would.

    Tracing does not check the shardings of arguments. So if one of them does not divide evenly, the
    step is also lowered, to see whether jax accepts it.

    Args:
      platforms: see `automesh.program.lower.lowering.lower`.

    Raises:
      Exception: any exception of the step or of jax that is not about arguments.
    """
    pipelines = pipelines_of(built.workload.step)
    if pipelines is not None:
        pipelines.lower(built)
        return BuildAnswer(arguments=())
    with entered(built.ambient, built.workload.context):
        # If types have no shardings, a trace does not depend on the shardings that `init` gives.
        traced = trace_here(built, with_init="explicit" in built.axis_types)
        arguments = tuple(_split_arguments(traced))
        sizes = dict(built.mesh.shape)
        uneven = tuple(one for array in arguments if (one := _uneven(array, sizes)) is not None)
        if uneven:
            try:
                lower_here(traced.traced, platforms)
            except ValueError:  # jax's IndivisibleError is a ValueError.
                return BuildAnswer(arguments=arguments, uneven=uneven)
    return BuildAnswer(arguments=arguments, data=data_arguments(traced))


def _split_arguments(step: TracedStep) -> Iterator[SplitArray]:
    """Yields the arguments that are split, one for each different split."""
    seen: set[tuple[SplitDimension, ...]] = set()
    known = step.built.mesh.axis_names
    # Their names are unknown if the user traced the step.
    names = leaf_names_of(step.built.workload)
    named = () if step.function is None else step.split.named_leaves(step.args, step.kwargs, names)
    for name, leaf in named:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not hasattr(leaf, "dtype"):
            continue
        split = tuple(_dimensions(leaf_shape(leaf), sharding))
        named = {axis for part in split for axis in part.names}
        if split and named <= set(known) and split not in seen:
            seen.add(split)
            yield SplitArray(name=name, split=split)


def _dimensions(shape: tuple[int, ...], sharding: NamedSharding) -> Iterator[SplitDimension]:
    for place, (size, said) in enumerate(zip(shape, entries_of(sharding.spec))):
        names = said if isinstance(said, tuple) else (said,)
        axes = tuple(name for name in names if isinstance(name, str))
        if axes and len(axes) == len(names):
            yield SplitDimension(place=place, size=size, names=axes)


def _uneven(array: SplitArray, sizes: dict[Any, int]) -> SplitArray | None:
    """Returns the array with only the dimensions that its axes do not divide; None if they divide
    all."""
    parts: list[SplitDimension] = []
    for part in array.split:
        if part.size % math.prod(sizes[axis] for axis in part.names):
            parts.append(part)
    return SplitArray(name=array.name, split=tuple(parts)) if parts else None
