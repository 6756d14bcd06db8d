"""Finds what the cores do in one instruction: products, bytes, the compiler's own estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from automesh.collectives import why_unpriced
from automesh.hlo.collectives import source_of
from automesh.hlo.nouns import Computation, Instruction
from automesh.hlo.schedule.nouns import Compute, ScheduledMatmul
from automesh.hlo.work.flops import flops_of, matmul_of
from automesh.hlo.work.fusions import Contents
from automesh.hlo.work.memories import Touched
from automesh.hlo.work.traffic import FREE_TARGETS
from automesh.hlo.work.uncounted import remark_on_counted, unpriced_arithmetic

# Custom calls: facts about kernels that the compiler cannot see into.

# Custom calls that multiply no matrices and move only their operands and results, if anything.
_PLAIN_TARGETS = frozenset({"TopK", "PartialReduce", *FREE_TARGETS})
_GROUPS = ("custom_call_config", "custom_call_backend_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The cost of a kernel as its author states it (`pl.CostEstimate`), or as it was counted.

    Attributes:
      product: for counted FLOPs, the matrix product with most of them, repeated.
      dtype: of the wider operand of counted products; empty if nothing was counted.
      remark: limits of this figure, in words.
    """

    flops: int
    bytes_accessed: int
    product: ScheduledMatmul | None = None
    dtype: str = ""
    remark: str = "counted as its author estimates it"


def stated_cost(call: Instruction) -> Stated | None:
    """Returns the cost estimate that a custom call carries, if any; a negative one is ignored."""
    config = call.config
    for group in _GROUPS:
        estimate: Mapping[str, Any] = (config.get(group) or {}).get("cost_estimate") or {}
        flops, accessed = (int(estimate.get(name, 0)) for name in ("flops", "bytes_accessed"))
        if estimate and min(flops, accessed) >= 0:
            return _with_product(
                Stated(flops=flops, bytes_accessed=accessed),
                (config.get(group) or {}).get("counted"),
            )
    return None


def _with_product(stated: Stated, counted: Mapping[str, Any] | None) -> Stated:
    """Adds the notes of `program.kernels` to the figures that it counted."""
    if counted is None:
        return stated
    product = None
    if "tile" in counted:
        m, n, k = counted["tile"]
        batch = max(round(stated.flops / (2 * m * n * k)), 1)
        product = ScheduledMatmul(dtype=counted["dtype"], batch=batch, m=m, n=n, k=k)
    return replace(
        stated,
        product=product,
        dtype=str(counted.get("dtype", "")),
        remark=remark_on_counted(counted),
    )


def is_plain(call: Instruction) -> bool:
    """Whether a custom call only moves its operands and results."""
    return call.target in _PLAIN_TARGETS


def remark_on(call: Instruction, stated: Stated | None) -> str:
    """Says in words what is not counted of a custom call."""
    what = f"custom call `{call.target}`"
    return f"{what} {stated.remark}" if stated else what


def widest_dtype(computation: Computation, call: Instruction) -> str:
    """Returns the element type of the largest array that a kernel takes; empty if it takes none."""
    arrays = [o.shape for o in computation.operands(call) if o.shape.element_bits]
    return max(arrays, key=lambda shape: shape.bytes).element_type if arrays else ""


def compute_of(
    computation: Computation,
    instruction: Instruction,
    touched: Touched,
    contents: Contents | None = None,
) -> Compute | None:
    """Returns the work of the cores for one instruction; None if there is none.

    Args:
      contents: of a fusion.
    """
    product = matmul_of(computation, instruction) if contents is None else None
    one = Compute(
        name=instruction.name,
        kind="memory",
        opcode=instruction.target or instruction.opcode,
        hbm_bytes=touched.main,
        onchip_bytes=touched.chip,
        cycles=cycles_of(instruction),
        uncounted=_uncounted(instruction, contents),
        op_name=instruction.op_name,
        source=source_of(instruction),
    )
    if contents is not None:
        one = _multiplying(one, contents.matmuls, contents.flops)
    elif product is not None:
        one = _multiplying(one, (product,), flops_of(computation, instruction))
    elif instruction.opcode == "custom-call" and not is_plain(instruction):
        return _kernel(one, computation, instruction)
    is_nothing = not (one.flops or one.hbm_bytes or one.onchip_bytes or one.cycles or one.uncounted)
    return None if is_nothing else one


def _multiplying(one: Compute, matmuls: tuple[ScheduledMatmul, ...], flops: int) -> Compute:
    if not matmuls:
        return one
    return replace(one, kind="matrix", matmuls=matmuls, flops=flops, dtype=matmuls[0].dtype)


def _uncounted(instruction: Instruction, contents: Contents | None) -> str:
    if contents is not None:
        return ", ".join(contents.uncounted)
    why = why_unpriced(instruction.opcode)
    if why:
        return f"`{instruction.opcode}`: {why}"
    return unpriced_arithmetic(instruction.opcode, instruction.target)


def _kernel(one: Compute, computation: Computation, call: Instruction) -> Compute:
    stated = stated_cost(call)
    product = stated.product if stated else None
    dtype = (stated.dtype if stated else "") or widest_dtype(computation, call)
    return replace(
        one,
        kind="kernel",
        matmuls=(product,) if product else (),
        flops=stated.flops if stated else 0,
        dtype=dtype if stated and stated.flops else "",
        hbm_bytes=(stated.bytes_accessed if stated else 0) or one.hbm_bytes,
        uncounted=remark_on(call, stated),
    )


def cycles_of(instruction: Instruction) -> int:
    """Returns the compiler's estimate in cycles of the cores; 0 if it makes none."""
    window: Mapping[str, Any] = instruction.config.get("window_config") or {}
    return int(window.get("estimated_cycles") or 0)
