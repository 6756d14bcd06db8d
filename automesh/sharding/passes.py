"""Runs Shardy's passes: partitions a lowered module with explicit collectives (jax).

The passes and MLIR's Python bindings may change in any version: only this module uses them, and it
reports what is missing in one sentence. `sdy-convert-global-to-local` is not used on purpose, as it
ends the process on some inputs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jaxlib

from automesh.outcomes import Failed
from automesh.program.refused import StepRefused
from automesh.sharding.attribute_names import DECLARED
from automesh.sharding.hlo_form import bring_to_hlo_form, fold_transposes
from automesh.sharding.partitioner.insert import (
    Named,
    gather_as_partitioner,
    has_several_ways,
    reshard_as_partitioner,
)
from automesh.sharding.partitioner.one_device import gather_for_one_device, hand_on_to_all
from automesh.sharding.partitioner.own_rules import mark_transforms
from automesh.sharding.partitioner.top_k import call_as_top_k, has_top_k, top_k_as_call
from automesh.sharding.scans import scans_as_windows
from automesh.texts.exceptions import in_one_line

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
# Platforms whose compilers make sorts of the largest elements of rows before they propagate.
_SORTING = frozenset(("gpu", "tpu"))
_PLAIN = ("func.func(chlo-legalize-to-stablehlo)", "symbol-dce", "sdy-flatten-call-graph")
_RESHARDS = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "canonicalize{enable-patterns=sdy-collective}",
)
_COLLECTIVES = (
    "func.func(sdy-drop-sharding-rules)",
    "func.func(sdy-reshard-to-collectives)",
    "canonicalize{enable-patterns=sdy-collective}",
)
_CALLS = ("func.call", "call")
# HloInstruction::IsElementwise, in the names of StableHLO.
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
        "cosine", "count_leading_zeros", "divide", "exponential", "exponential_minus_one", "floor",
        "imag", "is_finite", "log", "log_plus_one", "logistic", "maximum", "minimum", "multiply",
        "negate", "not", "or", "popcnt", "power", "real", "reduce_precision", "remainder",
        "round_nearest_afz", "round_nearest_even", "rsqrt", "select", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan",
        "tanh", "xor",
    )
)  # fmt: skip
_SHARDING = "sdy.sharding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """MLIR's Python classes, the dialects, and the pass manager."""

    ir: Any
    sdy: Any
    stablehlo: Any
    pass_manager: Any


@functools.cache
def bindings() -> Bindings:
    """Returns the bindings of the installed jaxlib.

    Raises:
      StepRefused: something is missing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModule:
    """A program prepared for partitioning at any sizes of its mesh.

    Attributes:
      module: in StableHLO alone, with calls inlined, in the form in which XLA propagates shardings.
      sources: cache of lines of the user's code, by attribute of a location; see `SourceReader`.
    """

    module: Any
    sources: dict[Any, str] = field(default_factory=dict[Any, str])


def prepared(program: Any, *, is_plain: bool = False, platform: str = "") -> PreparedModule:
    """Prepares a copy of a lowered program for partitioning at several sizes.

    Args:
      program: the module that `lowered.compiler_ir("stablehlo")` returns, or its text.
      is_plain: `plain` has made it.
      platform: whose compiler propagates it.

    Raises:
      StepRefused: this jaxlib lacks a pass, or a pass fails.
    """
    found = bindings()
    module = _parse(found, program) if isinstance(program, str) else program
    with module.context, found.ir.Location.unknown(), _reporting_failures(found):
        copy = module.operation.clone()
        hand_on_to_all(copy.operation, found.ir, found.sdy)
        if not is_plain:
            _flatten(found, copy.operation)
        if platform in _SORTING and has_top_k(copy.operation, found.ir):
            call_as_top_k(copy.operation, found.ir)
            _run(found, _PLAIN[:1], copy.operation)
        if platform == "tpu":
            fold_transposes(copy.operation, found.ir)
            mark_transforms(copy.operation, found.ir)
        bring_to_hlo_form(copy.operation, found.ir, merges_equal=platform == "tpu")
        return PreparedModule(module=copy)


def partitioned(
    program: Any,
    *,
    sizes: Mapping[str, int] | None = None,
    change: Callable[[Any], None] | None = None,
) -> Any:
    """Partitions a copy of a lowered program: shardings everywhere, collectives explicit.

    Args:
      program: as for `prepared`, or its result.
      sizes: axis sizes for partitioning; axes that are not in it keep the sizes of the lowering.
      change: changes the copy first.

    Returns:
      The builtin.module operation; locations are kept.

    Raises:
      StepRefused: this jaxlib lacks a pass, or a pass fails.
    """
    found = bindings()
    module = (program if isinstance(program, PreparedModule) else prepared(program)).module
    with module.context, found.ir.Location.unknown(), _reporting_failures(found):
        copy = module.operation.clone()
        if change is not None:
            change(copy)
        if sizes is not None:
            _resize(found, copy, sizes)
        _run(found, _PROPAGATION, copy.operation, keeps_rules=True)
        operations = [(one.name, one) for one in _operations_in(copy.operation)]
        note_declared_shardings(operations, found.ir, found.sdy)
        gather_for_one_device(operations, found.ir, found.sdy)
        reshard_before_elementwise(operations, found.ir, found.sdy)
        reshard_as_partitioner(copy.operation, found.ir, found.sdy, operations)
        _run(found, _RESHARDS, copy.operation, keeps_rules=True)
        if has_several_ways(copy.operation, found.sdy):
            explicit = [(one.name, one) for one in _operations_in(copy.operation)]
            gather_as_partitioner(copy.operation, found.ir, found.sdy, explicit)
        _run(found, _COLLECTIVES, copy.operation)
        return copy.operation


@contextmanager
def _reporting_failures(found: Bindings) -> Generator[None]:
    try:
        yield
    except found.ir.MLIRError as error:
        raise StepRefused(
            Failed(stage=STAGE, reason=f"Shardy could not partition it: {_diagnostic(error)}")
        ) from error


def _diagnostic(error: Any) -> str:
    """Returns MLIR's diagnostic, since the text of the error itself only begins with a heading."""
    messages = [str(one.message).partition("\n")[0] for one in error.error_diagnostics]
    return "; ".join(dict.fromkeys(filter(None, messages))) or in_one_line(error)


