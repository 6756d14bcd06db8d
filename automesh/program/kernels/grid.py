"""Counts the work of a kernel by running its scalar code for all steps of its grid at once.

Which blocks a kernel skips, and which it fetches again, is decided by integers: indices into the
grid, and small arrays that are fetched before it starts (the mask of attention, for instance).
Every integer is kept as an array with one value for each step of the grid; a value that depends on
anything else is unknown. A branch on an unknown condition is counted as if it were always taken,
and the result says so.

As in Pallas' own pipeline, a block is fetched when its index differs from that of the step before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from automesh.program.kernels.mosaic import (
    MosaicKernel,
    UnreadableKernel,
    elements_of,
    moved_bytes,
    operations_in,
    product_of,
)
from automesh.program.kernels.nouns import KernelCost, KernelProduct
from automesh.program.kernels.triton import axis_of, dot_of, function_of

Integers = NDArray[np.int64]
Weights = NDArray[np.float64]
# A grid of more steps than this is not run: its arrays would take gigabytes.
MOST_STEPS = 2**22
_COMPARISONS: tuple[Callable[[Integers, Integers], Any], ...] = (
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.less, np.less_equal, np.greater, np.greater_equal,
)  # fmt: skip
_BINARY: dict[str, Callable[[Integers, Integers], Any]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.minsi": np.minimum,
    "arith.minui": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.maxui": np.maximum,
    "arith.floordivsi": lambda a, b: a // _not_zero(b),
    "arith.ceildivsi": lambda a, b: -(-a // _not_zero(b)),
    "arith.divsi": lambda a, b: _truncated(a, b),
    "arith.divui": lambda a, b: a // _not_zero(b),
    "arith.remsi": lambda a, b: a - _truncated(a, b) * b,
    "arith.remui": lambda a, b: a % _not_zero(b),
    "arith.shli": lambda a, b: a << np.clip(b, 0, 62),
    "arith.shrsi": lambda a, b: a >> np.clip(b, 0, 62),
    "arith.shrui": lambda a, b: a >> np.clip(b, 0, 62),
}
_SAME = frozenset(
    ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui")
)
_TRANSCENDENTAL = frozenset(
    f"math.{name}"
    for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "sin", "cos", "erf",
                 "powf", "pow", "rsqrt", "sqrt")
)  # fmt: skip


def _not_zero(values: Integers) -> Integers:
    return np.where(values == 0, 1, values)


def _truncated(a: Integers, b: Integers) -> Integers:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(_not_zero(b)))


def count_kernel(kernel: MosaicKernel, fetched: Sequence[Integers | None]) -> KernelCost:
    """Counts the work of one call of a kernel.

    Args:
      fetched: the arrays that are fetched before it runs, in order; None for an unknown one.

    Raises:
      Unreadable: the grid is too large to be run, or the program is not written as expected.
    """
    steps = math.prod(kernel.grid)
    if steps > MOST_STEPS:
        raise UnreadableKernel(f"its grid has {steps:,} steps, more than are run here")
    run = _GridRun(kernel=kernel, fetched=tuple(fetched), steps=steps)
    run.block(kernel.main.regions[0], np.ones(steps))
    blocks = sum(run.fetches(window.index) * window.bytes for window in kernel.windows)
    most = max(run.products, key=lambda one: one.flops * run.products[one], default=None)
    return KernelCost(
        flops=round(sum(one.flops * times for one, times in run.products.items())),
        transcendentals=round(run.transcendentals),
        bytes_accessed=round(blocks + run.copied_bytes),
        product=most,
        is_most=run.is_most,
        is_least=run.is_least,
    )


@dataclass(slots=True, kw_only=True)
class _GridRun:
    """The scalar code of one kernel, run for all steps of its grid.

    Attributes:
      products: how often each matrix product is done.
      copied_bytes: bytes of the kernel's own copies.
      values: MLIR's values that are known integers, with one number for each step.
      places: position of each step in the grid, for each dimension.
    """

    kernel: MosaicKernel
    fetched: tuple[Integers | None, ...]
    steps: int
    products: Counter[KernelProduct] = field(default_factory=Counter[KernelProduct])
    transcendentals: float = 0.0
    copied_bytes: float = 0.0
    is_most: bool = False
    is_least: bool = False
    values: dict[Any, Integers] = field(default_factory=dict[Any, Integers])
    arrays: dict[Any, Integers] = field(default_factory=dict[Any, Integers])
    places: tuple[Integers, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if grid := self.kernel.grid:
            places = np.unravel_index(np.arange(self.steps), grid)
            self.places = tuple(place.astype(np.int64) for place in places)
        self._enter(self.kernel.main)

    def _enter(self, function: Any) -> None:
        """Sets the values of a function's arguments at each step."""
        arguments = list(function.regions[0].blocks[0].arguments)
        indices = self.kernel.indices
        for argument, place in zip(arguments[:indices], self.places):
            self.values[argument] = place
        for argument, array in zip(arguments[indices:], self.fetched):
            if array is not None:
                self.arrays[argument] = array

    def fetches(self, function: Any | None) -> int:
        """Returns how often a block is moved, by the function that gives the block of each step."""
        if function is None:
            return 1
        self._enter(function)
        indices: list[Integers] = []
        for one in operations_in(function.regions[0]):
            if one.name != "func.return":
                self._scalar(one)
                continue
            known = [self.values.get(value) for value in one.operands]
            if any(index is None for index in known):
                self.is_most = True
                return self.steps
            indices = [index for index in known if index is not None]
        if not indices or self.steps == 0:
            return min(self.steps, 1)
        moves = np.zeros(self.steps - 1, bool)
        for index in indices:
            moves |= np.diff(index) != 0
        return 1 + int(moves.sum())

    def block(self, region: Any, weights: Weights) -> None:
        """Counts the operations of one region.

        Args:
          weights: how often it is run at each step of the grid.
        """
        for one in operations_in(region):
            self._operation(one, weights)

    def _operation(self, one: Any, weights: Weights) -> None:
        name = one.name
        if name == "scf.if":
            self._branch(one, weights)
        elif name == "scf.for":
            self._loop(one, weights)
        elif name == "scf.while":
            self.is_least = True
            self.block(one.regions[1], weights)
        elif name == "vector.contract":
            raise UnreadableKernel("it multiplies in a form that is not counted here")
        elif name == "tpu.matmul":
            batch, product = product_of(one)
            self.products[product] += round(batch * weights.sum())
        elif name == "tt.dot":
            batch, product = dot_of(one)
            self.products[product] += round(batch * weights.sum())
        elif name == "tt.dot_scaled":
            raise UnreadableKernel("it multiplies in a form that is not counted here")
        elif _called(one) in _TRANSCENDENTAL:
            self.transcendentals += elements_of(one) * float(weights.sum())
        elif name == "tpu.enqueue_dma":
            self.copied_bytes += moved_bytes(one) * float(weights.sum())
        elif one.regions:
            for region in one.regions:
                self.block(region, weights)
        else:
            self._scalar(one)

    def _branch(self, one: Any, weights: Weights) -> None:
        condition = self.values.get(one.operands[0])
        if condition is not None:
            taken = condition != 0
            self.block(one.regions[0], weights * taken)
            if len(one.regions) > 1 and one.regions[1].blocks:
                self.block(one.regions[1], weights * ~taken)
            return
        before = self.products.copy(), self.transcendentals, self.copied_bytes
        self.block(one.regions[0], weights)
        self.is_most |= (self.products, self.transcendentals, self.copied_bytes) != before

    def _loop(self, one: Any, weights: Weights) -> None:
        low, high, step = (self.values.get(value) for value in list(one.operands)[:3])
        if low is None or high is None or step is None:
            self.is_least = True
            self.block(one.regions[0], weights)
            return
        trips = np.maximum(-(-(high - low) // _not_zero(step)), 0)
        self.block(one.regions[0], weights * trips)

    def _scalar(self, one: Any) -> None:
        if len(one.results) != 1 or not _is_integer(one.results[0].type):
            return
        made = self._made(one)
        if made is not None:
            self.values[one.results[0]] = np.broadcast_to(np.asarray(made, np.int64), self.steps)

    def _made(self, one: Any) -> Any:
        """Returns the result of a scalar operation; None if it is not known."""
        name = one.name
        if name == "arith.constant":
            return _constant(one)
        if name == "memref.load":
            return self._loaded(one)
        if name == "tt.get_program_id":
            return self.places[axis_of(one)]
        if name == "tt.get_num_programs":
            return self.kernel.grid[axis_of(one)]
        known = [self.values.get(value) for value in one.operands]
        if any(value is None for value in known):
            return None
        values = [value for value in known if value is not None]
        if name in _SAME:
            return values[0]
        if name in _BINARY:
            return _BINARY[name](*values)
        if name == "arith.cmpi":
            return _COMPARISONS[int(str(one.attributes["predicate"]).split()[0])](*values)
        if name == "arith.select":
            return np.where(values[0] != 0, values[1], values[2])
        return None

    def _loaded(self, one: Any) -> Integers | None:
        array = self.arrays.get(one.operands[0])
        places = [self.values.get(value) for value in list(one.operands)[1:]]
        if array is None or len(places) != array.ndim:
            return None
        inside = [
            np.clip(place, 0, size - 1)
            for place, size in zip(places, array.shape)
            if place is not None
        ]
        return array[tuple(inside)] if len(inside) == array.ndim else None


def _called(one: Any) -> str:
    """Returns the function of an elementwise operation, by its name in the dialect `math`."""
    return f"math.{function_of(one)}" if one.name == "tt.extern_elementwise" else str(one.name)


def _is_integer(kind: Any) -> bool:
    return str(kind) in ("i1", "i8", "i16", "i32", "i64", "index")


def _constant(one: Any) -> int | None:
    text = str(one.attributes["value"]).partition(" :")[0]
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        return None
