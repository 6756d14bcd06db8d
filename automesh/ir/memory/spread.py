"""How far the memory of an estimate may be off, by what stands in the program (no jax).

The ends are set by hand, after earlier comparisons of estimates with compiled programs
(docs/accuracy.md); how many programs lie between them has not been measured. What the estimate has
no model of has no upper end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from automesh.ir.graph import Block, Graph, Operation
from automesh.ir.passes.windowed import WINDOWED

Spread = tuple[float, float]
"""Least and most, as parts of the estimate; a most of 0: nobody knows."""

_USUAL: Mapping[str, Spread] = {
    "cpu": (1 / 1.5, 1.3),
    "gpu": (1 / 1.5, 1.3),
    "tpu": (1 / 1.5, 1.75),
    "none": (1 / 1.5, 1.5),
}
# Their operands are counted whole where compilers keep parts: 2.9 times too much at worst.
_TOO_MUCH = frozenset(("ragged_dot", "sort"))
_LEAST_OF_THESE = 1 / 3
# Rings keep one part of what is gathered.
_LEAST_OF_RINGS = 1 / 2
# What their libraries take beside operands and results is not known: an FFT 2 to 15 times as much.
_UNKNOWN = frozenset(("fft", "cholesky", "triangular_solve"))
# A TPU pads the minor dimensions of an array to whole tiles: images of few channels grow.
_FEW_CHANNELS = 8


def spread_of(graph: Graph, platform: str, *, has_unknown: bool = False) -> Spread:
    """What the compiler needs at least and at most, as parts of an estimate.

    Args:
      has_unknown: True if the program has a custom call that states no cost.
    """
    least, most = _USUAL[platform]
    if has_unknown:
        most = 0.0
    for operation in _within(graph.top):
        if operation.name in _TOO_MUCH:
            least = min(least, _LEAST_OF_THESE)
        elif operation.attributes.get(WINDOWED):
            least = min(least, _LEAST_OF_RINGS)
        if _is_unknown(operation, platform):
            most = 0.0
    return least, most


def _is_unknown(operation: Operation, platform: str) -> bool:
    if operation.name == "convolution" and platform == "tpu":
        image, found = operation.operands[0], operation.attributes
        return image.shape[found["lhs_feature"]] < _FEW_CHANNELS
    return operation.name in _UNKNOWN


def _within(block: Block) -> Iterator[Operation]:
    for operation in block.operations:
        yield operation
        for body in operation.bodies:
            yield from _within(body)
