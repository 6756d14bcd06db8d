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
from automesh.program.carry.stored_step import placed_call, read_step, set_config
from automesh.program.infer.search.constrain import Place, constrained
from automesh.program.infer.search.layout import InnerSplit, Layout, Split
from automesh.program.lower.static_args import is_ref
from automesh.program.nouns import Entry
from automesh.program.script.workload import Workload
from automesh.program.spec_entries import entries_of


def inferred_build(entry: Entry) -> Callable[..., Workload]:
    """The function `build(mesh, mapping)` of a script that makes no mesh, whose step is stored."""
    capture = entry.capture
    assert capture is not None and capture.layout is not None
    folder, layout = Path(capture.folder), capture.layout
    step = read_step(folder)
    set_config(step)
    with_values = not capture.without_arrays

    def build(mesh: Mesh, mapping: Mapping[str, Any] | None = None) -> Workload:
        if with_values and not step.has_values:
            raise UsageError(
                f"the arguments of the step of {Path(entry.location).name} are too large to be "
                "stored, so that it cannot be measured on another mesh",
                hint="search it for devices that are named, `--target tpu-v5p-16`, which needs no "
                "values",
            )
        call = placed_call(step, folder, mesh, with_values=with_values)
        return workload_of(on_mesh(call, layout, capture, mesh, mapping or {}), capture, mesh)

    return build


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
    """The constraints of a mapping; none for arrays that it does not split."""
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
    """The sharding of an array under a mapping; dimensions that it does not split are whole."""
    parts: list[Any] = []
    for names in split:
        over = tuple(axis for name in names for axis in axes.get(name, ()))
        parts.append(over if len(over) > 1 else over[0] if over else None)
    while parts and parts[-1] is None:
        parts.pop()
    return NamedSharding(mesh, PartitionSpec(*parts))
