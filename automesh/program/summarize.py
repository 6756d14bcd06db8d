"""Summarizes a built and lowered step for `automesh check-script` (jax)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import kind_of
from automesh.mesh.layout.shardings import axes_of_entry
from automesh.program.execute.arguments import values_in_words
from automesh.program.execute.prepare import (
    Forms,
    change_of,
    covered_by_init,
    domains_of,
    forms_by_argument,
)
from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import StepClasses
from automesh.program.lower.any_step import StepProgram
from automesh.program.lower.lowering import SingleProgram
from automesh.program.lower.static_args import is_concrete, is_ref, leaf_dtype, leaf_shape
from automesh.program.script.build import Built
from automesh.program.script.workload import NamedWorkload, leaf_names_of
from automesh.program.spec_entries import entries_of
from automesh.program.step_summary import Argument, CarriedArgument, Origin, StepSummary

_STATIC_CHARS = 60


def summarize(
    program: StepProgram,
    again: Built,
    *,
    reference: StepProgram,
    is_run: bool,
) -> StepSummary:
    """Describes a step.

    Args:
      program: the step.
      again: the result of a second call of `build` on the same mesh.
      reference: the step on the mesh on which it is looked at, which determines made-up values.
      is_run: whether the step will be run here, so that it needs values.
    """
    built = program.built
    known = leaf_names_of(built.workload)
    named = list(program.split.named_leaves(program.args, program.kwargs, known))
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    specs = _specs(program, leaves)
    origins = _origins(program, leaves) if is_run else [""] * len(leaves)
    # As when the values are made: see `prepare`.
    allowed = domains_of(program, reference.domains())
    mesh = built.mesh
    arguments = tuple(
        Argument(
            name=name,
            shape=leaf_shape(leaf),
            dtype=_dtype(leaf),
            spec=_text_of(spec),
            total_bytes=_bytes(leaf_shape(leaf), leaf),
            device_bytes=_bytes(_shard_shape(leaf, spec, mesh), leaf),
            is_donated=is_donated,
            is_ref=is_ref(leaf),
            origin=origin,
            values=values_in_words(leaf_shape(leaf), leaf_dtype(leaf), domain)
            if origin == "made up"
            else "",
        )
        for name, leaf, is_donated, spec, origin, domain in zip(
            names, leaves, program.donated, specs, origins, allowed, strict=True
        )
    )
    carried, lost = _carried(program)
    return StepSummary(
        arguments=arguments,
        static=_static(program),
        carried=carried,
        lost=tuple(names[position] for position in lost),
        losses=_losses(program),
        has_init=built.workload.init is not None,
        has_advance=built.workload.advance is not None
        and not isinstance(built.workload, NamedWorkload),
        is_pipeline=not isinstance(program, SingleProgram),
        change=change_of(_forms(again), _forms(built)),
        fingerprint=program.fingerprint(()),
        classes=_classes(program, names),
    )


def _classes(program: StepProgram, names: Sequence[str]) -> StepClasses | None:
    """Returns the classes of the step's dimensions; None for a pipeline, which is several
    programs."""
    if not isinstance(program, SingleProgram):
        return None
    closed: Any = program.traced.jaxpr
    num_held = len(closed.jaxpr.invars) - len(names)
    if num_held < 0:
        return None
    return classes_of(
        closed, num_held=num_held, carried=dict(_carried_leaves(program)), names=names
    )


def _carried_leaves(program: SingleProgram) -> Iterator[tuple[int, int]]:
    """Yields pairs: the leaf of the arguments, and the leaf of the results that replaces it."""
    workload = program.built.workload
    if isinstance(workload, NamedWorkload) and workload.advance is not None:
        yield from workload.carried
        return
    outputs = program.traced.out_info
    parts = outputs if type(outputs) in (tuple, list) else (outputs,)
    arguments = _starts([len(jax.tree.leaves(arg)) for arg in program.args])
    results = _starts([len(jax.tree.leaves(part)) for part in parts])
    for position, output in program.carry.pairs:
        place = output - program.changed_in_place
        if place < 0:
            continue  # A mutable array, which the step changes in place.
        mine, theirs = jax.tree.leaves(program.args[position]), jax.tree.leaves(parts[place])
        for offset in range(min(len(mine), len(theirs))):
            yield arguments[position] + offset, results[place] + offset


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _forms(built: Built) -> Forms:
    workload = built.workload
    if built.traced is not None:
        args, kwargs = built.traced.in_avals
        workload = replace(workload, args=args, kwargs=kwargs)
    return forms_by_argument(workload)


def _static(program: StepProgram) -> tuple[tuple[str, str], ...]:
    workload = program.built.workload
    named = [(f"args[{place}]", workload.args[place]) for place in program.split.positions]
    named += [(f"kwargs[{name!r}]", workload.kwargs[name]) for name in program.split.names]
    return tuple((name, _in_words(value)) for name, value in named)


def _in_words(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's __repr__ may do anything
        return kind_of(value)
    return text if len(text) <= _STATIC_CHARS else text[:_STATIC_CHARS] + "..."


def _carried(
    program: StepProgram,
) -> tuple[tuple[CarriedArgument, ...], tuple[int, ...]]:
    """Returns the arguments that are carried to the next step, and the positions of lost arrays."""
    workload = program.built.workload
    if isinstance(workload, NamedWorkload) and workload.leaf_names:
        return _by_name(workload), program.carry.lost if workload.advance is None else ()
    if workload.advance is not None:
        return (), ()
    carry, in_place = program.carry, program.changed_in_place
    is_whole = type(program.compared_outputs) not in (tuple, list)
    places = program.split.places(len(program.args))
    carried = tuple(
        CarriedArgument(
            argument=f"args[{places[position]}]",
            output=""
            if output < in_place
            else "the output"
            if is_whole
            else f"outputs[{output - in_place}]",
            arrays=len(jax.tree.leaves(program.args[position])),
        )
        for position, output in carry.pairs
    )
    return carried, carry.lost


def _by_name(workload: NamedWorkload) -> tuple[CarriedArgument, ...]:
    """Returns the results that a script passes to its next step, by the user's names of the
    arguments."""
    outputs: dict[str, list[int]] = {}
    for argument, output in workload.carried:
        if argument < len(workload.leaf_names):
            name = workload.leaf_names[argument]
            head = name[: min(place for mark in ".[" if (place := f"{name}{mark}".find(mark)) > 0)]
            outputs.setdefault(head, []).append(output)
    return tuple(
        CarriedArgument(
            argument=name,
            output=f"outputs[{min(places)}]" + (f"..[{max(places)}]" if len(places) > 1 else ""),
            arrays=len(places),
        )
        for name, places in outputs.items()
    )


def _losses(program: StepProgram) -> tuple[str, ...]:
    outputs = program.compared_outputs
    first = "output" if type(outputs) not in (tuple, list) else "outputs"
    return tuple(
        first + jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]
        if leaf_shape(leaf) == () and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _origins(program: StepProgram, leaves: Sequence[Any]) -> list[Origin]:
    return [
        "init" if given else "build" if is_concrete(leaf) else "made up"
        for given, leaf in zip(covered_by_init(program), leaves, strict=True)
    ]


def _specs(program: StepProgram, leaves: Sequence[Any]) -> list[Any]:
    """Returns how each leaf is split: by its own sharding, else by the jitted step's; None if
    neither states it."""
    own = [_own_spec(leaf) for leaf in leaves]
    if all(spec is not None for spec in own):
        return own
    by_jit = program.stated_splits
    # Arguments that the step does not use are not in its program.
    if len(by_jit) != len(leaves):
        return own
    return [
        spec if spec is not None or axes is None else PartitionSpec(*map(_entry, axes))
        for spec, axes in zip(own, by_jit, strict=True)
    ]


def _entry(axes: Sequence[str]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _own_spec(leaf: Any) -> Any:
    """Returns the leaf's own partition spec, or its sharding if that is not on a mesh; None if it
    has none."""
    sharding = getattr(leaf, "sharding", None)
    # An uncommitted array goes where the step wants it.
    if sharding is None or not getattr(leaf, "committed", True):
        return None
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _text_of(spec: Any) -> str:
    if spec is None:
        return ""
    if not isinstance(spec, PartitionSpec):
        return type(spec).__name__
    entries = list(entries_of(spec))
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return f"P({', '.join(map(repr, entries))})"


def _shard_shape(leaf: Any, spec: Any, mesh: Mesh) -> tuple[int, ...]:
    shape = leaf_shape(leaf)
    if not isinstance(spec, PartitionSpec):
        return shape
    parts = [
        math.prod(mesh.shape[axis] for axis in axes_of_entry(entry) if axis in mesh.shape)
        for entry in entries_of(spec)
    ]
    parts += [1] * (len(shape) - len(parts))
    return tuple(-(-size // part) for size, part in zip(shape, parts))


def _dtype(leaf: Any) -> str:
    return str(leaf_dtype(leaf))


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf_dtype(leaf).itemsize
