"""Finds the state that a step returns, and the program of the second step (jax).

jax compiles a step once for each sharding of its arguments. If the state comes back with another
sharding, the second call compiles another program, which all later calls run, and the first call
cannot reuse the memory of its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from automesh.ir.findings.nouns import StepState
from automesh.ir.graph import Graph
from automesh.program.lower.carry_state import CarriedLeaves
from automesh.sharding.attribute_names import CARRY
from automesh.sharding.mlir.locations import place_of
from automesh.sharding.passes import bindings, functions_of

_SHARDING = "sdy.sharding"


def note_carry(module: Any, carried: CarriedLeaves | None) -> None:
    """Records the state in a lowered module."""
    if carried is None:
        return
    found = bindings()
    with module.context:
        main = functions_of(module.operation, found.ir)["main"]
        noted = {
            "names": carried.names,
            "pairs": carried.pairs,
            "changed": carried.changed,
            "lost": carried.lost,
            "on_one_device": carried.on_one_device,
            "source": carried.source,
        }
        main.attributes[CARRY] = found.ir.StringAttr.get(json.dumps(noted))


def read_carry(module: Any) -> CarriedLeaves | None:
    """Reads what `note_carry` has recorded, if it has."""
    found = bindings()
    with module.context:
        main = functions_of(module.operation, found.ir)["main"]
        if CARRY not in main.attributes:
            return None
        noted = json.loads(found.ir.StringAttr(main.attributes[CARRY]).value)
    return CarriedLeaves(
        names=tuple(noted["names"]),
        pairs=tuple((argument, result) for argument, result in noted["pairs"]),
        changed=tuple((argument, dtype) for argument, dtype in noted["changed"]),
        lost=tuple(noted["lost"]),
        on_one_device=tuple(noted["on_one_device"]),
        source=(noted["source"][0], noted["source"][1]),
    )


def resplit(graph: Graph, carried: CarriedLeaves) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of `carried` whose result has another sharding than the argument."""
    arguments, results = graph.top.arguments, graph.top.returned
    return tuple(
        (argument, result)
        for argument, result in carried.pairs
        if argument < len(arguments)
        and result < len(results)
        and arguments[argument].shape
        and arguments[argument].axes != results[result].axes
    )


def shardings_of_results(module: Any, pairs: tuple[tuple[int, int], ...]) -> Mapping[int, Any]:
    """Returns the shardings of the next step's arguments, as MLIR attributes.

    Args:
      module: after partitioning.
      pairs: (argument, result).
    """
    found = bindings()
    with module.context:
        main = functions_of(module.operation, found.ir)["main"]
        given = _entries(found.ir, main, "arg_attrs")
        results = _entries(found.ir, main, "res_attrs")
        stated = {
            argument: results[result].get(_SHARDING) if results else None
            for argument, result in pairs
        }
        meshes = [one[_SHARDING] for one in given if _SHARDING in one]
        whole = {
            argument: _whole(found, meshes[0], main.regions[0].blocks[0].arguments[argument])
            for argument, sharding in stated.items()
            if sharding is None and meshes
        }
    return {**{a: one for a, one in stated.items() if one is not None}, **whole}


def _entries(ir: Any, function: Any, name: str) -> list[dict[str, Any]]:
    if name not in function.attributes:
        return []
    entries = ir.ArrayAttr(function.attributes[name])
    return [{one.name: one.attr for one in ir.DictAttr(entry)} for entry in entries]


def _whole(found: Any, like: Any, argument: Any) -> Any:
    sdy = found.sdy
    closed = sdy.DimensionShardingAttr.get([], is_closed=True)
    rank = found.ir.RankedTensorType(argument.type).rank
    return sdy.TensorShardingAttr.get(sdy.TensorShardingAttr(like).mesh_or_ref, [closed] * rank)


def with_arguments(module: Any, shardings: Mapping[int, Any]) -> None:
    """Sets the shardings of a module's arguments in place."""
    found = bindings()
    with module.context:
        main = functions_of(module.operation, found.ir)["main"]
        given = _entries(found.ir, main, "arg_attrs")
        for argument, sharding in shardings.items():
            given[argument][_SHARDING] = sharding
        main.attributes["arg_attrs"] = found.ir.ArrayAttr.get(
            [found.ir.DictAttr.get(one) for one in given]
        )


def state_of(carried: CarriedLeaves | None, moved: tuple[tuple[int, int], ...]) -> StepState:
    """Describes a step's state for the rules.

    Args:
      carried: None: the state is unknown.
      moved: pairs that come back with another sharding.
    """
    if carried is None:
        return StepState()
    file, line = carried.source
    return StepState(
        names=carried.names,
        pairs=carried.pairs,
        moved=moved,
        changed=tuple(argument for argument, _ in carried.changed),
        lost=carried.lost,
        on_one_device=carried.on_one_device,
        source=place_of(file, line) if file else "",
    )
