"""All that touches Shardy's passes: partitions a lowered module with explicit collectives (jax).

The passes and MLIR's Python bindings carry no stability promise: they are looked up here, and what
is missing is said in one sentence. `sdy-convert-global-to-local` is left out on purpose: it ends
the process on some inputs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib

from automesh.outcomes import Failed
from automesh.program.notes import in_one_line
from automesh.program.refused import Refused
from automesh.sharding.reshard import note_declared_shardings, reshard_before_elementwise

# Puts the bodies of called functions in the place of the calls (jax's MLIR bindings).
#
# XLA's pipeline inlines all calls before Shardy runs (`call-inliner` in the pipeline
# `spmd-partitioner`). If Shardy sees functions, it settles one sharding for each argument, and a
# value that is read in a loop by a small function may be gathered whole in front of the call.
# MLIR's own `inline` pass leaves the calls: the dialects do not allow it here.

_CALLS = ("func.call", "call")


def inline_calls(module: Any, ir: Any) -> None:
    """Inlines every function that is called once and whose signature states no shardings.

    Args:
      module: the operation of a module in which each call has a function of its own; changed in
        place.
      ir: MLIR's Python classes.
    """
    top = module.regions[0].blocks[0]
    functions = {
        ir.StringAttr(one.attributes["sym_name"]).value: one.operation
        for one in top.operations
        if one.operation.name == "func.func"
    }
    calls: dict[str, list[Any]] = {}
    for operation in _operations_in(module):
        if operation.name in _CALLS:
            calls.setdefault(_callee(operation, ir), []).append(operation)
    for name, places in calls.items():
        function = functions.get(name)
        if function is not None and len(places) == 1 and not _states_shardings(function):
            _move(function, places[0], ir)
            function.erase()


def _callee(call: Any, ir: Any) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def _states_shardings(function: Any) -> bool:
    stated = (
        function.attributes[k] for k in ("arg_attrs", "res_attrs") if k in function.attributes
    )
    return any("sdy.sharding" in str(one) for one in stated)


def _move(function: Any, call: Any, ir: Any) -> None:
    body = function.regions[0].blocks[0]
    for argument, operand in zip(body.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    operations = [one.operation for one in body.operations]
    returned = list(operations[-1].operands)
    for operation in operations[:-1]:
        operation.move_before(call)
        # jax notes no file for what it traced once and calls from several places.
        for one in (operation, *_operations_in(operation)):
            one.location = ir.Location.callsite(one.location, [call.location])
    for result, value in zip(call.results, returned, strict=True):
        result.replace_all_uses_with(value)
    call.erase()


def _operations_in(root: Any) -> list[Any]:
    found: list[Any] = []
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                found.append(view.operation)
                found += _operations_in(view.operation)
    return found


STAGE = "propagate"
_CLASSES = (
    "AxisRefAttr",
    "DimensionShardingAttr",
    "ManualAxesAttr",
    "MeshAttr",
    "MeshAxisAttr",
    "ReshardOp",
    "SubAxisInfoAttr",
    "TensorShardingAttr",
    "TensorShardingPerValueAttr",
)
# Shardy's own propagation pipeline (shardy/dialect/sdy/transforms/propagation/
# propagation_pipeline.cc), spelled out: its reshards are made with the full version of
# `sdy-insert-explicit-reshards`, which needs the sharding rules kept until then, and become
# collectives. Shardy has no rules for CHLO, so that is rewritten first, as XLA does.
_PROPAGATION = (
    "func.func(chlo-legalize-to-stablehlo)",
    "symbol-dce",
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "sdy-propagate-sharding-from-func-to-call",
    "sdy-constant-or-scalar-splitter",
    "symbol-dce",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    "sdy-flatten-call-graph",
    "symbol-dce",
    "sdy-import-func-calls{add-data-flow-edges-on-named-computations=true}",
    "symbol-dce",
    "sdy-apply-sharding-constraints",
    "sdy-sharding-group-import",
    "sdy-pre-order-funcs",
    "sdy-user-priority-propagate{keep-sharding-rules=true propagation-strategy=aggressive"
    " run-op-priority-propagation=true}",
    "sdy-export-named-computations",
    "sdy-propagate-to-func-results",
    "sdy-unflatten-call-graph",
    "symbol-dce",
    "sdy-insert-func-call-reshards",
    "func.func(sdy-constant-or-scalar-merger)",
    "func.func(sdy-sink-data-flow-edges)",
    "sdy-remove-sharding-groups",
    "func.func(sdy-sharding-constraint-to-reshard)",
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
    "sdy-close-shardings",
)
_PLAIN = ("func.func(chlo-legalize-to-stablehlo)", "symbol-dce", "sdy-flatten-call-graph")
_COLLECTIVES = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "canonicalize{enable-patterns=sdy-collective}",
    "func.func(sdy-drop-sharding-rules)",
    "func.func(sdy-reshard-to-collectives)",
    "canonicalize{enable-patterns=sdy-collective}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """MLIR's Python classes, those of the dialects, and the pass manager."""

    ir: Any
    sdy: Any
    stablehlo: Any
    pass_manager: Any


