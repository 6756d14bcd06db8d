"""Reads the program of a GPU kernel from a custom call; only this module uses Triton (jax).

Pallas passes its Triton kernels to XLA as MLIR bytecode, together with the sizes of their grid.
jaxlib has the dialect, but it is no stable interface: if something is missing, one sentence says
so, and the kernel is counted only by its operands and results.
"""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import Any

from automesh.program.kernels.mosaic import (
    MosaicKernel,
    UnreadableKernel,
    Window,
    cause_of,
    context_with,
    element_bits,
)
from automesh.program.kernels.nouns import KernelProduct, type_name

TRITON_TARGET = "__gpu$xla.gpu.triton"  # of custom calls that hold a kernel for GPUs
TRITON_CONFIG = "mhlo.backend_config"
TRITON_PROGRAM = "ir"  # in that dictionary: bytecode
# Functions of libdevice: CUDA's `__nv_exp2f` for 32 bits, `__nv_exp2` for 64.
_LIBRARY = re.compile(r"__nv_(?:fast_)?(\w+?)(?:(?<!er)f)?\"")
_GRID = ("grid_x", "grid_y", "grid_z")


@dataclass(frozen=True, kw_only=True)
class TritonKernel(MosaicKernel):
    """The program of one kernel; all arguments of its function are pointers.

    Its blocks are not counted: programs that run in parallel read them from a shared cache, so each
    operand is read from main memory about once.
    """

    @property
    def indices(self) -> int:
        return 0

    @property
    def windows(self) -> tuple[Window, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ()


def is_triton(call: Any, ir: Any) -> bool:
    """Whether a custom call holds a kernel as Pallas writes it."""
    return (
        ir.StringAttr(call.attributes["call_target_name"]).value == TRITON_TARGET
        and TRITON_CONFIG in call.attributes
    )


def read_triton(call: Any, ir: Any) -> TritonKernel:
    """Reads the kernel of a custom call.

    Raises:
      Unreadable: this jaxlib has no reader for it, or it is not written as expected.
    """
    try:
        config = ir.DictAttr(call.attributes[TRITON_CONFIG])
        grid = tuple(ir.IntegerAttr(config[name]).value for name in _GRID)
    except (KeyError, ValueError, AttributeError) as error:
        raise UnreadableKernel("it is not written as expected") from error
    module = _parsed(config, ir)
    with module.context:
        mains = [one.operation for one in module.body.operations if _is_public(one, ir)]
    if len(mains) != 1:
        raise UnreadableKernel(f"it has {len(mains)} public functions instead of one")
    return TritonKernel(main=mains[0], grid=grid, scalars=0, scratch=0, functions={}, module=module)


def triton_text(config: Any, ir: Any) -> str:
    """Returns the program of a kernel without the places in source files that it came from.

    Args:
      config: the dictionary that a custom call has under `TRITON_CONFIG`.

    Raises:
      Unreadable: as for `read_triton`.
    """
    module = _parsed(config, ir)
    with module.context:
        return module.operation.get_asm(enable_debug_info=False)


def _parsed(config: Any, ir: Any) -> Any:
    """Returns the module of a kernel."""
    try:
        dialect: Any = importlib.import_module("jaxlib.triton.dialect")
    except ImportError as error:
        raise UnreadableKernel(f"this jaxlib cannot read kernels for GPUs: {error}") from error
    try:
        body = ir.StringAttr(config[TRITON_PROGRAM]).value_bytes
    except (KeyError, ValueError, AttributeError) as error:
        raise UnreadableKernel("it is not written as expected") from error
    try:
        with context_with(dialect, ir), ir.Location.unknown():
            return ir.Module.parse(body)
    except Exception as error:  # MLIR's errors share no class with Python's.
        raise UnreadableKernel(f"its program cannot be read: {cause_of(error)}") from error


def _is_public(one: Any, ir: Any) -> bool:
    attributes = one.operation.attributes
    if one.operation.name != "tt.func":
        return False
    return (
        "sym_visibility" not in attributes
        or ir.StringAttr(attributes["sym_visibility"]).value == "public"
    )


def axis_of(query: Any) -> int:
    """Returns the dimension of the grid in `tt.get_program_id` or `tt.get_num_programs`."""
    return int(str(query.attributes["axis"]).split()[0])


def dot_of(dot: Any) -> tuple[int, KernelProduct]:
    """Returns the products of one `tt.dot`: their number, and one of them."""
    left, right = (dot.operands[place].type for place in (0, 1))
    *batch, m, k = left.shape
    wider = max((str(one.element_type) for one in (left, right)), key=element_bits)
    return math.prod(batch), KernelProduct(m=m, n=right.shape[-1], k=k, dtype=type_name(wider))


def function_of(call: Any) -> str:
    """Returns the function of CUDA's library that `tt.extern_elementwise` calls, as `exp2` of
    `__nv_exp2f`; empty if it is none of these."""
    found = _LIBRARY.search(str(call.attributes["symbol"]))
    return found[1] if found else ""


def touched_bytes(call: Any) -> int:
    """Returns the bytes of the operands and results of a custom call."""
    arrays = [one.type for one in (*call.operands, *call.results)]
    return sum(
        math.ceil(math.prod(one.shape) * element_bits(str(one.element_type)) / 8) for one in arrays
    )
