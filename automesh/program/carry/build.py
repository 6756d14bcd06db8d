"""A stored step as a function `build(mesh)`: nothing of the script runs (jax)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from automesh.program.capture.step_call import workload_of
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.stored_step import carried_call, read_step, set_config
from automesh.program.notes import note
from automesh.program.nouns import Entry
from automesh.program.script.workload import Workload

Build = Callable[[Mesh], Workload]


def carried_build(entry: Entry, otherwise: Callable[[str], Build]) -> Any:
    """The function `build(mesh)` of a script whose step is stored.

    Args:
      otherwise: given the reason, gives the function that runs the script, for meshes that carrying
        cannot reach, and for values that are not stored.
    """
    capture = entry.capture
    assert capture is not None
    folder = Path(capture.folder)
    step = read_step(folder)
    set_config(step)
    with_values = not capture.without_arrays
    running: list[Build] = []

    def build(mesh: Mesh) -> Workload:
        if with_values and not step.has_values:
            return run(mesh, "its arguments are too large to be stored")
        try:
            carried = carried_call(
                step, folder, mesh, splits=capture.splits, with_values=with_values
            )
        except CannotCarry as error:
            return run(mesh, error.message)
        return workload_of(carried.call, capture, carried.made)

    def run(mesh: Mesh, why: str) -> Workload:
        if not running:
            running.append(otherwise(why))
            note(f"{Path(entry.location).name} is run for its step: {why}")
        return running[0](mesh)

    return build
