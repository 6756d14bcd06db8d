"""A stored step as a function `build(mesh)`: nothing of the script runs (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from automesh.program.capture.nouns import Capture, CarriedBy
from automesh.program.capture.step_call import workload_of
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.starts import note_again, note_lost
from automesh.program.carry.stored_step import (
    CarriedCall,
    StoredStep,
    carried_call,
    read_step,
    set_config,
)
from automesh.program.carry.values import StoredStepLost
from automesh.program.notes import note
from automesh.program.nouns import Entry
from automesh.program.script.workload import Workload

Build = Callable[[Mesh], Workload]


def carried_build(
    entry: Entry, otherwise: Callable[[str], Build], *, is_strict: bool = False
) -> Any:
    """Returns the function `build(mesh)` of a script whose step is stored.

    Args:
      otherwise: takes a reason and returns the function that runs the script, for meshes to which
        the step cannot be carried, and for values that are not stored.
      is_strict: whether to use only the capture's way of carrying, and not the other one if that
        fails.
    """
    capture = entry.capture
    assert capture is not None
    folder = Path(capture.folder)
    name = Path(entry.location).name
    try:
        step = read_step(folder)
    except StoredStepLost as error:
        _tell_lost(capture, name, error)
        return otherwise(f"its stored step is lost: {error}")
    set_config(step)
    with_values = not capture.without_arrays
    by = capture.carried_by or "trace"
    running: list[Build] = []

    def build(mesh: Mesh) -> Workload:
        if with_values and not step.has_values:
            return run(mesh, "the values of its arguments are not stored")
        try:
            ways = (by,) if is_strict else ways_of(by)
            carried = on_plan(step, folder, mesh, capture, ways, with_values=with_values)
        except CannotCarry as error:
            return run(mesh, error.message)
        except StoredStepLost as error:
            _tell_lost(capture, name, error)
            return run(mesh, f"its stored step is lost: {error}", is_told=True)
        return workload_of(carried.call, capture, carried.made)

    def run(mesh: Mesh, why: str, *, is_told: bool = False) -> Workload:
        if not running:
            running.append(otherwise(why))
            note(f"{name} is run for its step: {why}")
        if not is_told:
            note_again(capture.folder, why)
        return running[0](mesh)

    return build


def _tell_lost(capture: Capture, name: str, error: StoredStepLost) -> None:
    note(f"the stored step of {name} is lost: {error}")
    note_lost(capture.folder, str(error))


def ways_of(by: CarriedBy) -> tuple[CarriedBy, ...]:
    """Returns the ways to carry a step to a mesh, the usual one first."""
    return ("function",) if by == "function" else ("trace", "function")


def on_plan(
    step: StoredStep,
    folder: Path,
    mesh: Mesh,
    capture: Capture,
    ways: Sequence[CarriedBy],
    *,
    with_values: bool,
) -> CarriedCall:
    """Returns the stored call on a mesh, carried there in the first way that works.

    Raises:
      CannotCarry: none does; says why each one does not.
    """
    refusals: list[str] = []
    for by in ways:
        try:
            return carried_call(
                step, folder, mesh, splits=capture.splits, by=by, with_values=with_values
            )
        except CannotCarry as error:
            refusals.append(error.message)
    raise CannotCarry(", and ".join(dict.fromkeys(refusals)))
