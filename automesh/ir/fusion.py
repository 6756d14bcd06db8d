"""Decides which values of a program get a buffer, and what each kernel reads.

This is roughly what all of XLA's backends do: elementwise operations, broadcasts, slices and views
are computed where they are read. Such a value gets its own buffer only if something needs it in
memory (a collective, a loop, a gather, a returned value), or if computing it again for each of its
k readers moves more bytes than writing it once and reading it k times. The result of a matrix
product is written after those of the following elementwise operations that make it smallest.

    fusion = fuse(graph)
    fusion.stored           # values with a buffer; liveness needs no more than these
    fusion.reads(values)    # the buffers behind some values, and how much of each is read
    fusion.written(dot)     # where the result of a product is stored, and what else that reads
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from automesh.cost.terms import Monomial
from automesh.ir.evaluations import computed_too_often
from automesh.ir.graph import Block, Graph, Operation, Value, times
from automesh.ir.op_kinds import PRODUCTS, SLICES, VIEWS, VIRTUAL, WANT_BUFFERS
from automesh.platforms.platform import Platform

# Buffers, and the bytes that one reader reads of each.
Reads = dict[Value, Monomial]
# Constants below are part of the program's text.
_SMALL_CONSTANT_BYTES = 100_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The decisions of `fuse`.

    Attributes:
      stored: every value that gets a buffer, including arguments of the program and of loops.
      sources: for each value, the buffers that are read to compute it: itself if it is stored.
      inputs: for a stored elementwise value, the buffers that its kernel reads.
      ends: for a product, the value that is written instead of its result.
    """

    stored: set[Value] = field(default_factory=set[Value])
    sources: dict[Value, Reads] = field(default_factory=dict[Value, Reads])
    inputs: dict[Value, Reads] = field(default_factory=dict[Value, Reads])
    ends: dict[Operation, Value] = field(default_factory=dict[Operation, Value])

    def reads(self, values: Iterable[Value]) -> Reads:
        """Returns the buffers that one kernel reads to compute all `values`."""
        total: Reads = {}
        for value in values:
            _add(total, self.sources.get(value, {}))
        return total

    def written(self, product: Operation) -> tuple[Value, Reads]:
        """Returns where a product's result is stored, and what is read besides its operands."""
        end = self.ends.get(product, product.results[0])
        beside = {
            value: size
            for value, size in self.inputs.get(end, {}).items()
            if value is not product.results[0]
        }
        return end, beside if end is not product.results[0] else {}


def fuse(graph: Graph, platform: Platform | None = None) -> Fusion:
    """Decides at the sizes that the graph was made with.

    Args:
      platform: whose libraries do some operations, see `Platform.library_operations`, and whose
        compiler leaves some concatenations apart, see `Platform.least_joined`; None: no libraries,
        and every concatenation is fused.
    """
    fuser = _Fuser(graph, platform)
    fuser.block(graph.top)
    return fuser.fusion


def settled(graph: Graph, fusion: Fusion) -> set[Value]:
    """Returns the buffers that are in device memory however small they are.

    These are arguments and results of the program, and values that loops read but do not change,
    such as weights.
    """
    found = {*graph.top.arguments, *fusion.reads(graph.top.returned)}
    pending = [graph.top]
    while pending:
        for operation in pending.pop().operations:
            pending += operation.bodies
            if operation.name == "while":
                body = operation.bodies[0]
                found.update(
                    argument
                    for number, argument in enumerate(body.arguments)
                    if is_passed_on(operation, number)
                )
    return found


