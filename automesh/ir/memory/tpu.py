"""How libtpu uses buffers, as its memory reports show."""

from __future__ import annotations

import math

from automesh.ir.graph import Block, Operation, Value
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.order import BufferModel, Step
from automesh.ir.op_kinds import PRODUCTS, SLICES, VIRTUAL

# Six gradients of 16 MiB had one all-reduce, six of 64 MiB one each (libtpu 0.0.52 for v5e:2x4).
_MOST_COMBINED_BYTES = 120.0 * 2**20


class TpuBufferModel(BufferModel):
    """The buffers of a TPU's compiler: a product adds to what is there already.

    The sum of eight products is one array that each of them adds to, not eight arrays. All-reduces
    over the same axes become one while they are small, and operands and results of an all-reduce
    live together.
    """

    reduces_in_place = False

    def _added(self, block: Block) -> list[Step]:
        place = {operation: number for number, operation in enumerate(block.operations)}
        for operation in block.operations:
            if operation.name == "add":
                self._absorb(operation, place)
        return with_combined_reductions(
            super()._added(block), most_bytes=_MOST_COMBINED_BYTES, sizes=self._sizes
        )

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
