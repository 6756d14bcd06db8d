"""The arguments of a step that are its data, and their sizes (jax).

`build` may make another batch on each mesh, as `rows = per_device * mesh.size`. Step times of such
meshes are times for different amounts of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from automesh.program.lower.carry_state import default_carry
from automesh.program.lower.lowering import TracedStep
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.nouns import SizedArray
from automesh.program.script.workload import NamedWorkload, leaf_names_of


def data_arguments(step: TracedStep) -> tuple[SizedArray, ...]:
    """Returns the arrays among the arguments that no output replaces, without scalars and without
    random keys, whose number is no amount of work."""
    names = leaf_names_of(step.built.workload)
    state = _state_leaves(step)
    return tuple(
        SizedArray(name=name, dtype=str(leaf_dtype(leaf)), shape=leaf_shape(leaf))
        for place, (name, leaf) in enumerate(step.split.named_leaves(step.args, step.kwargs, names))
        if place not in state and leaf_shape(leaf) and not is_key(leaf)
    )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys: how many there are is no amount of work."""
    dtype: Any = getattr(leaf, "dtype", None)
    if dtype is None:
        return False
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == "uint32" and leaf_shape(leaf)[-1:] == (2,)


def _state_leaves(step: TracedStep) -> frozenset[int]:
    """Returns the positions of the leaves that are carried to the next step."""
    workload = step.built.workload
    outputs = step.traced.out_info
    if isinstance(workload, NamedWorkload) and workload.carried:
        return frozenset(argument for argument, _ in workload.carried)
    if workload.advance is not None:
        return frozenset(_like_an_output(step))
    donated = tuple(bool(info.donated) for info in jax.tree.leaves(step.traced.args_info))
    carry = default_carry(step.args, outputs, donated)
    starts, place = list[range](), 0
    for arg in step.args:
        size = len(jax.tree.leaves(arg))
        starts.append(range(place, place + size))
        place += size
    return frozenset(leaf for position, _ in carry.pairs for leaf in starts[position])


def _like_an_output(step: TracedStep) -> Iterator[int]:
    """Yields the leaves that have the shape and type of an output: only the user's `advance` knows
    which of them are carried."""
    forms = {(one.shape, one.dtype) for one in jax.tree.leaves(step.traced.out_info)}
    for place, leaf in enumerate(jax.tree.leaves((step.args, step.kwargs))):
        if (leaf_shape(leaf), getattr(leaf, "dtype", None)) in forms:
            yield place
