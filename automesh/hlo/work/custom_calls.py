"""Custom calls: what is known of kernels that the compiler does not look into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automesh.hlo.nouns import Computation, Instruction
from automesh.hlo.work.traffic import FREE_TARGETS

# Custom calls that multiply no matrices and move only their operands and results, if anything.
_PLAIN_TARGETS = frozenset({"TopK", "PartialReduce", *FREE_TARGETS})
_GROUPS = ("custom_call_config", "custom_call_backend_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the author of a kernel states about it (`pl.CostEstimate`)."""

    flops: int
    bytes_accessed: int


def stated_cost(call: Instruction) -> Stated | None:
    """The cost estimate that a custom call carries, if any; a negative one states nothing."""
    config = call.config
    for group in _GROUPS:
        estimate: Mapping[str, Any] = (config.get(group) or {}).get("cost_estimate") or {}
        flops, accessed = (int(estimate.get(name, 0)) for name in ("flops", "bytes_accessed"))
        if estimate and min(flops, accessed) >= 0:
            return Stated(flops=flops, bytes_accessed=accessed)
    return None


def is_plain(call: Instruction) -> bool:
    """True for custom calls that do nothing beyond moving what they take and return."""
    return call.target in _PLAIN_TARGETS


def remark_on(call: Instruction, stated: Stated | None) -> str:
    """What is not counted of a custom call, in words."""
    what = f"custom call `{call.target}`"
    return f"{what} counted as its author estimates it" if stated else what


def widest_dtype(computation: Computation, call: Instruction) -> str:
    """Element type of the largest array that a kernel takes; empty if it takes none."""
    arrays = [o.shape for o in computation.operands(call) if o.shape.element_bits]
    return max(arrays, key=lambda shape: shape.bytes).element_type if arrays else ""
