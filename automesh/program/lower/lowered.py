"""All that touches lowered MLIR: used axes, the fingerprint, the coarsest float type (jax).

Shardy's Python bindings are not stable, so only this module uses them. Without them a fingerprint
depends on the names of axes (duplicates are then compiled twice) and every axis counts as used.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
from jax.extend import core

from automesh.errors import AutomeshError
from automesh.mesh.axes import Scalar
from automesh.package import is_users_file
from automesh.program.kernels.identity import forget_places
from automesh.program.lower.program_text import TextLine, read_lines
from automesh.program.notes import note

_SDY = (
    "MeshAttr",
    "MeshAxisAttr",
    "AxisRefAttr",
    "DimensionShardingAttr",
    "TensorShardingAttr",
    "TensorShardingPerValueAttr",
    "ManualAxesAttr",
)
# Names that users choose and the compiler ignores; `stablehlo.mesh` repeats `sdy.mesh`.
_METADATA = ("stablehlo.mesh", "jax.result_info")
# Operations that only state over which axes a value may vary; they move no data.
_SILENT = frozenset(("pvary", "pcast", "pbroadcast"))
_CONTRACTIONS = ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution")
_FLOAT = re.compile(r"(?<=[x<])(f64|f32|f16|bf16|f8E\w+|f4E\w+)(?=[>,])")
_FLOAT_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_MANTISSA_BITS = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bindings:
    """MLIR's Python classes and those of the Shardy dialect."""

    ir: Any
    sdy: Any


def _bindings() -> _Bindings | None:
    try:
        ir = importlib.import_module("jaxlib.mlir.ir")
        sdy = importlib.import_module("jaxlib.mlir.dialects.sdy")
    except ImportError:
        return None
    return _Bindings(ir=ir, sdy=sdy) if all(hasattr(sdy, name) for name in _SDY) else None


