"""The state that a step gives back, and the program of the second step (jax).

jax compiles a step once for every way in which its arguments are split. Where the state comes back
split otherwise than it went in, the second call compiles another program, which all later ones run;
the first one cannot reuse the memory of what it was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from automesh.cost.terms import Finding
from automesh.ir.graph import Graph, total_bytes
from automesh.program.lower.carry_state import CarriedLeaves
from automesh.sharding.attribute_names import CARRY
from automesh.sharding.passes import bindings, functions_of

SECOND_COMPILE = "second-compile"
STATE_CHANGES_TYPE = "state-changes-type"
LOST_DONATION = "lost-donation"
_SHARDING = "sdy.sharding"


def note_carry(module: Any, carried: CarriedLeaves | None) -> None:
    """Notes at a lowered module what its state is."""
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
        }
        main.attributes[CARRY] = found.ir.StringAttr.get(json.dumps(noted))


def read_carry(module: Any) -> CarriedLeaves | None:
    """What `note_carry` has noted, if it has."""
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
    )


def resplit(graph: Graph, carried: CarriedLeaves) -> tuple[tuple[int, int], ...]:
    """The pairs of `carried` whose result is split otherwise than the argument."""
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
    """How the arguments of the next step are split, as attributes of MLIR.

    Args:
      module: as it was partitioned.
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
    """Splits arguments of a module as stated; changes it in place."""
    found = bindings()
    with module.context:
        main = functions_of(module.operation, found.ir)["main"]
        given = _entries(found.ir, main, "arg_attrs")
        for argument, sharding in shardings.items():
            given[argument][_SHARDING] = sharding
        main.attributes["arg_attrs"] = found.ir.ArrayAttr.get(
            [found.ir.DictAttr.get(one) for one in given]
        )


def findings_of_state(
    graph: Graph, carried: CarriedLeaves, moved: tuple[tuple[int, int], ...]
) -> list[Finding]:
    """What is found about the state of a step.

    Args:
      graph: of the first step, before the rewrites of a platform.
      moved: pairs that come back split otherwise.
    """
    found: list[Finding] = []
    arguments = graph.top.arguments
    donated = set(graph.donated)
    if moved:
        places = [argument for argument, _ in moved]
        found.append(
            Finding(
                rule=SECOND_COMPILE,
                array=_several([carried.names[place] for place in places]),
                bytes=total_bytes(arguments[place] for place in places if place in donated),
                axes=_axes_of(graph, moved),
            )
        )
    for rule, places in (
        (STATE_CHANGES_TYPE, [argument for argument, _ in carried.changed]),
        (LOST_DONATION, list(carried.lost)),
    ):
        if places:
            found.append(
                Finding(
                    rule=rule,
                    array=_several([carried.names[place] for place in places]),
                    bytes=total_bytes(arguments[place] for place in places),
                )
            )
    return found


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _axes_of(graph: Graph, moved: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """Mesh axes that split the arrays before or after, and not both times in the same way."""
    named: set[str] = set()
    for argument, result in moved:
        before, after = graph.top.arguments[argument].axes, graph.top.returned[result].axes
        for one, other in zip(before, after, strict=True):
            named |= set(one) ^ set(other)
    return tuple(axis for axis, _ in graph.mesh if axis in named)