def plain(program: Any) -> Any:
    """Copies a program into StableHLO alone, with calls inlined.

    jax shares functions between calls whose shapes happen to be equal at some sizes.

    Raises:
      StepRefused: this jaxlib lacks a pass, or a pass fails.
    """
    found = bindings()
    with program.context, found.ir.Location.unknown():
        copy = program.operation.clone()
        try:
            _flatten(found, copy.operation)
        except found.ir.MLIRError as error:
            raise StepRefused(
                Failed(stage=STAGE, reason=f"Shardy could not prepare it: {_diagnostic(error)}")
            ) from error
        return copy


def lowered_text(program: Any) -> str:
    """Returns the program as text, without locations and sizes of its meshes.

    Two lowerings of a step with equal texts differ in the sizes of mesh axes alone.
    """
    found = bindings()
    with program.context, found.ir.Location.unknown():
        copy = program.operation.clone()
        _forget_sizes(found, copy)
        return copy.get_asm(enable_debug_info=False)


def _missing(what: str) -> StepRefused:
    return StepRefused(
        Failed(
            stage=STAGE,
            reason=f"jaxlib {jaxlib.__version__} cannot propagate shardings: {what}",
            hint="meshes are then compiled instead of estimated; jaxlib 0.10.2 can do both",
        )
    )


def _flatten(found: Bindings, module: Any) -> None:
    scans_as_windows(module, found.ir)
    top_k_as_call(module, found.ir)
    _run(found, _PLAIN, module)
    inline_calls(module, found.ir)


def _run(found: Bindings, passes: Sequence[str], module: Any, *, keeps_rules: bool = False) -> None:
    """Runs passes in turn, and verifies the program once at the end.

    A pass manager verifies after every pass, which takes twice as long as the passes themselves.

    Args:
      keeps_rules: whether operations have Shardy's sharding rules afterwards. The program is not
        verified then: the rule that Shardy itself makes for the gradient of a pooling to size 1
        (`stablehlo.select_and_scatter`) is one that its verifier refuses. XLA never verifies it.
    """
    manager = _pipeline(found, passes)
    manager.enable_verifier(False)
    manager.run(module)
    if not keeps_rules:
        module.verify()


def _pipeline(found: Bindings, passes: Sequence[str]) -> Any:
    try:
        return found.pass_manager.parse(f"builtin.module({','.join(passes)})")
    except (ValueError, found.ir.MLIRError) as error:
        raise _missing(in_one_line(error)) from error


def _parse(found: Bindings, text: str) -> Any:
    # Only jax can make a context with every dialect of its programs.
    module: Any = jax.jit(lambda x: x).lower(0.0).compiler_ir("stablehlo")
    with module.context, found.ir.Location.unknown():
        return found.ir.Module.parse(text)


def _meshes(copy: Any) -> list[Any]:
    body = copy.operation.regions[0].blocks[0]
    return [
        operation.operation
        for operation in body.operations
        if operation.operation.name == "sdy.mesh"
    ]


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
        # It repeats the same information.
        if "stablehlo.mesh" in operation.attributes:
            del operation.attributes["stablehlo.mesh"]
    for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
        if name in copy.operation.attributes:
            del copy.operation.attributes[name]


# Replaces calls by the bodies of the functions (jax's MLIR bindings).
#
# XLA's pipeline inlines all calls before Shardy runs (`call-inliner` in the pipeline
# `spmd-partitioner`). With functions, Shardy chooses one sharding for each argument, and a value
# that a small function reads in a loop may be gathered whole in front of the call. MLIR's own
# `inline` pass keeps the calls, as the dialects do not allow inlining here.


