"""Replaces shardings that put a whole array on one device, as for results of callbacks (jax).

jax assigns the results of `jax.pure_callback` to the device that calls Python, by a mesh without
axes that names this device. Shardy's passes end the process on such a mesh. XLA gathers the
operands, and sends the results to all devices, which then have them whole: this module states that
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from automesh.program.lower.host_callbacks import TARGET
from automesh.sharding.attribute_names import GATHERS

_SHARDING = "sdy.sharding"
_MESH = "sdy.mesh"
_CALLED = "call_target_name"
_PER_VALUE = "#sdy.sharding_per_value"


def hand_on_to_all(module: Any, ir: Any, sdy: Any) -> None:
    """States for each result on one device that all devices have the whole array.

    Args:
      module: the operation of a module; changed in place.
      ir, sdy: MLIR's Python classes, and those of Shardy.
    """
    meshes = {
        ir.StringAttr(view.operation.attributes["sym_name"]).value: view.operation
        for view in module.regions[0].blocks[0].operations
        if view.operation.name == _MESH
    }
    maximal = {name for name, mesh in meshes.items() if _is_maximal(mesh, sdy)}
    mesh = next((name for name in meshes if name not in maximal), "")
    for operation in _inside(module):
        if _is_stand_in(operation, ir):
            _state_whole(operation, mesh, ir, sdy)
        elif maximal and _SHARDING in operation.attributes:
            _restate(operation, maximal, mesh, ir, sdy)
    for name in maximal:
        meshes[name].erase()


def _is_maximal(mesh: Any, sdy: Any) -> bool:
    attribute = sdy.MeshAttr(mesh.attributes["mesh"])
    return not list(attribute.axes) and bool(list(attribute.device_ids))


def _restate(operation: Any, maximal: set[str], mesh: str, ir: Any, sdy: Any) -> None:
    attribute = operation.attributes[_SHARDING]
    if not str(attribute).startswith(_PER_VALUE):
        return
    stated = [
        sdy.TensorShardingAttr(one) for one in sdy.TensorShardingPerValueAttr(attribute).shardings
    ]
    if not any(_mesh_of(one, ir) in maximal for one in stated):
        return
    del operation.attributes[_SHARDING]
    _state_whole(operation, mesh, ir, sdy)


def _state_whole(operation: Any, mesh: str, ir: Any, sdy: Any) -> None:
    operation.attributes[GATHERS] = ir.StringAttr.get(mesh)
    if mesh and operation.results:
        operation.attributes[_SHARDING] = sdy.TensorShardingPerValueAttr.get(
            [_whole(mesh, result.type, ir, sdy) for result in operation.results]
        )


def _is_stand_in(operation: Any, ir: Any) -> bool:
    """Whether it is the stand-in for a host call, with absent devices."""
    attributes = operation.attributes
    return _CALLED in attributes and ir.StringAttr(attributes[_CALLED]).value == TARGET


def _mesh_of(sharding: Any, ir: Any) -> str:
    return str(ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value)


def gather_for_one_device(operations: Sequence[tuple[str, Any]], ir: Any, sdy: Any) -> None:
    """Gathers the operands of operations on one device, after propagation has split them.

    Args:
      operations: all operations of the module with their names.
    """
    for _, operation in operations:
        if GATHERS not in operation.attributes:
            continue
        mesh = ir.StringAttr(operation.attributes[GATHERS]).value
        with ir.InsertionPoint(operation), operation.location:
            for place, operand in enumerate(operation.operands):
                if mesh and _rank(operand.type, ir):
                    whole = _whole(mesh, operand.type, ir, sdy)
                    operation.operands[place] = sdy.ReshardOp(operand, whole).result


def _whole(mesh: str, kind: Any, ir: Any, sdy: Any) -> Any:
    closed = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(mesh, [closed] * _rank(kind, ir))


def _rank(kind: Any, ir: Any) -> int:
    """Counts the dimensions of a type; 0 for a token, which only orders effects."""
    return int(ir.RankedTensorType(kind).rank) if str(kind).startswith("tensor<") else 0


def _inside(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _inside(view.operation)