@functools.cache
def bindings() -> Bindings:
    """What the installed jaxlib offers.

    Raises:
      Refused: something is missing.
    """
    try:
        found = Bindings(
            ir=importlib.import_module("jaxlib.mlir.ir"),
            sdy=importlib.import_module("jaxlib.mlir.dialects.sdy"),
            stablehlo=importlib.import_module("jaxlib.mlir.dialects.stablehlo"),
            pass_manager=importlib.import_module("jaxlib.mlir.passmanager").PassManager,
        )
    except (ImportError, AttributeError) as error:
        raise _missing(in_one_line(error)) from error
    for name in _CLASSES:
        if not hasattr(found.sdy, name):
            raise _missing(f"its Shardy bindings have no `{name}`")
    if not hasattr(found.stablehlo, "register_stablehlo_passes"):
        raise _missing("its StableHLO bindings have no `register_stablehlo_passes`")
    found.stablehlo.register_stablehlo_passes()
    return found


def partitioned(program: Any, *, sizes: Mapping[str, int] | None = None) -> Any:
    """Partitions a copy of a lowered program: shardings everywhere, collectives explicit.

    Args:
      program: the module that `lowered.compiler_ir("stablehlo")` gives, or its text.
      sizes: axis sizes to partition it at instead of those it was lowered with; for axes that are
        left out nothing changes.

    Returns:
      The builtin.module operation; locations are kept.

    Raises:
      Refused: this jaxlib lacks a pass, or a pass fails.
    """
    found = bindings()
    module = _parse(found, program) if isinstance(program, str) else program
    with module.context, found.ir.Location.unknown():
        copy = module.operation.clone()
        if sizes is not None:
            _resize(found, copy, sizes)
        try:
            _flatten(found, copy.operation)
            _pipeline(found, _PROPAGATION).run(copy.operation)
            note_declared_shardings(copy.operation, found.ir, found.sdy)
            reshard_before_elementwise(copy.operation, found.ir, found.sdy)
            _pipeline(found, _COLLECTIVES).run(copy.operation)
        except found.ir.MLIRError as error:
            raise Refused(
                Failed(stage=STAGE, reason=f"Shardy could not partition it: {in_one_line(error)}")
            ) from error
        return copy.operation


def plain(program: Any) -> Any:
    """A copy of a program in StableHLO alone, with calls inlined: jax shares functions between
    calls whose shapes happen to be equal at some sizes.

    Raises:
      Refused: this jaxlib lacks a pass, or a pass fails.
    """
    found = bindings()
    with program.context, found.ir.Location.unknown():
        copy = program.operation.clone()
        try:
            _flatten(found, copy.operation)
        except found.ir.MLIRError as error:
            raise Refused(
                Failed(stage=STAGE, reason=f"Shardy could not prepare it: {in_one_line(error)}")
            ) from error
        return copy


def lowered_text(program: Any) -> str:
    """The program as text without locations and without its meshes' sizes.

    Two lowerings of a step with equal texts differ in the sizes of mesh axes alone.
    """
    found = bindings()
    with program.context, found.ir.Location.unknown():
        copy = program.operation.clone()
        _forget_sizes(found, copy)
        return copy.get_asm(enable_debug_info=False)


def _missing(what: str) -> Refused:
    return Refused(
        Failed(
            stage=STAGE,
            reason=f"jaxlib {jaxlib.__version__} cannot propagate shardings: {what}",
            hint="meshes are then compiled instead of estimated; jaxlib 0.10.2 can do both",
        )
    )


def _flatten(found: Bindings, module: Any) -> None:
    _pipeline(found, _PLAIN).run(module)
    inline_calls(module, found.ir)


def _pipeline(found: Bindings, passes: Sequence[str]) -> Any:
    try:
        return found.pass_manager.parse(f"builtin.module({','.join(passes)})")
    except (ValueError, found.ir.MLIRError) as error:
        raise _missing(in_one_line(error)) from error


def _parse(found: Bindings, text: str) -> Any:
    # jax alone knows how to make a context that has every dialect of its programs.
    module: Any = jax.jit(lambda x: x).lower(0.0).compiler_ir("stablehlo")
    with module.context, found.ir.Location.unknown():
        return found.ir.Module.parse(text)


def _meshes(copy: Any) -> list[Any]:
    body = copy.operation.regions[0].blocks[0]
    return [one.operation for one in body.operations if one.operation.name == "sdy.mesh"]


def _resize(found: Bindings, copy: Any, sizes: Mapping[str, int]) -> None:
    for operation in _meshes(copy):
        mesh = found.sdy.MeshAttr(operation.attributes["mesh"])
        axes = [found.sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        operation.attributes["mesh"] = found.sdy.MeshAttr.get(
            [
                found.sdy.MeshAxisAttr.get(axis.name, sizes.get(axis.name, axis.size))
                for axis in axes
            ]
        )


def _forget_sizes(found: Bindings, copy: Any) -> None:
    for operation in _meshes(copy):
        mesh = found.sdy.MeshAttr(operation.attributes["mesh"])
        names = [found.sdy.MeshAxisAttr(axis).name for axis in mesh.axes]
        operation.attributes["mesh"] = found.sdy.MeshAttr.get(
            [found.sdy.MeshAxisAttr.get(name, 1) for name in names]
        )
        # Says the same once more.
        if "stablehlo.mesh" in operation.attributes:
            del operation.attributes["stablehlo.mesh"]
    for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
        if name in copy.operation.attributes:
            del copy.operation.attributes[name]
