"""Rules for the collectives inside of a `shard_map` on a mesh of one device (no jax).

There an array has the same shape inside and outside, so that dimensions go through. On several
devices each has a part of its own, of which the program does not say what it is of: such a
`shard_map` is an unknown operation.
"""

from __future__ import annotations

from automesh.program.infer.dimensions import Dims
from automesh.program.infer.operation import Rule, TracedOperation


def _all_gather(op: TracedOperation) -> list[Dims]:
    place = op.params["all_gather_dimension"]
    if op.params["tiled"]:
        return list(op.ins)
    return [(*dims[:place], (), *dims[place:]) for dims in op.ins]


def _reduce_scatter(op: TracedOperation) -> list[Dims]:
    place = op.params["scatter_dimension"]
    if op.params["tiled"]:
        return list(op.ins)
    return [(*dims[:place], *dims[place + 1 :]) for dims in op.ins]


def _all_to_all(op: TracedOperation) -> list[Dims]:
    if op.params["tiled"]:
        return list(op.ins)
    found: list[Dims] = []
    for dims in op.ins:
        kept = [dim for place, dim in enumerate(dims) if place != op.params["split_axis"]]
        kept.insert(op.params["concat_axis"], ())
        found.append(tuple(kept))
    return found


def _same(op: TracedOperation) -> list[Dims]:
    return list(op.ins)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _all_gather),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), _reduce_scatter),
    **dict.fromkeys(("ppermute", "psum_invariant", "unreduced_psum"), _same),
    "all_to_all": _all_to_all,
}