def sharded_axes(lowered: jax.stages.Lowered, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes in `names` that a sharding in the program names, in the order of `names`."""
    bindings = _bindings()
    if bindings is None:
        return tuple(names)
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        named = {name for op in walk(bindings.ir, module) for name in _axes_of(bindings, op)}
    return tuple(name for name in names if name in named)


def communicated_axes(traced: jax.stages.Traced) -> frozenset[str]:
    """Returns the names of the axes in collectives and in queries for a device's position.

    By default a `shard_map` is manual over all axes of its mesh. It does not use an axis that it
    neither shards over nor communicates over.
    """
    closed: Any = traced.jaxpr
    return frozenset(_axes_named(closed.jaxpr, inside=False))


def _axes_named(jaxpr: Any, *, inside: bool) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        for body in core.jaxprs_in_params(equation.params):
            yield from _axes_named(body, inside=inside or name == "shard_map")
        if inside and name != "shard_map" and name not in _SILENT:
            yield from _texts_in(tuple(equation.params.values()))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _texts_in(one)


def kept_arguments(lowered: jax.stages.Lowered, count: int) -> tuple[int, ...] | None:
    """Returns the arrays of a step's arguments that are arguments of its program, since the step
    uses them.

    Args:
      count: number of the arrays.

    Returns:
      Their indices; None if this version of jax does not state them.
    """
    inner: Any = getattr(lowered, "_lowering", None)
    stated: Any = getattr(inner, "compile_args", None) or {}
    kept = stated.get("kept_var_idx")
    if kept is not None:
        return tuple(sorted(int(one) for one in kept))
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(
            one.operation
            for one in module.body.operations
            if str(one.operation.attributes["sym_name"]).strip('"') == "main"
        )
        found = len(main.regions[0].blocks[0].arguments)
    return tuple(range(count)) if found == count else None


def split_of_arguments(
    lowered: jax.stages.Lowered,
) -> tuple[tuple[tuple[str, ...], ...] | None, ...]:
    """Returns, for each argument of the program, the mesh axes that split its dimensions; None if
    the compiler chooses the split."""
    bindings = _bindings()
    if bindings is None:
        return ()
    ir, sdy = bindings.ir, bindings.sdy
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(
            operation
            for operation in walk(bindings.ir, module)
            if operation.name == "func.func" and "main" in str(operation.attributes["sym_name"])
        )
        count = len(main.regions[0].blocks[0].arguments)
        if "arg_attrs" not in main.attributes:
            return (None,) * count
        stated = [ir.DictAttr(one) for one in ir.ArrayAttr(main.attributes["arg_attrs"])]
        return tuple(
            axes_by_dimension(sdy, attributes["sdy.sharding"])
            if "sdy.sharding" in attributes
            else None
            for attributes in stated
        )


def loss_dtype(lowered: jax.stages.Lowered) -> str:
    """Returns the coarsest float type among the arguments and the operands of matrix products and
    convolutions.

    Returns:
      A NumPy-like name such as `bfloat16`; `float32` for a program without floats.
    """
    bindings = _bindings()
    if bindings is None:
        found = set(_FLOAT.findall(lowered.as_text()))
    else:
        module: Any = lowered.compiler_ir("stablehlo")
        with module.context:
            found = {name for op in walk(bindings.ir, module) for name in _floats_of(op)}
    if not found:
        return "float32"
    coarsest = min(sorted(found), key=lambda name: _MANTISSA_BITS.get(name, 3))
    return _FLOAT_NAMES.get(coarsest, re.sub(r"^f(\d)e", r"float\1_e", coarsest.lower()))


def fingerprint(
    lowered: jax.stages.Lowered,
    *,
    device_ids: Sequence[int],
    compiler_options: Sequence[tuple[str, Scalar]],
    platform: str,
) -> str:
    """Hashes all that determines the compiled program; equal for programs that differ only in the
    names of axes.

    Args:
      device_ids: ids of the mesh's devices, in order.
      compiler_options: compiler options of the plan.
      platform: platform that the program is lowered for.
    """
    parts = (
        canonical_text(lowered),
        list(device_ids),
        sorted((name, type(value).__name__, value) for name, value in compiler_options),
        platform,
        jax.__version__,
        jaxlib.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def canonical_text(lowered: jax.stages.Lowered) -> str:
    """Returns the program without locations and result names. Mesh axes of size 1 are dropped and
    the others numbered; kernels are replaced by hashes.

    The renaming maps each remaining name to its own number, so different programs stay different.
    """
    bindings = _bindings()
    if bindings is None:
        return lowered.as_text()
    with _canonical(bindings, lowered) as module:
        return module.get_asm(enable_debug_info=False)


def canonical_lines(lowered: jax.stages.Lowered) -> tuple[TextLine, ...]:
    """Returns the lines of `canonical_text`, with their places in the user's code."""
    bindings = _bindings()
    if bindings is None:
        return tuple(TextLine(text=line, place="") for line in lowered.as_text().splitlines())
    with _canonical(bindings, lowered) as module:
        text = module.get_asm(enable_debug_info=False)
        printed = module.get_asm(enable_debug_info=True)
    try:
        return read_lines(text, printed, is_users=is_users_file)
    except AutomeshError as error:  # Another version of MLIR may print locations differently.
        note(f"where the lines of the program come from is not known: {error.message}")
        return tuple(TextLine(text=line, place="") for line in text.splitlines())


@contextmanager
def _canonical(bindings: _Bindings, lowered: jax.stages.Lowered) -> Generator[Any]:
    """Makes a copy of the program with renamed axes; the body runs in its MLIR context."""
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context, bindings.ir.Location.unknown():
        clone = module.operation.clone()
        operations = walk(bindings.ir, clone)
        rename = _Renaming(bindings=bindings, names=_numbered(bindings, operations))
        for operation in operations:
            rename.operation(operation)
        forget_places(operations, bindings.ir)
        yield clone


def walk(ir: Any, module: Any) -> list[Any]:
    """Returns all operations of a module, those inside an operation before it.

    Args:
      ir: MLIR's Python classes.
    """
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def axes_by_dimension(sdy: Any, sharding: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split each dimension of an array."""
    return tuple(
        tuple(
            str(sdy.AxisRefAttr(axis).name)
            for axis in sdy.DimensionShardingAttr(dimension_sharding).axes
        )
        for dimension_sharding in sdy.TensorShardingAttr(sharding).dimension_shardings
    )


def _is(attribute: Any, kind: Any) -> bool:
    # Builtin attributes have their own Python class, those of a dialect a generic one with
    # `isinstance`.
    return isinstance(attribute, kind) or (
        hasattr(kind, "isinstance") and kind.isinstance(attribute)
    )


def _attributes(bindings: _Bindings, attribute: Any) -> Iterator[Any]:
    """Yields the attribute and all attributes that it contains in arrays and dictionaries."""
    ir, sdy = bindings.ir, bindings.sdy
    if _is(attribute, ir.ArrayAttr):
        for one in ir.ArrayAttr(attribute):
            yield from _attributes(bindings, one)
    elif _is(attribute, ir.DictAttr):
        for one in ir.DictAttr(attribute):
            yield from _attributes(bindings, one.attr)
    elif _is(attribute, sdy.TensorShardingPerValueAttr):
        yield from sdy.TensorShardingPerValueAttr(attribute).shardings
    else:
        yield attribute


def _axes_of(bindings: _Bindings, operation: Any) -> Iterator[str]:
    sdy = bindings.sdy
    for name in operation.attributes:
        stated = attribute_of(operation, name)
        for attribute in _attributes(bindings, stated) if stated is not None else ():
            if _is(attribute, sdy.TensorShardingAttr):
                sharding = sdy.TensorShardingAttr(attribute)
                dimensions = [
                    sdy.DimensionShardingAttr(dimension_sharding).axes
                    for dimension_sharding in sharding.dimension_shardings
                ]
                for axes in (*dimensions, sharding.replicated_axes, sharding.unreduced_axes):
                    yield from (sdy.AxisRefAttr(axis).name for axis in axes)


def _floats_of(operation: Any) -> Iterator[str]:
    if operation.name in _CONTRACTIONS:
        for operand in operation.operands:
            yield from _FLOAT.findall(str(operand.type))
    elif operation.name == "func.func" and "main" in str(operation.attributes["sym_name"]):
        for argument in operation.regions[0].blocks[0].arguments:
            yield from _FLOAT.findall(str(argument.type))


def _numbered(bindings: _Bindings, operations: Sequence[Any]) -> dict[str, str]:
    """Returns the numbers of axes, in order of appearance, for axes that are larger than 1 in any
    mesh."""
    sdy = bindings.sdy
    names: dict[str, str] = {}
    for operation in operations:
        if operation.name == "sdy.mesh":
            for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes):
                if axis.size > 1:
                    names.setdefault(axis.name, f"a{len(names)}")
    return names


def attribute_of(operation: Any, name: str) -> Any:
    """Returns an attribute of an operation; None if MLIR's Python bindings have no class for it, as
    for constants of complex numbers."""
    try:
        return operation.attributes[name]
    except TypeError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renaming:
    """Rewrites attributes: replaces axes in `names` by their numbers and drops all others."""

    bindings: _Bindings
    names: dict[str, str]

    def operation(self, operation: Any) -> None:
        for name in list(operation.attributes):
            if name in _METADATA:
                del operation.attributes[name]
            else:
                old = attribute_of(operation, name)
                new = self._attribute(old) if old is not None else None
                if new is not old:
                    operation.attributes[name] = new

    def _attribute(self, attribute: Any) -> Any:
        ir, sdy = self.bindings.ir, self.bindings.sdy
        if _is(attribute, ir.ArrayAttr):
            return ir.ArrayAttr.get([self._attribute(one) for one in ir.ArrayAttr(attribute)])
        if _is(attribute, ir.DictAttr):
            entries = {one.name: self._attribute(one.attr) for one in ir.DictAttr(attribute)}
            return ir.DictAttr.get(
                {key: value for key, value in entries.items() if key not in _METADATA}
            )
        if _is(attribute, sdy.TensorShardingAttr):
            return self._sharding(sdy.TensorShardingAttr(attribute))
        if _is(attribute, sdy.TensorShardingPerValueAttr):
            shardings = sdy.TensorShardingPerValueAttr(attribute).shardings
            return sdy.TensorShardingPerValueAttr.get(
                [self._attribute(sharding) for sharding in shardings]
            )
        if _is(attribute, sdy.ManualAxesAttr):
            kept = [
                self.names[name] for name in sdy.ManualAxesAttr(attribute) if name in self.names
            ]
            return sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in kept])
        if _is(attribute, sdy.MeshAttr):
            return self._mesh(sdy.MeshAttr(attribute))
        return attribute

    def _mesh(self, mesh: Any) -> Any:
        sdy = self.bindings.sdy
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        kept = [
            sdy.MeshAxisAttr.get(self.names[axis.name], axis.size)
            for axis in axes
            if axis.name in self.names
        ]
        return sdy.MeshAttr.get(kept, list(mesh.device_ids))

    def _sharding(self, sharding: Any) -> Any:
        sdy = self.bindings.sdy
        dimensions = [
            sdy.DimensionShardingAttr.get(self._axes(one.axes), one.is_closed, one.priority)
            for one in map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
        ]
        return sdy.TensorShardingAttr.get(
            self._attribute(sharding.mesh_or_ref),
            dimensions,
            self._axes(sharding.replicated_axes),
            self._axes(sharding.unreduced_axes),
        )

    def _axes(self, axes: Any) -> list[Any]:
        sdy = self.bindings.sdy
        refs = [sdy.AxisRefAttr(axis) for axis in axes]
        return [
            sdy.AxisRefAttr.get(self.names[ref.name], ref.sub_axis_info)
            for ref in refs
            if ref.name in self.names
        ]
