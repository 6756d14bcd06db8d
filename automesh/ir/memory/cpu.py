"""How XLA's CPU compiler uses buffers, as its buffer assignments and live ranges show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from automesh.cost.terms import Monomial
from automesh.ir.graph import Block, Operation, Value
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.order import COPY, BufferModel, Order, Step, as_step, read_by_products
from automesh.ir.op_kinds import ELEMENTWISE, VIEWS

_NARROW = frozenset(("bf16", "f16"))
# Arithmetic that is not computed again for each of its readers (InstructionFusion::IsExpensive).
_EXPENSIVE = frozenset(
    (
        "atan2", "cbrt", "cosine", "divide", "erf", "erf_inv", "exponential",
        "exponential_minus_one", "log", "log_plus_one", "logistic", "power", "remainder", "rsqrt",
        "sine", "sqrt", "tan", "tanh",
    )
)  # fmt: skip


# Arithmetic on each element. Copies of smaller arrays are made where they are read.
_ARITHMETIC = ELEMENTWISE - {
    "broadcast_in_dim", "concatenate", "constant", "dynamic_broadcast_in_dim", "iota", "pad",
    "partition_id", "replica_id", "reverse", "transpose",
}  # fmt: skip


_APART = frozenset(("and", "compare", "convert", "is_finite", "not", "or", "select", "xor"))


class CpuBufferModel(BufferModel):
    """The buffers of XLA's CPU compiler, which runs ready steps first and copies operands.

    Matrix multiplications need both operands in memory, arrays of more dimensions than a matrix
    with batch dimensions first and the contracted ones next to each other, in the type that they
    multiply (bf16 stays bf16 since jaxlib 0.12; 0.10 widens it). Convolutions take images whose
    features come last, and copies of all others. Gradients of maxima over windows become scatters.
    Results of expensive arithmetic that several operations read are stored. All-reduces over the
    same axes become one, however large (jaxlib 0.10.1 and 0.12), and never write over their
    operands, which are widened to 32 bits. An all-gather puts the parts one behind the other, and
    the call that a top-k becomes wants rows: along other dimensions than the first it has a copy.
    Of an array that was gathered for windows each device stores what its own windows see. What a
    reduction reads is stored if other operations read it, too.
    """

    orders: tuple[Order, ...] = ("early",)
    reduces_in_place = False
    overwrites_moved = False

    def kept_bytes(self, value: Value) -> Monomial:
        """Returns the bytes of a buffer: eight-bit numbers that the step computes become f16."""
        kept = super().kept_bytes(value)
        is_widened = value.dtype.startswith("f8") and value.producer is not None
        return replace(kept, coefficient=2 * kept.coefficient) if is_widened else kept

    def _added(self, block: Block) -> list[Step]:
        steps: list[Step] = []
        copies: dict[object, Value] = {}
        self.stored.update(_read_often(block))
        self.stored.update(_read_by_reductions(block))
        self.stored.update(read_by_products(block))
        self.stored.update(_cut_from_gathers(block))
        for operation in block.operations:
            step = as_step(operation)
            if operation.name == "dot_general":
                step.operands = [
                    self._prepared_operand(operation, side, value, copies, steps)
                    for side, value in zip(("lhs", "rhs"), operation.operands)
                ]
            elif operation.name == "convolution":
                step = self._canonical_convolution(step, steps)
            elif operation.name == "all_reduce":
                step = self._widened_reduction(step, steps)
            elif operation.name == "select_and_scatter":
                step = self._expanded_scatter(step, steps)
            elif operation.name == "reduce_window" and _reads_gathered_rows(operation):
                step = self._cut_for_windows(step, steps)
            elif operation.name == "reduce" and _is_masked(operation):
                step.operands = self._masked(step, steps)
            elif operation.name == "top_k" and _is_gathered_behind(operation.operands[0]):
                step.operands = [self._add_copy(operation.operands[0], operation, steps)]
            steps.append(step)
            for made, result in zip(step.results, operation.results, strict=True):
                if made is not result:
                    steps.append(_copying(made, result, operation))
        return with_combined_reductions(steps)

    def _masked(self, step: Step, steps: list[Step]) -> list[Value]:
        """Stores what a reduction reads, with neutral elements instead of the padding of parts that
        are not even."""
        operands = list(step.operands)
        for number, value in enumerate(operands[: len(step.results)]):
            if value.is_constant:
                continue
            if self._is_in_memory(value):
                operands[number] = self._add_copy(value, step.operation, steps)
            else:
                self.stored.add(value)
        return operands

    def _widened_reduction(self, step: Step, steps: list[Step]) -> Step:
        """Widens 16-bit operands and results (AllReducePromotion); readers narrow them again."""
        operands, results = list(step.operands), list(step.results)
        for number, result in enumerate(step.results):
            if result.dtype in _NARROW:
                operands[number] = self._add_copy(
                    operands[number], step.operation, steps, dtype="f32"
                )
                results[number] = self._like(result, "f32")
                self.stored.discard(result)
        return replace(step, operands=operands, results=results)

    def _canonical_convolution(self, step: Step, steps: list[Step]) -> Step:
        """Adds the copies that ConvCanonicalization makes: NHWC images, HWIO kernels.

        Gradients by kernels take features for batches, so that both operands are transposed.
        """
        found = step.operation.attributes
        orders = (
            (found["lhs_batch"], *found["lhs_spatial"], found["lhs_feature"]),
            (*found["rhs_spatial"], found["rhs_input"], found["rhs_output"]),
        )
        operands = [
            self._transposed(value, order, step.operation, steps)
            for value, order in zip(step.operands, orders)
        ]
        results = step.results
        if not _is_sorted((found["out_batch"], *found["out_spatial"], found["out_feature"])):
            results = [self._like(results[0], results[0].dtype)]
        return replace(step, operands=operands, results=results)

    def _transposed(
        self, value: Value, order: tuple[int, ...], operation: Operation, steps: list[Step]
    ) -> Value:
        source, order = self._stored_value(value, order)
        if self._is_in_memory(source) and _is_sorted(order):
            return source
        return self._add_copy(source, operation, steps)

    def _expanded_scatter(self, step: Step, steps: list[Step]) -> Step:
        """Adds what SelectAndScatterExpander makes of the gradient of a maximum over windows.

        An index of the size of the image for each of its dimensions, windows over all of these, the
        coordinates of what was chosen, and a scatter into zeros. The indices need no operand, so
        that they are made first and live until then.
        """
        operation = step.operation
        image, source = operation.operands[:2]
        rank = len(image.shape)
        indices = [self._like(image, "i32") for _ in range(rank)]
        zeros = self._like(image, image.dtype)
        chosen = [self._like(source, source.dtype), *(self._like(source, "i32") for _ in indices)]
        places = self._like(source, "i32", repeated=rank)
        made: list[tuple[list[Value], list[Value]]] = [
            *(([], [one]) for one in (*indices, zeros)),
            ([image, *indices], chosen),
            (chosen[1:], [places]),
        ]
        for operands, results in made:
            steps.append(Step(name=COPY, operands=operands, results=results, operation=operation))
        return replace(step, name="scatter", operands=[zeros, places, source])

    def _cut_for_windows(self, step: Step, steps: list[Step]) -> Step:
        """Adds the rows of a gathered array that the windows of one device see, with padding.

        They are as many as the array has, and those of one device's results.
        """
        operation = step.operation
        whole, result = operation.operands[0], operation.results[0]
        rows = [self._like(whole, whole.dtype), self._like(result, whole.dtype)]
        steps.append(Step(name=COPY, operands=[whole], results=rows, operation=operation))
        return replace(step, operands=[*rows, *step.operands[1:]])

    def _like(self, value: Value, dtype: str, repeated: int = 1) -> Value:
        """Makes a stored value that is split as another one; `repeated` along a new dimension."""
        grown = (*value.grown, ()) if value.grown else ()
        made = Value(
            shape=(*value.shape, repeated),
            dtype=dtype,
            axes=(*value.axes, ()),
            manual=value.manual,
            grown=grown,
        )
        self.stored.add(made)
        return made

    def _prepared_operand(
        self,
        dot: Operation,
        side: str,
        value: Value,
        copies: dict[object, Value],
        steps: list[Step],
    ) -> Value:
        """Returns an operand in the form that a multiplication needs: itself, or a copy."""
        source, order = self._stored_value(value, _wanted_order(dot, side, len(value.shape)))
        is_converted = source.dtype != value.dtype
        batch = len(dot.attributes[f"{side}_batch"])
        # Matrices are read as rows or as columns; larger arrays become matrices without a copy
        # only in this order (DotDecomposer).
        fits = _is_sorted(order) or (len(order) == batch + 2 and _is_sorted(order[:batch]))
        if self._is_in_memory(source) and not is_converted and fits:
            return source
        key = (source, order, value.dtype)
        if key not in copies:
            copies[key] = self._add_copy(source, dot, steps, dtype=value.dtype)
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
        self, value: Value, operation: Operation, steps: list[Step], *, dtype: str = ""
    ) -> Value:
        """Adds a step that copies a value, in its own type or in another one."""
        copy = Value(
            shape=value.shape,
            dtype=dtype or value.dtype,
            axes=value.axes,
            manual=value.manual,
            grown=value.grown,
        )
        self.stored.add(copy)
        steps.append(_copying(value, copy, operation))
        return copy


def _copying(source: Value, result: Value, operation: Operation) -> Step:
    return Step(name=COPY, operands=[source], results=[result], operation=operation)


def _is_sorted(order: tuple[int, ...]) -> bool:
    return order == tuple(sorted(order))


def _read_often(block: Block) -> Iterator[Value]:
    for operation in block.operations:
        if operation.name in _EXPENSIVE:
            (result,) = operation.results
            if not result.is_constant and len(set(result.users)) > 1:
                yield result


def _read_by_reductions(block: Block) -> Iterator[Value]:
    """Finds what the library has to read that does the reductions.

    It is YNNPACK in jaxlib 0.12 (`__ynn_fusion` in its programs). Its kernels contain the
    arithmetic in front of a reduction that nothing else reads, but for choices, comparisons and
    conversions.
    """
    for operation in block.operations:
        if operation.name != "reduce":
            continue
        waiting = list(operation.operands[: len(operation.results)])
        while waiting:
            value = waiting.pop()
            made = value.producer
            if made is None or made.name not in _ARITHMETIC or value.is_constant:
                continue
            if len(set(value.users)) > 1 or _chooses(made):
                yield value
            else:
                waiting += made.operands


def _is_masked(reduction: Operation) -> bool:
    """Whether a reduction sums over a dimension whose parts are padded."""
    value = reduction.operands[0]
    return bool(value.stated) and any(
        value.stated[d] != value.shape[d] for d in reduction.attributes["dims"]
    )


def _chooses(operation: Operation) -> bool:
    """Whether an operation is a choice, as a product with a truth value becomes one."""
    if operation.name == "multiply":
        return any(map(_was_truth, operation.operands))
    return operation.name in _APART


def _was_truth(value: Value) -> bool:
    made = value.producer
    return made is not None and made.name == "convert" and made.operands[0].dtype == "i1"


def _cut_from_gathers(block: Block) -> Iterator[Value]:
    """Finds the parts that each device keeps of gathered arrays that are not used otherwise."""
    for operation in block.operations:
        if operation.name == "all_slice":
            whole = operation.operands[0]
            maker = whole.producer
            if maker is not None and maker.name == "all_gather" and len(set(whole.users)) == 1:
                yield operation.results[0]


def _reads_gathered_rows(windows: Operation) -> bool:
    """Whether an array was gathered for windows whose results stay split."""
    maker = windows.operands[0].producer
    if maker is None or maker.name != "all_gather":
        return False
    split = zip(maker.attributes["per_dimension"], windows.results[0].axes, strict=True)
    return any(gathered and set(gathered) <= set(kept) for gathered, kept in split)


def _is_gathered_behind(value: Value) -> bool:
    """Whether a value was gathered along a dimension that is not its outermost."""
    maker = value.producer
    if maker is None or maker.name != "all_gather":
        return False
    split = maker.attributes["per_dimension"]
    return any(axes and math.prod(value.shape[:d]) > 1 for d, axes in enumerate(split))


def _wanted_order(dot: Operation, side: str, rank: int) -> tuple[int, ...]:
    """Orders an operand's dimensions as the CPU's matrix multiplication reads them."""
    batch = tuple(dot.attributes[f"{side}_batch"])
    contracting = tuple(dot.attributes[f"{side}_contracting"])
    free = tuple(d for d in range(rank) if d not in batch + contracting)
    return (*batch, *free, *contracting) if side == "lhs" else (*batch, *contracting, *free)
