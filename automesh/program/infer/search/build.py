"""Makes a function `build(mesh, mapping)` from a step for one device and its layout (jax).

The script does not run: the step is read from the folder in which its one run has stored it. Its
arguments are split as the mapping says, results that replace arguments are split like these, and
arrays inside that need them get constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.mapping import LogicalMapping, MappedAxes
from automesh.program.capture.nouns import Capture
from automesh.program.capture.step_call import Program, TracedCall, workload_of
from automesh.program.carry.build import on_plan, ways_of
from automesh.program.carry.meshes import CannotCarry
from automesh.program.carry.starts import note_again
from automesh.program.carry.stored_step import (
    CarriedCall,
    StoredStep,
    placed_call,
    read_step,
    set_config,
)
from automesh.program.infer.search.constrain import Place, constrained
from automesh.program.infer.search.layout import InnerSplit, Layout, Split
from automesh.program.lower.static_args import is_ref
from automesh.program.notes import note
from automesh.program.nouns import Entry
from automesh.program.script.workload import Workload
from automesh.program.spec_entries import entries_of

Run = Callable[[Entry, Callable[[TracedCall, Mesh], None]], Callable[[Mesh], Workload]]


def inferred_build(entry: Entry) -> Callable[..., Workload]:
    """Returns the function `build(mesh, mapping)` of a script that makes no mesh, whose step is
    stored."""
    capture, layout, step = _stored(entry)
    folder, with_values = Path(capture.folder), not capture.without_arrays

    def build(mesh: Mesh, mapping: Mapping[str, Any] | None = None) -> Workload:
        if with_values:
            _check_values(step, entry)
        call = placed_call(step, folder, mesh, with_values=with_values)
        return workload_of(on_mesh(call, layout, capture, mesh, mapping or {}), capture, mesh)

    return build


def _stored(entry: Entry) -> tuple[Capture, Layout, StoredStep]:
    """Reads how a script is run, what is searched for it, and its stored step; sets jax
    accordingly."""
    capture = entry.capture
    assert capture is not None and capture.layout is not None
    step = read_step(Path(capture.folder))
    set_config(step)
    return capture, capture.layout, step


def _check_values(step: StoredStep, entry: Entry) -> None:
    """Refuses to measure a step whose arguments are not stored."""
    if not step.has_values:
        raise UsageError(
            f"the step of {Path(entry.location).name} cannot be measured on another mesh: the "
            "values of its arguments are not stored",
            hint="search it for devices that are named, `--target tpu-v5p-16`, which needs no "
            "values",
        )


def rearranged_build(entry: Entry, run: Run) -> Callable[..., Workload]:
    """Returns the function `build(mesh, mapping)` of a script that makes a mesh, whose step is
    stored.

    The step is carried to the mesh as the script wrote it, with its constraints. A mapping changes
    how arrays of its state are split: as arguments, and as the results that replace them.

    Args:
      run: makes the function that runs the script on a mesh, for those to which the step cannot be
        carried; it hands on the call of the step and the script's mesh.
    """
    capture, layout, step = _stored(entry)
    folder, with_values = Path(capture.folder), not capture.without_arrays
    ways, told = ways_of(capture.carried_by or "trace"), list[str]()

    def build(mesh: Mesh, mapping: Mapping[str, Any] | None = None) -> Workload:
        if with_values:
            _check_values(step, entry)
        try:
            carried = on_plan(step, folder, mesh, capture, ways, with_values=with_values)
        except CannotCarry as error:
            if not told:
                told.append(error.message)
                note(f"{Path(entry.location).name} is run for its step: {error.message}")
                note_again(capture.folder, error.message)
            carried = _by_running(entry, mesh, run)
        call = rearranged(carried.call, layout, capture, carried.made, mapping or {})
        return workload_of(call, capture, carried.made)

    return build


def _by_running(entry: Entry, mesh: Mesh, run: Run) -> CarriedCall:
    """Runs the script on a mesh and returns its step. Each call runs the script again, since the
    step may donate its arguments."""
    taken: list[CarriedCall] = []
    run(entry, lambda call, made: taken.append(CarriedCall(call=call, made=made)))(mesh)
    return taken[-1]


def rearranged(
    call: TracedCall, layout: Layout, capture: Capture, mesh: Mesh, mapping: Mapping[str, Any]
) -> TracedCall:
    """Makes the call of a step with those of its arguments split otherwise that a mapping
    changes."""
    axes = dict(LogicalMapping(mapping).axes)
    before, after = list(call.settings.in_shardings), list(call.settings.out_shardings)
    changed: dict[int, NamedSharding] = {}
    for place, one in enumerate(layout.arguments):
        if any(axes.get(name) for part in one.split for name in part):
            over = one.over(axes)
            changed[place] = NamedSharding(mesh, PartitionSpec(*[part or None for part in over]))
            before[place] = changed[place]
    for run in capture.step.carried if changed else ():
        for offset in range(run.count):
            place, output = run.argument + offset, run.output + offset
            if place in changed:
                after[output] = changed[place]
            elif after[output] is None and (written := layout.arguments[place].written):
                # Else the compiler may give it back split like the state that was changed.
                after[output] = NamedSharding(mesh, PartitionSpec(*[p or None for p in written]))
    settings = replace(call.settings, in_shardings=tuple(before), out_shardings=tuple(after))
    return replace(call, settings=settings)


def on_mesh(
    call: TracedCall, layout: Layout, capture: Capture, mesh: Mesh, mapping: Mapping[str, Any]
) -> TracedCall:
    """Makes the call of a step with the shardings of a mapping."""
    axes = dict(LogicalMapping(mapping).axes)
    before = [
        None if is_ref(leaf) else sharding_of(one.split, axes, mesh)
        for leaf, one in zip(call.leaves, layout.arguments, strict=True)
    ]
    after: list[Any] = [None] * len(call.settings.out_shardings)
    for run in capture.step.carried:
        for offset in range(run.count):
            after[run.output + offset] = before[run.argument + offset]
    settings = replace(call.settings, in_shardings=tuple(before), out_shardings=tuple(after))
    program = constrained(call.traced.jaxpr, constraints_of(layout.inner, axes, mesh))
    return replace(call, traced=Program(jaxpr=program), settings=settings, context=None)


def constraints_of(
    inner: Sequence[InnerSplit], axes: Mapping[str, MappedAxes], mesh: Mesh
) -> dict[Place, NamedSharding]:
    """Returns the constraints of a mapping; none for arrays that it does not split."""
    found: dict[Place, NamedSharding] = {}
    for one in inner:
        to = sharding_of(one.split, axes, mesh)
        if all(part is None for part in entries_of(to.spec)) and not one.is_gathered:
            continue
        if one.leaves_others:
            rest = len(one.split) - len(entries_of(to.spec))
            parts = [
                PartitionSpec.UNCONSTRAINED if part is None else part
                for part in entries_of(to.spec)
            ]
            to = NamedSharding(mesh, PartitionSpec(*parts, *[PartitionSpec.UNCONSTRAINED] * rest))
        found[one.path, one.bodies, one.output] = to
    return found


def sharding_of(split: Split, axes: Mapping[str, MappedAxes], mesh: Mesh) -> NamedSharding:
    """Makes the sharding of an array under a mapping; dimensions that the mapping does not split
    are whole."""
    parts: list[Any] = []
    for names in split:
        over = tuple(axis for name in names for axis in axes.get(name, ()))
        parts.append(over if len(over) > 1 else over[0] if over else None)
    while parts and parts[-1] is None:
        parts.pop()
    return NamedSharding(mesh, PartitionSpec(*parts))