class _Fuser:
    def __init__(self, graph: Graph, platform: Platform | None) -> None:
        self.fusion = Fusion()
        self._libraries = frozenset[str]() if platform is None else platform.library_operations
        self._least_joined = 0 if platform is None else platform.least_joined
        self._most_evaluations = 0 if platform is None else platform.most_evaluations
        self._wants = WANT_BUFFERS.union(self._libraries)
        self._sizes = dict(graph.mesh)
        self._needed: set[Value] = set()
        self._ends: set[Value] = set()

    def block(self, block: Block) -> None:
        self._needed |= _needed_in_memory(block, self._wants, self._is_joined_apart)
        for argument in block.arguments:
            self._store(argument)
        for operation in block.operations:
            for body in operation.bodies:
                self.block(body)
            self._operation(operation)
        if self._most_evaluations and (
            often := computed_too_often(block, self.fusion.stored, self._most_evaluations)
        ):
            # What is stored changes what is read behind it, so all is decided again.
            self._needed |= often
            for operation in block.operations:
                self.fusion.stored.difference_update(operation.results)
            for operation in block.operations:
                self._operation(operation)

    def _operation(self, operation: Operation) -> None:
        if operation.bodies:
            self._with_bodies(operation)
        elif operation.name in VIRTUAL:
            self._virtual(operation)
        elif operation.name in PRODUCTS:
            self._product(operation)
        else:
            for result in operation.results:
                self._store(result)

    def _store(self, value: Value) -> None:
        self.fusion.stored.add(value)
        self.fusion.sources[value] = {value: value.bytes}

    def _with_bodies(self, operation: Operation) -> None:
        for number, result in enumerate(operation.results):
            if is_passed_on(operation, number):
                self.fusion.sources[result] = self.fusion.reads([operation.operands[number]])
            else:
                self._store(result)

    def _product(self, operation: Operation) -> None:
        result = operation.results[0]
        is_library = operation.name in self._libraries
        end = result if is_library else self._smallest_behind(result)
        if end is result:
            self._store(result)
            return
        self.fusion.ends[operation] = end
        self._ends.add(end)
        # Never in memory itself; operations that read it before `end` are part of the product's
        # kernel.
        self.fusion.sources[result] = {result: result.bytes}

    def _smallest_behind(self, result: Value) -> Value:
        best = current = result
        while current not in self._needed and len(current.users) == 1:
            user = current.users[0]
            if user.name not in VIRTUAL or user.name in SLICES or len(user.results) != 1:
                break
            current = user.results[0]
            if user.name not in VIEWS and self._local(current.bytes) < self._local(best.bytes):
                best = current
        return best

    def _virtual(self, operation: Operation) -> None:
        if operation.name in VIEWS and len(operation.results) == len(operation.operands):
            for operand, result in zip(operation.operands, operation.results, strict=True):
                self.fusion.sources[result] = self.fusion.reads([operand])
            return
        result = operation.results[0]
        inputs = self._inputs(operation)
        if self._is_stored(operation, result, inputs):
            self._store(result)
            self.fusion.inputs[result] = inputs
        else:
            self.fusion.sources[result] = inputs

    def _is_stored(self, operation: Operation, result: Value, inputs: Reads) -> bool:
        if result in self._ends:
            return True
        if result.is_constant or operation.name in ("constant", "iota"):
            return result in self._needed and self._local(result.bytes) > _SMALL_CONSTANT_BYTES
        if result in self._needed:
            return True
        readers = _readers(result)
        again = sum(self._local(size) for size in inputs.values())
        own = self._local(result.bytes)
        return readers > 1 and readers * again > again + (1 + readers) * own

    def _inputs(self, operation: Operation) -> Reads:
        result = operation.results[0]
        if operation.name not in SLICES:
            return self.fusion.reads(operation.operands)
        whole = operation.operands[0]
        part = _ratio(result.bytes, whole.bytes)
        total: Reads = {}
        for value, size in self.fusion.reads([whole]).items():
            # A small buffer that is broadcast is not cut.
            is_cut = self._local(size) * 2 > self._local(whole.bytes)
            total[value] = times(size, part) if is_cut else size
        _add(total, self.fusion.reads(operation.operands[1:]))
        return total

    def _is_joined_apart(self, operation: Operation) -> bool:
        """Says whether its platform's compiler does not fuse a concatenation."""
        if operation.name != "concatenate" or not self._least_joined:
            return False
        result = operation.results[0]
        last = len(result.shape) - 1
        return operation.attributes["dim"] == last > 0 and (
            self._local(result.dimension(last)) >= self._least_joined
        )

    def _local(self, size: Monomial) -> float:
        return size.at(self._sizes)


def is_passed_on(operation: Operation, number: int) -> bool:
    """Whether a loop carries this operand without changing it."""
    if operation.name != "while":
        return False
    body = operation.bodies[0]
    return body.returned[number] is body.arguments[number]


def _ratio(part: Monomial, whole: Monomial) -> Monomial:
    inverse = Monomial(
        coefficient=1.0 / whole.coefficient if whole.coefficient else 0.0,
        powers=tuple((axis, -power) for axis, power in whole.powers),
    )
    return times(part, inverse)


def _add(total: Reads, more: Mapping[Value, Monomial]) -> None:
    """Adds a read buffer; if one kernel reads it twice, the larger part counts."""
    for value, size in more.items():
        known = total.get(value)
        if known is None or known.coefficient < size.coefficient:
            total[value] = size


def _readers(value: Value) -> int:
    """Lists the operations that read a value, or a view of it."""
    return len(set(_reading(value)))


def _reading(value: Value) -> Iterator[Operation]:
    for user in value.users:
        if user.name in VIEWS and len(user.results) == len(user.operands):
            yield from _reading(user.results[user.operands.index(value)])
        else:
            yield user


def _needed_in_memory(
    block: Block, wants: Collection[str], is_apart: Callable[[Operation], bool]
) -> set[Value]:
    """Finds the values that `block` needs in a buffer; for a view, the viewed value."""
    needed = set(block.returned)
    for operation in block.operations:
        needed.update(_wanted(operation, wants))
        if is_apart(operation):
            needed.update(operation.operands, operation.results)
        for body in operation.bodies:
            needed.update(_captured(body))
    for operation in reversed(block.operations):
        if operation.name not in VIEWS or len(operation.results) != len(operation.operands):
            continue
        for operand, result in zip(operation.operands, operation.results, strict=True):
            if result in needed:
                needed.add(operand)
    return needed


def _wanted(operation: Operation, wants: Collection[str]) -> Sequence[Value]:
    if operation.name in wants:
        return operation.operands
    return operation.operands[:1] if operation.name == "dynamic_update_slice" else ()


def _captured(body: Block) -> Iterator[Value]:
    """Finds the outer values that a body reads without having them as arguments."""
    own = set(body.arguments)
    for operation in body.operations:
        yield from (operand for operand in operation.operands if operand not in own)
        for inner in operation.bodies:
            yield from (value for value in _captured(inner) if value not in own)
        own.update(operation.results)
    yield from (value for value in body.returned if value not in own)
