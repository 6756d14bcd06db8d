"""Reads the sharding constraints of a program, with their lines (jax).

Partitioning leaves no trace of a constraint that moves nothing by itself, although later operations
get their split from it.
"""

from __future__ import annotations

from typing import Any

from automesh.ir.findings.nouns import StatedConstraint
from automesh.program.lower.lowered import walk
from automesh.sharding.mlir.locations import SourceReader
from automesh.sharding.passes import PreparedModule, bindings


def constraints_of(ready: PreparedModule) -> tuple[StatedConstraint, ...]:
    """Lists the constraints of the user's code, each line and shape once."""
    found = bindings()
    sources = SourceReader(found, ready.sources)
    listed: dict[StatedConstraint, None] = {}
    with ready.module.context:
        for operation in walk(found.ir, ready.module):
            if operation.name != "sdy.sharding_constraint":
                continue
            source = sources.of(operation)
            if source:
                split = found.sdy.TensorShardingAttr(operation.attributes["sharding"])
                listed[
                    StatedConstraint(
                        shape=tuple(found.ir.RankedTensorType(operation.results[0].type).shape),
                        axes=tuple(_axes(found.sdy, one) for one in split.dimension_shardings),
                        source=source,
                    )
                ] = None
    return tuple(listed)


def _axes(sdy: Any, dimension: Any) -> tuple[str, ...]:
    return tuple(
        str(sdy.AxisRefAttr(axis).name) for axis in sdy.DimensionShardingAttr(dimension).axes
    )
