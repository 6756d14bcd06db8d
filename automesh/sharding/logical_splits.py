"""Finds, in the program, which axes split which dimensions of a step's arrays (jax)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from automesh.mesh.layout.shardings import axes_of_entry
from automesh.program.lower.lowered import axes_by_dimension, walk
from automesh.program.lower.lowering import SingleProgram
from automesh.sharding.mlir.locations import SourceReader
from automesh.sharding.passes import bindings
from automesh.space.mapping import SplitArray, SplitDimension

_Found = tuple[str, tuple[int, ...], Sequence[Sequence[str]]]  # name, shape, axes per dimension


def split_arrays(program: SingleProgram, logical: Mapping[str, str]) -> tuple[SplitArray, ...]:
    """Lists the arrays that a logical axis splits, one for each kind of split.

    It reads arguments and results, sharding constraints, and the operands and results of manual
    regions.

    Args:
      logical: axis of the program's mesh that stands for a logical axis -> that logical axis's name
        in a `SplitArray`.

    Raises:
      StepRefused: this jaxlib does not show the shardings of a program.
    """
    known = program.built.mesh.axis_names  # Code may have other meshes, too.
    distinct: dict[tuple[SplitDimension, ...], str] = {}
    for name, shape, split in (*_declared(program), *_manual(program.traced.jaxpr.jaxpr)):
        parts = tuple(
            SplitDimension(
                place=place,
                size=size,
                names=tuple(logical.get(axis, axis) for axis in axes if axis in known),
            )
            for place, (size, axes) in enumerate(zip(shape, split))
            if axes
        )
        if any(axis in logical for axes in split for axis in axes):
            distinct.setdefault(parts, name)
    return tuple(SplitArray(name=name, split=parts) for parts, name in distinct.items())


def _declared(program: SingleProgram) -> Iterator[_Found]:
    """Reads the shardings of arguments, results and constraints in the lowered program."""
    found = bindings()
    source = SourceReader(found)
    module: Any = program.lowered.compiler_ir("stablehlo")
    with module.context:
        for operation in walk(found.ir, module):
            if operation.name == "func.func":
                yield from _of_function(operation, found)
            elif operation.name == "sdy.sharding_constraint":
                where = source.of(operation)
                name = f"the array at {where}" if where else "an intermediate array"
                axes = axes_by_dimension(found.sdy, operation.attributes["sharding"])
                yield name, _shape(operation.results[0].type), axes


def _of_function(operation: Any, found: Any) -> Iterator[_Found]:
    arguments = list(operation.regions[0].blocks[0].arguments)
    attributes = operation.attributes
    if "arg_attrs" in attributes:
        for argument, said in zip(arguments, found.ir.ArrayAttr(attributes["arg_attrs"])):
            name = getattr(argument.location, "name_str", "") or "an argument"
            for axes in _of_value(said, found):
                yield name, _shape(argument.type), axes
    if "res_attrs" in attributes:
        kinds = found.ir.FunctionType(found.ir.TypeAttr(attributes["function_type"]).value).results
        for kind, said in zip(kinds, found.ir.ArrayAttr(attributes["res_attrs"])):
            for axes in _of_value(said, found):
                yield "a result", _shape(kind), axes


def _of_value(said: Any, found: Any) -> Iterator[tuple[tuple[str, ...], ...]]:
    for entry in found.ir.DictAttr(said):
        if entry.name == "sdy.sharding":
            yield axes_by_dimension(found.sdy, entry.attr)


def _shape(kind: Any) -> tuple[int, ...]:
    return tuple(kind.shape)


def _manual(jaxpr: Any) -> Iterator[_Found]:
    """Reads the specs of `shard_map`s, which the program of a one-device mesh lacks."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            ends = (("in_specs", equation.invars), ("out_specs", equation.outvars))
            for key, variables in ends:
                for spec, variable in zip(equation.params[key], variables):
                    yield (
                        "an array of a shard_map",
                        variable.aval.shape,
                        tuple(map(axes_of_entry, spec)),
                    )
        for body in core.jaxprs_in_params(equation.params):
            yield from _manual(body)
