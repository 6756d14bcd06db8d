"""Names operations that compute more than a pass over their bytes, but have no price.

The price of a kernel is the time of its bytes and its matrix products. Elementwise arithmetic hides
behind the bytes on every chip of the table (docs/accuracy.md); that of the operations here may not:
a sort passes over its operand many times, a generator of random bits runs tens of operations per
element, and a window is read once for each of its elements. They are reported instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPCODES = frozenset(
    (
        "cholesky", "fft", "reduce-window", "rng", "rng-bit-generator", "select-and-scatter",
        "sort", "topk", "triangular-solve",
    )
)  # fmt: skip
# Other names of these operations: in JAX, in XLA, and as targets of custom calls.
_ALIASES = {"top-k": "topk", "TopK": "topk", "PartialReduce": "topk", "ApproxTopK": "topk",
            "mhlo.topk": "topk"}  # fmt: skip


def unpriced_arithmetic(operation: str, target: str = "") -> str:
    """Returns words for the arithmetic of an operation that has no price; empty if its bytes and
    products are all that it costs.

    Args:
      operation: name in HLO or StableHLO.
      target: of a custom call.
    """
    name = target if operation in ("custom-call", "custom_call") else operation.replace("_", "-")
    opcode = _ALIASES.get(name, name)
    return f"arithmetic of `{opcode}`" if opcode in _OPCODES else ""


def remark_on_counted(counted: Mapping[str, Any]) -> str:
    """Says what is missing of a kernel that was counted in its own program.

    Args:
      counted: the notes of `program.kernels` to the figures.
    """
    what = ", operands and results" if counted.get("is_whole") else " and blocks"
    said = f"counted by its matrix products{what}"
    if counted.get("is_most"):
        said += ", as if it skipped no block"
    if counted.get("is_least"):
        said += ", one turn of each loop whose length the data decides"
    return f"{said}, its elementwise arithmetic left out"
