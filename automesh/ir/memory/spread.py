"""Bounds the error of an estimate's memory, by the operations in the program (no jax).

The ends are set by hand, after earlier comparisons of estimates with compiled programs
(docs/accuracy.md); the share of programs between them has not been measured. Operations that the
estimate does not model have no upper end.
"""

from __future__ import annotations

from collections.abc import Mapping

from automesh.ir.graph import Graph, Operation, operations_in
from automesh.ir.passes.windowed import WINDOWED

Spread = tuple[float, float]
"""Least and most memory, as factors of the estimate; a most of 0: unknown."""

_USUAL: Mapping[str, Spread] = {
    "cpu": (1 / 1.5, 1.3),
    "gpu": (1 / 1.5, 1.3),
    "tpu": (1 / 1.5, 1.75),
    "none": (1 / 1.5, 1.5),
}
# Their operands are counted whole, but compilers keep parts: 2.9 times too much at worst.
_TOO_MUCH = frozenset(("ragged_dot", "sort"))
_LEAST_OF_THESE = 1 / 3
# Rings only keep one part of the gathered array.
_LEAST_OF_RINGS = 1 / 2
# The scratch memory of their libraries is unknown: for an FFT 2 to 15 times the operands.
_UNKNOWN = frozenset(("fft", "cholesky", "triangular_solve"))
# A TPU pads the minor dimensions of an array to whole tiles: images of few channels grow.
_FEW_CHANNELS = 8


def spread_of(graph: Graph, platform: str, *, has_unknown: bool = False) -> Spread:
    """Returns the least and the most that the compiler may need, as factors of an estimate.

    Args:
      has_unknown: True if the program has a custom call that states no cost.
    """
    least, most = _USUAL[platform]
    if has_unknown:
        most = 0.0
    for operation in operations_in(graph.top):
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
