"""Makes the terms of one set of active axes: lower, propagate shardings, read, collect (jax).

Most steps have the same program on every mesh, except for the sizes of the mesh: then a few are
lowered, and the others are derived from them. Steps that state sizes of one device's part (manual
regions) are lowered at further sizes, which shows how every number depends on the axes. Axes for
which that fails are in `Terms.fixed`: the terms hold at the sampled sizes only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from automesh.cost.terms import Cure, DivisibilityGuard, Footprint, Terms
from automesh.ir.findings.merged import merged
from automesh.ir.findings.nouns import PartitionedProgram, StepState
from automesh.ir.findings.registry import state_findings
from automesh.ir.graph import Block, Graph, Value
from automesh.ir.passes.halos import axes_of_odd_moves
from automesh.ir.terms.collect import collect
from automesh.program.lower.carry_state import CarriedLeaves
from automesh.program.nouns import Propagation
from automesh.sharding.carry import (
    read_carry,
    resplit,
    shardings_of_results,
    state_of,
    with_arguments,
)
from automesh.sharding.constraints import constraints_of
from automesh.sharding.cures import apply_cure
from automesh.sharding.fitting import SizedProgram, Sizes
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import STAGE, PreparedModule, partitioned, prepared
from automesh.sharding.programs import ENOUGH, Programs
from automesh.sharding.silenced import not_silenced

# So many of a worker's first sets are partitioned at another size, too; the rest have guards.
_VERIFIED = 1
_SMALL = 4096


def propagate(
    programs: Programs,
    *,
    sizes: Sizes,
    probes: Sequence[Sizes],
    exact: bool = False,
    largest: Sizes = (),
    enter: Callable[[str], None],
    with_results: bool = False,
    cure: Cure | None = None,
) -> Propagation:
    """Makes the terms of a step for the axes in `sizes`.

    Args:
      programs: the step; keeps its lowerings between calls.
      sizes: of the active axes; all others are 1.
      probes: other sizes of the same axes at which the terms must hold too.
      exact: lower the step at `sizes` instead of deriving its program from others.
      largest: the largest size of each axis at which the terms are wanted; without it, the number
        of devices.
      enter: called with the next stage: build, lower, propagate.
      with_results: add the size of each result.
      cure: a change that is made in a copy of the program first.

    Raises:
      StepRefused: Shardy's passes are missing or fail; or the cure has no place in the program.
      Exception: whatever the user's code raises at `sizes`.
    """
    lowering_before_s = programs.lower_s
    located = programs.at(dict(sizes), probes, enter, exact=exact, largest=dict(largest))
    begun = perf_counter()
    enter(STAGE)
    change = None if cure is None else functools.partial(apply_cure, cure=cure)
    first = _first_step(located, programs.platform, change)
    graph = _settled(located, first, change)
    results = tuple(value.bytes for value in graph.top.returned) if with_results else ()
    failed = [*located.failed]
    if programs.verified < _VERIFIED and located.others:
        programs.verified += 1
        failed += _contradicting(first.graph, located, probes, programs.platform)
    active = tuple(axis for axis, _ in sizes)
    graphs = {first.graph: None, graph: None}
    moving = axes_of_odd_moves(graph)
    fixed = {
        *located.fixed,
        *moving,
        *(axis for one in graphs for axis in (*one.sub_axes, *one.padded)),
    }
    guards = tuple(
        guard
        for guard in dict.fromkeys(guard for one in graphs for guard in _guards(one))
        if not fixed.issuperset(guard.axes)
    )
    state = first.state
    program = PartitionedProgram(graph=first.graph, platform=programs.platform, state=state)
    of_state = tuple(state_findings(program))
    batch_axes = program.batch_axes()
    collected = collect(graph, active=active, platform=programs.platform, state=state)
    terms = replace(
        collected,
        first=_footprint(first.graph, programs.platform) if graph is not first.graph else None,
        findings=merged(not_silenced((*of_state, *collected.findings)), dict(sizes)),
        active=active,
        batch_axes=batch_axes,
        sampled=tuple(sizes),
        guards=guards,
        fixed=tuple(axis for axis in active if axis in fixed),
        limits=located.limits,
    )
    return Propagation(
        terms=terms,
        failed_probes=tuple(dict.fromkeys(failed)),
        notes=_notes(located, graph, terms, moving=moving, probed=bool(probes)),
        lower_s=programs.lower_s - lowering_before_s,
        propagate_s=perf_counter() - begun,
        results=results,
        is_general=cure is None and not (exact or failed) and _is_general(programs, located),
    )


def _is_general(programs: Programs, located: SizedProgram) -> bool:
    """Whether the program would be the same one if other sizes of the mesh were asked for, too."""
    is_alike = located.derived or (not programs.varies and programs.witnesses >= ENOUGH)
    return is_alike and not located.fixed and not located.limits


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartitionedStep:
    """A partitioned step.

    Attributes:
      module: with propagated shardings.
      carried: its state, if that is known.
      moved: pairs of the state that come back with another sharding.
    """

    ready: PreparedModule
    module: Any
    graph: Graph
    carried: CarriedLeaves | None = None
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def state(self) -> StepState:
        return replace(state_of(self.carried, self.moved), constraints=constraints_of(self.ready))


_Change = Callable[[Any], None]
# How many steps the shardings of the state are followed.
_SETTLING_TRIES = 3


def _first_step(
    located: SizedProgram, platform: str, change: _Change | None = None
) -> _PartitionedStep:
    ready = located.module
    if not isinstance(ready, PreparedModule):
        ready = prepared(ready, is_plain=True, platform=platform)
    return _partitioned(ready, located.sizes, change)


def _partitioned(
    ready: PreparedModule, sizes: Mapping[str, int], change: _Change | None = None
) -> _PartitionedStep:
    module = partitioned(ready, sizes=sizes, change=change)
    graph, carried = read_graph(module, ready.sources), read_carry(module)
    return _PartitionedStep(
        ready=ready,
        module=module,
        graph=graph,
        carried=carried,
        moved=resplit(graph, carried) if carried is not None else (),
    )


def _settled(located: SizedProgram, first: _PartitionedStep, change: _Change | None) -> Graph:
    """Finds the program of all steps but the first few, whose state keeps its sharding.

    Args:
      change: as in the first step.
    """

    def changed(module: Any, shardings: Mapping[int, Any]) -> None:
        if change is not None:
            change(module)
        with_arguments(module, shardings)

    step, stated = first, dict[int, Any]()
    for _ in range(_SETTLING_TRIES):
        if not step.moved:
            break
        stated |= shardings_of_results(step.module, step.moved)
        again = functools.partial(changed, shardings=dict(stated))
        step = _partitioned(first.ready, located.sizes, again)
    return step.graph


def _footprint(graph: Graph, platform: str) -> Footprint:
    """Computes the memory of a step. Changes its graph."""
    found = collect(graph, active=(), platform=platform)
    return Footprint(
        points=found.points,
        argument_bytes=found.argument_bytes,
        output_bytes=found.output_bytes,
        alias_bytes=found.alias_bytes,
        on_chip_bytes=found.on_chip_bytes,
        reread_bytes=found.reread_bytes,
    )


def _contradicting(
    graph: Graph, located: SizedProgram, probes: Sequence[Sizes], platform: str
) -> list[Sizes]:
    """Returns the probes at which Shardy partitions the program in another way."""
    found: list[Sizes] = []
    for other in located.others:
        if not same_program(graph, _first_step(other, platform).graph):
            found += [
                probe for probe in probes if all(other.sizes[axis] == size for axis, size in probe)
            ]
    return found


def same_program(one: Graph, other: Graph) -> bool:
    """Whether two graphs have the same operations on values with the same shardings."""
    return list(_described(one.top)) == list(_described(other.top))


def _described(block: Block) -> Iterator[tuple[object, ...]]:
    """Describes operations on large arrays, collectives and loops."""
    yield _splits(block.arguments)
    for operation in block.operations:
        axes = operation.attributes.get("axes")
        operands, results = _splits(operation.operands), _splits(operation.results)
        if results or axes or operation.bodies:
            yield (
                operation.name,
                operands,
                results,
                axes,
                operation.attributes.get("per_dimension"),
                operation.times,
            )
        for body in operation.bodies:
            yield from _described(body)


def _splits(values: Sequence[Value]) -> tuple[object, ...]:
    # Equal constants are merged, and arrays of indices may grow in ways that `fitting` ignores.
    return tuple(
        (value.dtype, value.shape, value.axes, value.grown)
        for value in values
        if math.prod(value.shape) > _SMALL
    )


def _guards(graph: Graph) -> tuple[DivisibilityGuard, ...]:
    """Makes the conditions that every array is divided evenly, as at the sampled sizes."""
    found: set[tuple[int, tuple[str, ...]]] = set()
    for value in _values(graph.top):
        for index, axes in enumerate(value.axes):
            if axes and index not in value.free and not (value.grown and value.grown[index]):
                found.add((value.shape[index], axes))
    order = {axis: place for place, (axis, _) in enumerate(graph.mesh)}
    kept = {(size, tuple(sorted(axes, key=lambda axis: order[axis]))) for size, axes in found}
    return tuple(DivisibilityGuard(size=size, axes=axes) for size, axes in sorted(kept))


def _values(block: Block) -> Iterator[Value]:
    yield from block.arguments
    for operation in block.operations:
        yield from operation.results
        for body in operation.bodies:
            yield from _values(body)


def _notes(
    located: SizedProgram, graph: Graph, terms: Terms, *, moving: Collection[str], probed: bool
) -> tuple[str, ...]:
    notes: list[str] = []
    if located.derived:
        notes.append(
            f"not every mesh was lowered: at least {ENOUGH} were, or, for further values of knobs, "
            f"each axis at 1 and at two more sizes; their programs differ only in the sizes of the "
            f"axes, so the programs of the other meshes were derived from them"
        )
    baked = [axis for axis in terms.fixed if axis not in (*graph.sub_axes, *graph.padded, *moving)]
    if baked and probed:
        notes.append(
            f"the program depends on the size of {_listed(baked)} in a way that has no formula: "
            f"meshes with other sizes there are propagated apart"
        )
    for axis, limit in terms.limits:
        notes.append(
            f"the program is another one where `{axis}` is larger than {limit}: "
            f"those meshes are propagated apart"
        )
    if graph.sub_axes:
        notes.append(
            f"some array is split over a part of {_listed(graph.sub_axes)} only; its collectives "
            f"are priced as if they ran over the whole axis"
        )
    if moving:
        notes.append(
            f"some slice along a dimension that is split over {_listed(sorted(moving))} moves rows "
            f"between devices: meshes with other sizes there are propagated apart"
        )
    if graph.padded:
        notes.append(
            f"some array does not divide evenly over {_listed(graph.padded)}: it is counted with "
            f"the padding that the compiler adds, and meshes with other sizes there apart"
        )
    return tuple(notes)


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(f"`{axis}`" for axis in axes)
