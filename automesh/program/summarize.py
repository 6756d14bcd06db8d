"""From a step that was built and lowered to what `automesh check-script` says of it (jax)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import kind_of
from automesh.program.execute.arguments import values_in_words
from automesh.program.execute.prepare import Forms, change_of, covered_by_init, forms_by_argument
from automesh.program.execute.value_domains import Domain, domains
from automesh.program.lower.lowered import split_of_arguments
from automesh.program.lower.lowering import Program
from automesh.program.lower.static_args import is_concrete, is_ref, leaf_shape
from automesh.program.pipeline.attached import covered_by_pipeline_init
from automesh.program.pipeline.lower import PipelineProgram
from automesh.program.script.build import Built
from automesh.program.script.pure_step import StepOutputs, returned_of
from automesh.program.step_summary import Argument, Carried, Origin, StepSummary

_STATIC_CHARS = 60


def summarize(
    program: Program | PipelineProgram,
    again: Built,
    *,
    reference: Program | PipelineProgram,
    is_run: bool,
) -> StepSummary:
    """Describes a step.

    Args:
      program: the step.
      again: what a second call of `build` gave, on the same mesh.
      reference: the step on one device, by which values are made up.
      is_run: whether the step is going to be run here: else nobody asks for values.
    """
    built = program.built
    names = _names(program)
    leaves = jax.tree.leaves((program.args, program.kwargs))
    donated = _donated(program)
    specs = _specs(program, leaves)
    origins = _origins(program, leaves) if is_run else [""] * len(leaves)
    allowed = _domains(program, reference, len(leaves))
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
            values=values_in_words(leaf_shape(leaf), _dtype_of(leaf), domain)
            if origin == "made up"
            else "",
        )
        for name, leaf, is_donated, spec, origin, domain in zip(
            names, leaves, donated, specs, origins, allowed, strict=True
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
        has_advance=built.workload.advance is not None,
        is_pipeline=isinstance(program, PipelineProgram),
        change=change_of(_forms(again), _forms(built)),
        fingerprint=program.fingerprint(()),
    )


def _forms(built: Built) -> Forms:
    workload = built.workload
    if built.traced is not None:
        args, kwargs = built.traced.in_avals
        workload = replace(workload, args=args, kwargs=kwargs)
    return forms_by_argument(workload)


def _names(program: Program | PipelineProgram) -> list[str]:
    """What the arrays are called, with the static arguments counted."""
    static = program.split.positions if isinstance(program, Program) else ()
    count = len(program.args) + len(static)
    places = [position for position in range(count) if position not in static]
    whole: dict[int, Any] = dict(zip(places, program.args, strict=True))
    named = [
        f"args[{place}]{jax.tree_util.keystr(path)}"
        for place, arg in whole.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]
    keywords = jax.tree_util.tree_flatten_with_path(program.kwargs)[0]
    return [*named, *(f"kwargs{jax.tree_util.keystr(path)}" for path, _ in keywords)]


def _place(program: Program | PipelineProgram, position: int) -> int:
    """Where an argument stands among all, the static ones too."""
    static = program.split.positions if isinstance(program, Program) else ()
    places = [place for place in range(len(program.args) + len(static)) if place not in static]
    return places[position]


def _static(program: Program | PipelineProgram) -> tuple[tuple[str, str], ...]:
    if isinstance(program, PipelineProgram):
        return ()
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


def _donated(program: Program | PipelineProgram) -> tuple[bool, ...]:
    if isinstance(program, Program):
        return program.donated
    # A pipeline's step gives its state away.
    state, batch = (len(jax.tree.leaves(arg)) for arg in program.args)
    return (True,) * state + (False,) * batch


def _carried(
    program: Program | PipelineProgram,
) -> tuple[tuple[Carried, ...], tuple[int, ...]]:
    """What is carried to the next step, and the positions of the arrays that are lost."""
    if isinstance(program, PipelineProgram):
        count = len(jax.tree.leaves(program.args[0]))
        return (Carried(argument="args[0]", output="outputs[0]", arrays=count),), ()
    if program.built.workload.advance is not None:
        return (), ()
    carry, outputs = program.carry, program.traced.out_info
    in_place = len(outputs.changed) if isinstance(outputs, StepOutputs) else 0
    is_whole = type(returned_of(outputs)) not in (tuple, list)
    carried = tuple(
        Carried(
            argument=f"args[{_place(program, position)}]",
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


def _losses(program: Program | PipelineProgram) -> tuple[str, ...]:
    if isinstance(program, PipelineProgram):
        return ("outputs[1]['loss']",)
    outputs: Any = returned_of(program.traced.out_info)
    first = "output" if type(outputs) not in (tuple, list) else "outputs"
    return tuple(
        first + jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]
        if leaf_shape(leaf) == () and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _origins(program: Program | PipelineProgram, leaves: Sequence[Any]) -> list[Origin]:
    covered = (
        covered_by_init(program)
        if isinstance(program, Program)
        else covered_by_pipeline_init(program, program.args)
    )
    return [
        "init" if given else "build" if is_concrete(leaf) else "made up"
        for given, leaf in zip(covered, leaves, strict=True)
    ]


def _domains(
    program: Program | PipelineProgram, reference: Program | PipelineProgram, count: int
) -> Sequence[Domain]:
    """As when the values are made: see `preparing.prepare`."""
    if not isinstance(program, Program) or not isinstance(reference, Program):
        return [Domain()] * count
    found = domains(reference.traced)
    return found if len(found) == count else domains(program.traced)


def _specs(program: Program | PipelineProgram, leaves: Sequence[Any]) -> list[Any]:
    """How each leaf is split: as it says itself, else as the jitted step does; None if neither."""
    own = [_own_spec(leaf) for leaf in leaves]
    if isinstance(program, PipelineProgram) or all(spec is not None for spec in own):
        return own
    by_jit = split_of_arguments(program.lowered)
    # Arguments that the step does not use are no arguments of its program.
    if len(by_jit) != len(leaves):
        return own
    return [
        spec if spec is not None or axes is None else PartitionSpec(*map(_entry, axes))
        for spec, axes in zip(own, by_jit, strict=True)
    ]


def _entry(axes: Sequence[str]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _own_spec(leaf: Any) -> Any:
    """A partition spec, or another sharding where it is none of a mesh; None if it says nothing."""
    sharding = getattr(leaf, "sharding", None)
    # An array that nobody has put anywhere goes where the step wants it.
    if sharding is None or not getattr(leaf, "committed", True):
        return None
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _text_of(spec: Any) -> str:
    if spec is None:
        return ""
    if not isinstance(spec, PartitionSpec):
        return type(spec).__name__
    entries = list(spec)
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return f"P({', '.join(map(repr, entries))})"


def _shard_shape(leaf: Any, spec: Any, mesh: Mesh) -> tuple[int, ...]:
    shape = leaf_shape(leaf)
    if not isinstance(spec, PartitionSpec):
        return shape
    parts = [
        math.prod(mesh.shape[axis] for axis in _axes(entry) if axis in mesh.shape) for entry in spec
    ]
    parts += [1] * (len(shape) - len(parts))
    return tuple(-(-size // part) for size, part in zip(shape, parts))


def _axes(entry: Any) -> tuple[Any, ...]:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _dtype_of(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def _dtype(leaf: Any) -> str:
    return str(_dtype_of(leaf))


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * _dtype_of(leaf).itemsize