def inline_calls(module: Any, ir: Any) -> None:
    """Inlines every function that is called once and whose signature states no shardings.

    Args:
      module: the operation of a module in which each call has a function of its own; changed in
        place.
      ir: MLIR's Python classes.
    """
    functions = functions_of(module, ir)
    calls: dict[str, list[Any]] = {}
    for operation in _operations_in(module):
        if operation.name in _CALLS:
            calls.setdefault(_callee(operation, ir), []).append(operation)
    for name, places in calls.items():
        function = functions.get(name)
        if function is not None and len(places) == 1 and not _states_shardings(function):
            _move(function, places[0], ir)
            function.erase()


def functions_of(module: Any, ir: Any) -> dict[str, Any]:
    """Returns the functions of a module's operation, by name."""
    return {
        ir.StringAttr(operation.attributes["sym_name"]).value: operation.operation
        for operation in module.regions[0].blocks[0].operations
        if operation.operation.name == "func.func"
    }


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
        # jax records no file for functions that it traced once and calls from several places.
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


# Makes Shardy insert reshards where XLA's partitioner does: before elementwise operations.
#
# Shardy's explicit reshards compute an elementwise operation with the sharding that moves least:
# `convert` from f32 to bf16 in front of a gather stays split, and bf16 is gathered. XLA runs
# Shardy's propagation alone; its own partitioner then brings the operands of every elementwise
# operation to the sharding of the result (`HandleElementwise` in
# xla/service/spmd/spmd_partitioner.cc): f32 is gathered. Both functions run between propagation and
# `sdy-insert-explicit-reshards`.


def reshard_before_elementwise(operations: Sequence[Named], ir: Any, sdy: Any) -> None:
    """Inserts `sdy.reshard` on operands of elementwise operations that are split differently.

    Args:
      operations: all of a module whose shardings are propagated and closed; changed in place.
      ir: MLIR's Python classes.
      sdy: those of the Shardy dialect.
    """
    meshes = [one for name, one in operations if name == "sdy.mesh"]
    if not meshes:
        return
    mesh = ir.StringAttr(meshes[0].attributes["sym_name"]).value
    for name, operation in operations:
        if name not in _ELEMENTWISE or len(operation.results) != 1:
            continue
        rank = ir.RankedTensorType(operation.results[0].type).rank
        if rank == 0:
            continue
        wanted = _sharding_at_definition(operation.results[0], ir, sdy)
        for position, operand in enumerate(operation.operands):
            # Scalars next to arrays: the predicate of `select`, the bounds of `clamp`.
            if ir.RankedTensorType(operand.type).rank == rank and not _is_split_as(
                wanted, operand, ir, sdy
            ):
                target = wanted or _whole(mesh, rank, sdy)
                with ir.InsertionPoint(operation), operation.location:
                    operation.operands[position] = sdy.ReshardOp(operand, target).result


def note_declared_shardings(operations: Sequence[Named], ir: Any, sdy: Any) -> None:
    """Records at each matrix product how propagation splits its operands and result.

    Explicit collectives do not show why an array is gathered: XLA turns a gather into a ring around
    the product only if the product itself needs it.

    Args:
      operations: as for `reshard_before_elementwise`, and before it.
      ir: MLIR's Python classes.
      sdy: those of the Shardy dialect.
    """
    for name, operation in operations:
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            values = (*operation.operands, operation.results[0])
            noted = [ir.StringAttr.get(_axes_at_definition(value, ir, sdy)) for value in values]
            operation.attributes[DECLARED] = ir.ArrayAttr.get(noted)


def _axes_at_definition(value: Any, ir: Any, sdy: Any) -> str:
    if isinstance(value.owner, ir.Block):
        return "?"
    sharding = _sharding_at_definition(value, ir, sdy)
    if sharding is None:
        return ""
    dimensions = sdy.TensorShardingAttr(sharding).dimension_shardings
    references = [axis for each in dimensions for axis in sdy.DimensionShardingAttr(each).axes]
    return ",".join(str(sdy.AxisRefAttr(reference).name) for reference in references)


def _whole(mesh: str, rank: int, sdy: Any) -> Any:
    closed = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(mesh, [closed] * rank)


def _is_split_as(wanted: Any | None, operand: Any, ir: Any, sdy: Any) -> bool:
    # The shardings of arguments of functions, loop bodies and manual regions are stated at the
    # surrounding operation. A reshard to the existing sharding is removed later.
    if isinstance(operand.owner, ir.Block):
        return False
    present = _sharding_at_definition(operand, ir, sdy)
    if wanted is None or present is None:
        return wanted is present
    return bool(wanted == present)


def _sharding_at_definition(value: Any, ir: Any, sdy: Any) -> Any | None:
    """Returns the sharding of an operation's result; None if none is stated (whole everywhere)."""
    attributes = value.owner.attributes
    if _SHARDING in attributes:
        shardings = sdy.TensorShardingPerValueAttr(attributes[_SHARDING]).shardings
        return list(shardings)[ir.OpResult(value).result_number]
    # The sharding of a reshard is no list with one for each value.
    return attributes["sharding"] if value.owner.name == "sdy.reshard" else None
