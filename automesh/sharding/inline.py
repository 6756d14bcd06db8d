"""Puts the bodies of called functions in the place of the calls (jax's MLIR bindings).

XLA's pipeline inlines all calls before Shardy runs (`call-inliner` in the pipeline
`spmd-partitioner`). If Shardy sees functions, it settles one sharding for each argument, and a
value that is read in a loop by a small function may be gathered whole in front of the call. MLIR's
own `inline` pass leaves the calls: the dialects do not allow it here.
"""

from __future__ import annotations

from typing import Any

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
