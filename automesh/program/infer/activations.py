"""Finds constraints for places where data meet parameters that are stored in parts (no jax).

fsdp splits the batch and, between uses, the parameters. Both meet in a product, where one axis
cannot split two dimensions. The program does not say which dimension keeps the axis, and the
compiler often splits activations like parameters, which costs an all-reduce at every product. So
results of products with parameters are split over the batch, in both passes; the compiler decides
about other axes. A lookup table is gathered first, and its gradient is reduced as a whole: if the
table were split along the width of its rows, XLA would have to gather the results of lookups to
split them over the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from automesh.program.infer.dimensions import Dimensions, Dims
from automesh.program.infer.facts import Facts, outer
from automesh.program.infer.nouns import Inner
from automesh.program.infer.operation import Events, Meeting


def activations_of(
    every: Dimensions, events: Events, facts: Facts, names: Mapping[int, str]
) -> tuple[Inner, ...]:
    """Returns the constraints of a step, in the order of its program; none without a batch."""
    if not facts.batches:
        return ()
    found: list[Inner] = []
    for one in events.meetings:
        dims = _of_table(every, facts, names, one.dims) if one.is_table else ()
        dims = dims if one.is_table else _of_batch(every, facts, names, one.dims)
        if any(dims):
            found.append(_inner(one, dims))
    return tuple(found)


def _inner(one: Meeting, dims: tuple[str, ...]) -> Inner:
    return Inner(
        path=one.place.path,
        bodies=one.place.bodies,
        output=one.output,
        shape=one.shape,
        dims=dims,
        why="a table is looked up in" if one.is_table else "a product with parameters",
        leaves_others=not one.is_table,
        is_gathered=one.is_table,
    )


def _of_batch(
    every: Dimensions, facts: Facts, names: Mapping[int, str], dims: Dims
) -> tuple[str, ...]:
    own = [outer(every, dim) for dim in dims]
    return tuple(
        names.get(root, "") if root is not None and root in facts.batches else "" for root in own
    )


def _of_table(
    every: Dimensions, facts: Facts, names: Mapping[int, str], dims: Dims
) -> tuple[str, ...]:
    """Returns the classes of a table; empty unless all its dimensions are of parameters."""
    own = [outer(every, dim) for dim in dims]
    if any(root is not None and root not in facts.weights for root in own):
        return ()
    return tuple(names.get(root, "") if root is not None else "" for root in own)
