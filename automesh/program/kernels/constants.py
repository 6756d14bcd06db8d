"""Finds the constant behind a value of a lowered program (jax).

Small arrays that a kernel fetches beforehand are constants of the program, which reach it through
calls, loops that carry them along, and manual regions, where each device has its own part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from automesh.program.lower.lowered import attribute_of

Array = NDArray[Any]
# Operations that return each operand unchanged as the result with the same number.
_SAME = frozenset(
    ("stablehlo.optimization_barrier", "sdy.propagation_barrier", "sdy.sharding_constraint",
     "sdy.data_flow_edge", "sdy.reshard", "stablehlo.convert")
)  # fmt: skip
_DEPTH = 64  # most values in a chain; only a damaged program has more


@dataclass(slots=True)
class Constants:
    """Finds constants in one module.

    Attributes:
      ir: MLIR's Python bindings.
      functions: functions of the module, by name.
      calls: for each function, the operations that call it.
    """

    ir: Any
    functions: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    @staticmethod
    def of(module: Any, ir: Any) -> Constants:
        found = Constants(ir=ir)

        def visit(one: Any) -> Any:
            if one.name == "func.func":
                found.functions[ir.StringAttr(one.attributes["sym_name"]).value] = one
            elif one.name == "func.call":
                found.calls.setdefault(found._callee(one), []).append(one)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        return found

    def _callee(self, call: Any) -> str:
        return str(self.ir.FlatSymbolRefAttr(call.attributes["callee"]).value)

    def parts(self, value: Any, depth: int = 0) -> list[Array]:
        """Returns the parts of a value on the devices, one array for each part, in order.

        Returns:
          One array if all devices hold the same; none if the value is no constant.
        """
        if depth > _DEPTH:
            return []
        owner = value.owner
        if isinstance(owner, self.ir.Block):
            return self._argument(value, owner, depth + 1)
        return self._result(owner.operation, value, depth + 1)

    def _result(self, owner: Any, value: Any, depth: int) -> list[Array]:
        place = list(owner.results).index(value)
        name = owner.name
        if name == "stablehlo.constant":
            return self._literal(owner)
        if name in _SAME:
            return self.parts(owner.operands[place], depth)
        if name == "stablehlo.reshape":
            shape = tuple(value.type.shape)
            return [one.reshape(shape) for one in self.parts(owner.operands[0], depth)]
        if name == "stablehlo.while" and self._is_carried(owner, place):
            return self.parts(owner.operands[place], depth)
        if name == "func.call":
            body = self.functions[self._callee(owner)].regions[0].blocks[0]
            return self.parts(body.operations[len(body.operations) - 1].operands[place], depth)
        return []

    def _argument(self, value: Any, block: Any, depth: int) -> list[Array]:
        place = self.ir.BlockArgument(value).arg_number
        holder = block.owner.operation
        if holder.name == "stablehlo.while":
            is_known = self._is_carried(holder, place)
            return self.parts(holder.operands[place], depth) if is_known else []
        if holder.name == "sdy.manual_computation":
            whole = self.parts(holder.operands[place], depth)
            return _split(whole, tuple(value.type.shape))
        if holder.name == "func.func":
            name = self.ir.StringAttr(holder.attributes["sym_name"]).value
            each = [self.parts(call.operands[place], depth) for call in self.calls.get(name, [])]
            return each[0] if each and all(_are_equal(each[0], one) for one in each) else []
        return []

    def _is_carried(self, loop: Any, place: int) -> bool:
        """Whether every turn of a loop passes this value on unchanged."""
        body = loop.regions[1].blocks[0]
        value = body.operations[len(body.operations) - 1].operands[place]
        while not isinstance(value.owner, self.ir.Block):
            owner = value.owner
            if owner.name not in _SAME or owner.name == "stablehlo.convert":
                return False
            value = owner.operands[list(owner.results).index(value)]
        return value == body.arguments[place]

    def _literal(self, constant: Any) -> list[Array]:
        try:
            elements = self.ir.DenseIntElementsAttr(attribute_of(constant, "value"))
            return [np.array(elements)]
        except (TypeError, ValueError):
            return []


def _split(whole: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
    """Returns the parts of one array on the devices, in row-major order of the parts."""
    if len(whole) != 1 or whole[0].ndim != len(shape):
        return list(whole) if all(one.shape == shape for one in whole) else []
    array = whole[0]
    if any(size % part for size, part in zip(array.shape, shape)):
        return []
    counts = [size // part if part else 1 for size, part in zip(array.shape, shape)]
    return [
        array[tuple(slice(n * part, (n + 1) * part) for n, part in zip(place, shape))]
        for place in itertools.product(*map(range, counts))
    ]


def _are_equal(left: Sequence[Array], right: Sequence[Array]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))
