"""Constraints where data meets parameters that are kept in parts (no jax).

fsdp splits the batch and, between uses, the parameters. Both meet in a product, where one axis
cannot split two dimensions: nothing in the program says which of them gives way, and left to itself
the compiler often splits activations like parameters, which sums them up over the devices at every
product. So results of products with parameters are split over the batch, in both passes; what they
are split over besides is left to the compiler. A table that is looked up in is gathered first, and
its gradient is summed up as a whole: lookups in a table that is split along its rows' width give
results that XLA can bring to the batch by gathering them alone.
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
    """The constraints of a step, in the order of its program; none where it has no batch."""
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
    """Classes of a table; empty unless it has dimensions of parameters alone."""
    own = [outer(every, dim) for dim in dims]
    if any(root is not None and root not in facts.weights for root in own):
        return ()
    return tuple(names.get(root, "") if root is not None else "" for root in own)
