"""How libtpu uses buffers, as its memory reports show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache

from automesh.cost.terms import Monomial
from automesh.ir.graph import Block, Operation, Value, element_bytes
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.order import (
    COPY,
    BufferModel,
    Order,
    Step,
    constants_last,
    read_by_products,
)
from automesh.ir.op_kinds import PRODUCTS, SLICES, VIRTUAL
from automesh.ir.passes.edits import like

_LANES, _ROWS = 128, 8
# Operations that cut or shift an array: how many elements they skip, and where they begin.
_CUTS = {"slice": ("stride", "start"), "pad": ("interior", "low")}
# Six gradients of 16 MiB had one all-reduce, six of 64 MiB one each (libtpu 0.0.52 for v5e:2x4).
_MOST_COMBINED_BYTES = 120.0 * 2**20
# Vector memory of v5e, v5p and v6e.
_ON_CHIP_BYTES = 128.0 * 2**20


@lru_cache(maxsize=1 << 14)
def tiled(sides: tuple[int, ...], dtype: str) -> float:
    """Returns what an array takes in tiles, as a multiple of its elements.

    The two minor dimensions are padded to a tile of 128 lanes and 8 rows, 32 rows for numbers of
    one byte; the compiler makes those two dimensions the minor ones that are padded least. Arrays
    of fewer rows have tiles of 1, 2 or 4 rows. Layouts of libtpu 0.0.52 for v5e; programs may have
    others inside, mostly with more padding.

    >>> tiled((16, 64, 64, 64), "f32"), tiled((256, 64), "f32"), tiled((1000, 10), "f32")
    (2.0, 1.0, 1.6384)
    """
    if not math.prod(sides):
        return 1.0
    lanes, below = _paddings(sides, dtype)
    if len(sides) == 1:
        return lanes[0]
    return min(lanes[m] * below[s] for m, s in itertools.permutations(range(len(sides)), 2))


def tiled_by_rows(sides: tuple[int, ...], dtype: str) -> float:
    """Returns the same of an array of at least two dimensions whose last one is the minor one.

    >>> tiled_by_rows((4096, 64), "f32")
    2.0
    """
    lanes, below = _paddings(sides, dtype)
    return lanes[-1] * below[-2]


def _paddings(sides: tuple[int, ...], dtype: str) -> tuple[list[float], list[float]]:
    """Returns by what each dimension grows as the minor one, and as the one above it."""
    rows = 32 if element_bytes(dtype) <= 1 else 8
    lanes = [_LANES * math.ceil(side / _LANES) / side for side in sides]
    return lanes, [_rows(side, rows) / side for side in sides]


def _adds_to_scatter(value: Value) -> bool:
    """Whether a value is made of the result of a scatter, which is in memory in any case."""
    maker = value.producer
    return maker is not None and any(
        one.producer is not None and one.producer.name == "scatter" for one in maker.operands
    )


def _moves_rows(operation: Operation) -> bool:
    """Whether a gather or a scatter of a table of two dimensions moves whole rows, several ones."""
    found, table = operation.attributes, operation.operands[0]
    if operation.name == "gather":
        rows, window = operation.results[0], found.get("offset_dims")
        is_whole = found.get("slice_sizes") == (1, table.shape[1])
    else:
        rows, window = operation.operands[-1], found.get("update_window_dims")
        is_whole = found.get("scatter_dims") == (0,) and rows.shape[-1:] == table.shape[1:]
    return is_whole and len(rows.shape) > 1 and window == (len(rows.shape) - 1,)


def _summed_with(scattered: Value) -> Value | None:
    """Returns the other summand if the result of a scatter is only added to an array."""
    if len(set(scattered.users)) != 1 or scattered.users[0].name != "add":
        return None
    others = [one for one in scattered.users[0].operands if one is not scattered]
    return others[0] if others else None


def _rows(side: int, tile: int) -> int:
    if side < tile:
        return 1 << (side - 1).bit_length()
    return tile * math.ceil(side / tile)


class TpuBufferModel(BufferModel):
    """The buffers of a TPU's compiler: a product adds to what is there already.

    The sum of eight products is one array that each of them adds to, not eight arrays. All-reduces
    over the same axes become one while they are small, and operands and results of an all-reduce
    live together. An operation runs as soon as its operands are there, so that gathers of weights
    come early. A slice or a pad that does not begin and end with whole tiles is an array of its
    own, not a part of the next kernel. Rows that are looked up or added to lie one behind another:
    a table that is narrower than a tile is copied for that, and the copy is padded.
    """

    orders: tuple[Order, ...] = ("early",)
    reduces_in_place = False
    on_chip_bytes = _ON_CHIP_BYTES

    def __init__(self, stored: Collection[Value], sizes: Mapping[str, int]) -> None:
        super().__init__(stored, sizes)
        # Arrays whose rows lie one behind another.
        self._by_rows: set[Value] = set()

    def kept_bytes(self, value: Value) -> Monomial:
        """Returns the bytes of a value's buffer, padded to tiles; the padding is that at the sizes
        of the graph."""
        plain = value.device_bytes
        if not plain.coefficient or not value.shape:
            return plain
        padded = tiled_by_rows if value in self._by_rows else tiled
        return replace(
            plain, coefficient=plain.coefficient * padded(self._sides(value), value.dtype)
        )

    def _sides(self, value: Value) -> tuple[int, ...]:
        return tuple(
            math.ceil(value.dimension(index).at(self._sizes)) for index in range(len(value.shape))
        )

    def steps(self, block: Block, order: Order) -> list[Step]:
        """Lists the steps of a block; constants are made for the first step that reads them."""
        return constants_last(super().steps(block, order))

    def _added(self, block: Block) -> list[Step]:
        self.stored.update(one for one in read_by_products(block) if _adds_to_scatter(one))
        place = {operation: number for number, operation in enumerate(block.operations)}
        for operation in block.operations:
            if operation.name == "add":
                self._absorb(operation, place)
            elif operation.name == "transpose" and operation.operands[0].producer is None:
                # The layouts of loops and products follow an argument's: it is not copied.
                self.stored.difference_update(operation.results)
            elif operation.name in _CUTS and not self._keeps_tiles(operation):
                self.stored.update(operation.results)
        return with_combined_reductions(
            self._with_tables_by_rows(super()._added(block)),
            most_bytes=_MOST_COMBINED_BYTES,
            sizes=self._sizes,
        )

    def _with_tables_by_rows(self, steps: list[Step]) -> list[Step]:
        """Adds the copies of narrow tables whose rows are looked up, or added to.

        Seen in programs of libtpu 0.0.52 (tables of 64 columns): the copy of a table serves all
        that reads the table later, its update too. Rows are added to a copy of what the sum of all
        updates is added to, such as a moment of the optimizer.
        """
        found: list[Step] = []
        copies: dict[Value, Value] = {}
        for step in steps:
            if step.name in ("gather", "scatter") and self._is_narrow(step):
                self._by_rows.update(step.results)
                source = step.operands[0]
                if step.name == "gather" and source not in copies:
                    copies[source] = self._copied(source, step.operation, found)
                elif step.name == "scatter" and (source := _summed_with(step.results[0])):
                    summed = self._copied(source, step.operation, found)
                    step = replace(step, operands=[summed, *step.operands[1:]])
            # A copy lives until the last step that reads its table; loops keep their operands.
            read = [] if step.bodies else [copies[one] for one in step.operands if one in copies]
            found.append(replace(step, operands=[*step.operands, *read]) if read else step)
        return found

    def _is_narrow(self, step: Step) -> bool:
        """Whether whole rows of a table are looked up, or added to, that are no whole tiles."""
        table = step.operands[0]
        if len(table.shape) != 2 or not _moves_rows(step.operation):
            return False
        sides = self._sides(table)
        return tiled_by_rows(sides, table.dtype) > tiled(sides, table.dtype)

    def _copied(self, source: Value, operation: Operation, steps: list[Step]) -> Value:
        copy = like(source)
        self.stored.add(copy)
        self._by_rows.add(copy)
        steps.append(Step(name=COPY, operands=[source], results=[copy], operation=operation))
        return copy

    def _keeps_tiles(self, operation: Operation) -> bool:
        """Whether a slice or a pad moves whole tiles along the two minor dimensions, and neither
        skips rows nor leaves holes between them."""
        found, value = operation.attributes, operation.operands[0]
        skips, first = (found.get(name, ()) for name in _CUTS[operation.name])
        least = 0 if operation.name == "pad" else 1
        rank = len(value.shape)
        for dimension, (skipped, start) in enumerate(zip(skips, first, strict=True)):
            tile = _LANES if dimension == rank - 1 else _ROWS if dimension == rank - 2 else 1
            if value.axes[dimension]:
                continue
            if tile > 1 and (skipped != least or start % tile):
                return False
        return True

    def _absorb(self, addition: Operation, place: dict[Operation, int]) -> None:
        """Stores a sum instead of the last product in it."""
        products = [
            product
            for operand in addition.operands
            if (product := self._product_behind(operand)) is not None and product in place
        ]
        if products:
            last = max(products, key=lambda product: place[product])
            self.stored.discard(last.results[0])
            self.stored.add(addition.results[0])

    def _product_behind(self, value: Value) -> Operation | None:
        """Returns the product that a summand is made of by elementwise operations alone."""
        maker = value.producer
        if maker is None or len(value.users) != 1:
            return None
        if maker.name in PRODUCTS:
            return maker if value in self.stored else None
        if maker.name not in VIRTUAL - SLICES or value in self.stored:
            return None
        whole = math.prod(value.shape)
        for operand in maker.operands:
            if math.prod(operand.shape) == whole and (found := self._product_behind(operand)):
                return found
        return None
