"""How libtpu uses buffers, as its memory reports show."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

from automesh.cost.terms import Monomial
from automesh.ir.graph import Block, Operation, Value, element_bytes
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.order import BufferModel, Order, Step, constants_last, read_by_products
from automesh.ir.op_kinds import PRODUCTS, SLICES, VIRTUAL

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
    rows = 32 if element_bytes(dtype) <= 1 else 8
    lanes = [_LANES * math.ceil(side / _LANES) / side for side in sides]
    if len(sides) == 1:
        return lanes[0]
    below = [_rows(side, rows) / side for side in sides]
    return min(lanes[m] * below[s] for m, s in itertools.permutations(range(len(sides)), 2))


def _adds_to_scatter(value: Value) -> bool:
    """Whether a value is made of the result of a scatter, which is in memory in any case."""
    maker = value.producer
    return maker is not None and any(
        one.producer is not None and one.producer.name == "scatter" for one in maker.operands
    )


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
    own, not a part of the next kernel.
    """

    orders: tuple[Order, ...] = ("early",)
    reduces_in_place = False
    on_chip_bytes = _ON_CHIP_BYTES

    def kept_bytes(self, value: Value) -> Monomial:
        """Returns the bytes of a value's buffer, padded to tiles; the padding is that at the sizes
        of the graph."""
        plain = value.device_bytes
        if not plain.coefficient or not value.shape:
            return plain
        sides = tuple(
            math.ceil(value.dimension(index).at(self._sizes)) for index in range(len(value.shape))
        )
        return replace(plain, coefficient=plain.coefficient * tiled(sides, value.dtype))

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
            super()._added(block), most_bytes=_MOST_COMBINED_BYTES, sizes=self._sizes
        )

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
