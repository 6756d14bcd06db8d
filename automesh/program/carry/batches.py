"""A script whose batch depends on the mesh: is its step the same but for the batch? (jax)

`batch = per_replica * mesh.shape["data"]` gives each mesh another step. The step of the first run
can still be searched on all meshes with the batch of the script's own mesh, if nothing else depends
on the mesh. To know that, the stored function is traced with the batch of a second run, on the mesh
of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from automesh.program.capture.nouns import Capture, Carried
from automesh.program.capture.step_call import TracedCall, workload_of
from automesh.program.carry.stored_step import StoredStep, carried_call, read_step
from automesh.program.carry.values import dtype_of
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.script.workload import Workload


def state_places(carried: Sequence[Carried]) -> frozenset[int]:
    """Returns the positions of the leaves of a step's arguments that it carries on."""
    return frozenset(
        place for one in carried for place in range(one.argument, one.argument + one.count)
    )


def batch_there(capture: Capture, call: TracedCall, mesh: str) -> str:
    """Describes the arguments that have other sizes in a second run: `x` is [32, 256] on data:2,
    and [64, 256] on data:4. Empty if none has, or if there are other differences, as in the state.

    Args:
      call: the call of the step in the second run.
      mesh: mesh of that run, as text.
    """
    step = read_step(Path(capture.folder))
    if len(step.leaves) != len(call.leaves):
        return ""
    state = state_places(capture.step.carried)
    said: list[str] = []
    for place, (first, leaf) in enumerate(zip(step.leaves, call.leaves, strict=True)):
        shape = leaf_shape(leaf)
        if shape == first.shape:
            continue
        is_same_kind = len(shape) == len(first.shape) and leaf_dtype(leaf) == dtype_of(first).name
        # Of [8, 32] and [16, 16] the number of micro-batches differs, and not the batch.
        changed = sum(one != other for one, other in zip(shape, first.shape, strict=False))
        if place in state or not is_same_kind or changed > 1:
            return ""
        here, there = f"{list(shape)} on {mesh}", f"{list(first.shape)} on {step.own}"
        said.append(f"`{step.names[place]}` is {here}, and {there}")
    return "; ".join(said[:2])


def build_with_batch(capture: Capture, call: TracedCall) -> Callable[[Mesh], Workload]:
    """Returns a function `build(mesh)` that traces the stored function with arguments of the sizes
    that they have in another call.

    Raises:
      CannotCarry: when it is called: the function is not stored, or cannot be traced so.
    """
    folder = Path(capture.folder)
    step = read_step(folder)
    resized: StoredStep = replace(
        step,
        leaves=tuple(
            first if first.number is not None else replace(first, shape=leaf_shape(leaf))
            for first, leaf in zip(step.leaves, call.leaves, strict=True)
        ),
    )

    def build(mesh: Mesh) -> Workload:
        carried = carried_call(
            resized, folder, mesh, splits=capture.splits, by="function", with_values=False
        )
        return workload_of(carried.call, capture, carried.made)

    return build
