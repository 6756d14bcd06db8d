"""How XLA's CPU compiler uses buffers, as its buffer assignments and live ranges show."""

from __future__ import annotations

from collections.abc import Iterator

from automesh.ir.graph import Block, Operation, Value
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.order import COPY, BufferModel, Order, Step, as_step
from automesh.ir.op_kinds import VIEWS

_NARROW = frozenset(("bf16", "f16"))
_ARITHMETIC = frozenset(("add", "divide", "exponential", "multiply", "subtract"))


class CpuBufferModel(BufferModel):
    """The buffers of XLA's CPU compiler, which runs ready steps first and copies operands.

    Matrix multiplications need both operands in memory with batch dimensions first and the
    contracted ones next to each other; 16-bit operands are taken as they are only if the result is
    wider, and are widened otherwise. A 16-bit array that a loop only reads slice by slice is
    widened as a whole in front of it. Results of arithmetic that several operations read are
    stored, as not every reader can fuse them. All-reduces over the same axes become one, however
    large (jaxlib 0.10.1 and 0.12), and never write over their operands.
    """

    orders: tuple[Order, ...] = ("early",)
    # Allocated temporaries divided by the bytes that live together at the peak: 1.05 to 1.27 in six
    # buffer assignments of the examples (jaxlib 0.10.2).
    packing = 1.1
    reduces_in_place = False

    def _added(self, block: Block) -> list[Step]:
        steps: list[Step] = []
        copies: dict[object, Value] = {}
        self.stored.update(_read_often(block))
        self.stored.update(_cut_from_gathers(block))
        for operation in block.operations:
            step = as_step(operation)
            if operation.name == "dot_general":
                step.operands = [
                    self._prepared_operand(operation, side, value, copies, steps)
                    for side, value in zip(("lhs", "rhs"), operation.operands)
                ]
            elif operation.name == "while":
                step.operands = [
                    self._add_copy(value, operation, steps) if _is_widened(operation, n) else value
                    for n, value in enumerate(operation.operands)
                ]
            steps.append(step)
        return with_combined_reductions(steps)

    def _prepared_operand(
        self,
        dot: Operation,
        side: str,
        value: Value,
        copies: dict[object, Value],
        steps: list[Step],
    ) -> Value:
        """Returns an operand in the form that a multiplication needs: itself, or a copy."""
        is_narrow = _takes_narrow(dot)
        source, order = self._stored_value(value, _wanted_order(dot, side, len(value.shape)))
        fits = source.dtype not in _NARROW or is_narrow
        if self._is_in_memory(source) and fits and order == tuple(sorted(order)):
            return source
        key = (source, order, is_narrow)
        if key not in copies:
            copies[key] = self._add_copy(source, dot, steps, keep=is_narrow)
        return copies[key]

    def _stored_value(self, value: Value, order: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
        """Returns the stored value behind changes of type or order of dimensions."""
        while value not in self.stored and value.producer is not None:
            producer = value.producer
            if producer.name == "transpose":
                order = tuple(producer.attributes["perm"][d] for d in order)
            elif producer.name != "convert":
                break
            value = producer.operands[0]
        return value, order

    def _is_in_memory(self, value: Value) -> bool:
        while value not in self.stored:
            if value.producer is None or value.producer.name not in VIEWS:
                return False
            value = value.producer.operands[value.producer.results.index(value)]
        return True

    def _add_copy(
        self, value: Value, operation: Operation, steps: list[Step], *, keep: bool = False
    ) -> Value:
        """Adds a step that copies a value, widened unless its type is to be kept."""
        copy = Value(
            shape=value.shape,
            dtype="f32" if value.dtype in _NARROW and not keep else value.dtype,
            axes=value.axes,
            manual=value.manual,
            grown=value.grown,
        )
        self.stored.add(copy)
        steps.append(Step(name=COPY, operands=[value], results=[copy], operation=operation))
        return copy


def _read_often(block: Block) -> Iterator[Value]:
    for operation in block.operations:
        if operation.name in _ARITHMETIC:
            (result,) = operation.results
            if not result.is_constant and len(set(result.users)) > 1:
                yield result


def _cut_from_gathers(block: Block) -> Iterator[Value]:
    """Finds the parts that each device keeps of gathered arrays that are not used otherwise."""
    for operation in block.operations:
        if operation.name == "all_slice":
            whole = operation.operands[0]
            maker = whole.producer
            if maker is not None and maker.name == "all_gather" and len(set(whole.users)) == 1:
                yield operation.results[0]


def _is_widened(loop: Operation, number: int) -> bool:
    body = loop.bodies[0]
    argument = body.arguments[number]
    return (
        argument.dtype in _NARROW
        and body.returned[number] is argument
        and all(user.name == "dynamic_slice" for user in argument.users)
    )


def _takes_narrow(dot: Operation) -> bool:
    narrow = [value.dtype in _NARROW for value in (*dot.operands, dot.results[0])]
    return narrow == [True, True, False]


def _wanted_order(dot: Operation, side: str, rank: int) -> tuple[int, ...]:
    """Orders an operand's dimensions as the CPU's matrix multiplication reads them."""
    batch = tuple(dot.attributes[f"{side}_batch"])
    contracting = tuple(dot.attributes[f"{side}_contracting"])
    free = tuple(d for d in range(rank) if d not in batch + contracting)
    return (*batch, *free, *contracting) if side == "lhs" else (*batch, *contracting, *free)
