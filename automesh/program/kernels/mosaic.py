"""Reads the program of a TPU kernel from a custom call; only this module uses Mosaic (jax).

Pallas passes its kernels to XLA as MLIR bytecode in a versioned dialect; a pass of jaxlib converts
it to the current dialects. Neither is a stable interface: if something is missing, one sentence
says so, and the kernel is counted only by its operands and results.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from automesh.program.kernels.nouns import KernelProduct, type_name

_CURRENT = "builtin.module(mosaic-serde{serialize=false})"
# Pallas' number for the size of a grid dimension that is known only when the kernel runs.
_DYNAMIC = -(2**63)
_INTEGERS = re.compile(r"-?\d+")
_LISTS = re.compile(r"\[([\d, ]*)\]")
_SPACE = re.compile(r"#tpu\.memory_space<(\w+)>")


class UnreadableKernel(Exception):
    """A kernel's program cannot be read or lacks information; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A block of an operand or result that the kernel holds during one step of its grid.

    Attributes:
      bytes: size of the block.
      index: the operation of the function that says which block it is; None for a whole array,
        which is moved once.
    """

    bytes: int
    index: Any | None


@dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """The program of one kernel.

    Attributes:
      main: the operation of its function: arguments are the indices into the grid, the arrays that
        are fetched before it runs, then operands, results and scratch memory.
      grid: sizes, the last of which changes fastest; empty for one step.
      scalars: number of arrays that are fetched beforehand.
      scratch: number of last arguments that are scratch memory.
      module: holds the operations, which live as long as it does.
    """

    main: Any
    grid: tuple[int, ...]
    scalars: int
    scratch: int
    functions: Mapping[str, Any]
    module: Any

    @property
    def arguments(self) -> list[Any]:
        return list(self.main.regions[0].blocks[0].arguments)

    @property
    def indices(self) -> int:
        """The number of first arguments that are indices into the grid."""
        return len(self.grid)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The blocks that are moved during the steps of the grid.

        Raises:
          Unreadable: they are not written as expected.
        """
        first = len(self.grid) + self.scalars
        if "window_params" not in self.main.attributes:
            arrays = self.arguments[first : len(self.arguments) - self.scratch]
            return tuple(
                Window(bytes=_bytes_of(one.type, one.type.shape), index=None)
                for one in arrays
                if "<vmem>" in str(one.type)
            )
        found: list[Window] = []
        for number, one in enumerate(self.main.attributes["window_params"]):
            name = re.search(r"transform_indices = @(\w+)", str(one))
            bounds = re.search(r"window_bounds = array<i64: ([\d, ]+)>", str(one))
            array = self.arguments[first + number].type
            if name is None or name[1] not in self.functions or bounds is None:
                continue  # It stays in main memory: the kernel itself moves parts of it.
            sizes = [int(size) for size in _INTEGERS.findall(bounds[1])]
            index = self.functions[name[1]]
            found.append(Window(bytes=_bytes_of(array, sizes), index=index))
        return tuple(found)


def body_of(config: str) -> str:
    """Returns the kernel in the backend's text of a custom call, base64; empty if there is none."""
    found = re.search(r'"body":\s*"([A-Za-z0-9+/=]+)"', config)
    return found[1] if found else ""


def read_kernel(body: str) -> MosaicKernel:
    """Reads the kernel that a custom call holds under `body`.

    Args:
      body: base64.

    Raises:
      Unreadable: this jaxlib has no reader for it, it is damaged, or its grid is known only when it
        runs.
    """
    module, ir = _parsed(body)
    with module.context:
        return _kernel_of(module, ir)


def kernel_text(body: str) -> str:
    """Returns the program of a kernel without the places in source files that it came from.

    Args:
      body: as for `read_kernel`.

    Raises:
      Unreadable: this jaxlib has no reader for it, or it is damaged.
    """
    module, _ = _parsed(body)
    with module.context:
        return module.operation.get_asm(enable_debug_info=False)


def _parsed(body: str) -> tuple[Any, Any]:
    """Returns the module of a kernel, and MLIR's Python classes."""
    try:
        ir: Any = importlib.import_module("jaxlib.mlir.ir")
        passes: Any = importlib.import_module("jaxlib.mlir.passmanager")
        tpu: Any = importlib.import_module("jax._src.lib").tpu
    except (ImportError, AttributeError) as error:
        raise UnreadableKernel(f"this jaxlib cannot read kernels for TPUs: {error}") from error
    try:
        context = context_with(tpu, ir)
        with context, ir.Location.unknown():
            module = ir.Module.parse(base64.b64decode(body, validate=True))
            passes.PassManager.parse(_CURRENT).run(module.operation)
    except Exception as error:  # MLIR's errors share no class with Python's.
        raise UnreadableKernel(f"its program cannot be read: {cause_of(error)}") from error
    return module, ir


def context_with(dialect: Any, ir: Any) -> Any:
    """Returns a context of MLIR that has jaxlib's dialects, and one more."""
    context = ir.Context()
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    context.load_all_available_dialects()
    return context


def cause_of(error: Exception) -> str:
    """Returns the cause in an error of MLIR, which comes after a heading and before the whole
    program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    return (told or lines or [type(error).__name__])[0]


def _kernel_of(module: Any, ir: Any) -> MosaicKernel:
    functions = {
        ir.StringAttr(one.attributes["sym_name"]).value: one.operation
        for one in module.body.operations
        if one.operation.name == "func.func"
    }
    mains = [one for one in functions.values() if "dimension_semantics" in one.attributes]
    if len(mains) != 1:
        raise UnreadableKernel(f"it has {len(mains)} functions with a grid instead of one")
    attributes = mains[0].attributes
    grid = (
        tuple(ir.DenseI64ArrayAttr(attributes["iteration_bounds"]))
        if "iteration_bounds" in attributes
        else ()
    )
    if _DYNAMIC in grid:
        raise UnreadableKernel("the size of its grid is known only when it runs")
    scalars, scratch = (
        ir.IntegerAttr(attributes[name]).value if name in attributes else 0
        for name in ("scalar_prefetch", "scratch_operands")
    )
    return MosaicKernel(
        main=mains[0],
        grid=grid,
        scalars=scalars,
        scratch=scratch,
        functions=functions,
        module=module,
    )


def _bytes_of(array: Any, sizes: Sequence[int]) -> int:
    """Returns the bytes of a block of an array."""
    return math.ceil(math.prod(sizes) * element_bits(str(array.element_type)) / 8)


def element_bits(name: str) -> int:
    """Returns the bits of an MLIR element type: 16 for bf16, 8 for f8E4M3FN, 32 for an index."""
    found = re.match(r"(?:bf|f|u?i|si)(\d+)", name)
    return int(found[1]) if found else 32


def product_of(matmul: Any) -> tuple[int, KernelProduct]:
    """Returns the products of one `tpu.matmul`: their number, and one of them.

    Raises:
      Unreadable: its dimensions are not written as expected.
    """
    left, right = (matmul.operands[place].type for place in (0, 1))
    lists = _LISTS.findall(str(matmul.attributes["dimension_numbers"]))
    if len(lists) < 4:
        raise UnreadableKernel("the dimensions of its matrix products are not written as expected")
    dimensions = [[int(one) for one in _INTEGERS.findall(part)] for part in lists]
    batch = math.prod(left.shape[one] for one in dimensions[-2])
    k = math.prod(left.shape[one] for one in dimensions[0])
    m = math.prod(left.shape) // max(batch * k, 1)
    n = math.prod(right.shape) // max(batch * k, 1)
    wider = max((str(one.element_type) for one in (left, right)), key=element_bits)
    return batch, KernelProduct(m=m, n=n, k=k, dtype=type_name(wider))


def elements_of(operation: Any) -> int:
    """Returns the number of elements of an operation's first result."""
    kind = operation.results[0].type
    return math.prod(kind.shape) if hasattr(kind, "shape") else 1


def moved_bytes(operation: Any) -> int:
    """Returns the bytes that a kernel's own copy takes from or to main memory; 0 if it stays on the
    chip."""
    arrays = [one.type for one in operation.operands if str(one.type).startswith("memref")]
    sizes = [
        math.prod(one.shape) * element_bits(str(one.element_type)) // 8
        for one in arrays
        if "semaphore" not in str(one)
    ]
    spaces = [found[1] if (found := _SPACE.search(str(one))) else "any" for one in arrays]
    touches = any(space in ("any", "hbm") for space in spaces)
    return sizes[0] if sizes and touches else 0


def operations_in(region: Any) -> Iterator[Any]:
    """Yields the operations in the first block of a region."""
    for one in region.blocks[0].operations:
        yield one.operation
