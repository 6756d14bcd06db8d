"""Orders a block's operations, and says how a compiler uses buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from automesh.cost.terms import Monomial
from automesh.ir.fusion import is_passed_on
from automesh.ir.graph import Block, Operation, Value, used_in

Order = Literal["trace", "late", "early"]
# Name of a step that is no operation of the program.
COPY = "compiler's copy"
_OF_TWO = frozenset(("add", "subtract", "multiply", "divide", "select"))


@dataclass(eq=False, slots=True, kw_only=True)
class Step:
    """One step of the execution: an operation, or a copy that a compiler makes for it.

    Attributes:
      name: of the operation, or `COPY`.
      operation: the operation that it belongs to.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    operation: Operation

    @property
    def bodies(self) -> list[Block]:
        return self.operation.bodies if self.name == self.operation.name else []

    def passes_on(self, number: int) -> bool:
        """Whether it is a loop that carries this operand without changing it."""
        return bool(self.bodies) and is_passed_on(self.operation, number)


class BufferModel:
    """A model of how a compiler uses buffers: this one stores exactly the given values, without
    copies.

    Attributes:
      stored: values that get a buffer of their own; all others are computed where they are read.
      orders: possible execution orders; the one that needs most memory counts.
      reduces_in_place: whether the result of an all-reduce may lie where its operand lay.
      overwrites_moved: whether a result may lie where an operand lay of which it reads elements at
        other places.
      on_chip_bytes: memory on the chip; see `Terms`.

    Args:
      sizes: axis sizes at which a compiler's limits are compared.
    """

    orders: tuple[Order, ...] = ("trace", "late")
    reduces_in_place = True
    overwrites_moved = True
    on_chip_bytes = 0.0

    def __init__(self, stored: Collection[Value], sizes: Mapping[str, int]) -> None:
        self.stored = set(stored)
        self._sizes = sizes

    def kept_bytes(self, value: Value) -> Monomial:
        """Returns the bytes of a value's buffer on one device; 0 if the value is on the host."""
        return value.device_bytes

    def steps(self, block: Block, order: Order) -> list[Step]:
        """Lists the steps of a block, in execution order."""
        steps = self._added(block)
        if order == "trace":
            return steps
        return late(steps) if order == "late" else early(steps, self._is_virtual)

    def _added(self, block: Block) -> list[Step]:
        return [as_step(operation) for operation in block.operations]

    def _is_virtual(self, step: Step) -> bool:
        return not step.bodies and not any(result in self.stored for result in step.results)


def as_step(operation: Operation) -> Step:
    return Step(
        name=operation.name,
        operands=operation.operands,
        results=operation.results,
        operation=operation,
    )


def late(steps: Sequence[Step]) -> list[Step]:
    """Orders every step just before the first one that needs it, otherwise as given."""
    users = _users(steps)
    due: dict[Step, float] = {}
    for step in reversed(steps):
        due[step] = min((due[user] for user in users[step]), default=float(len(steps))) - 1e-4
    place = {step: number for number, step in enumerate(steps)}
    return sorted(steps, key=lambda step: (due[step], place[step]))


def early(steps: Sequence[Step], is_virtual: Callable[[Step], bool]) -> list[Step]:
    """Orders steps first come, first served: a step queues once all that it needs has run.

    Steps that are computed where they are read do not queue.
    """
    users = _users(steps)
    missing = dict.fromkeys(steps, 0)
    for step in steps:
        for user in users[step]:
            missing[user] += 1
    waiting = deque(step for step in steps if not missing[step])
    ran: list[Step] = []
    while waiting:
        step = waiting.popleft()
        ran.append(step)
        for user in users[step]:
            missing[user] -= 1
            if not missing[user] and is_virtual(user):
                waiting.appendleft(user)
            elif not missing[user]:
                waiting.append(user)
    return ran


def read_by_products(block: Block) -> Iterator[Value]:
    """Finds sums and products of several arrays that several matrix products read.

    Compilers make such a value once: the gradient of logits is one array, and the two arrays that
    it is made of end before it is multiplied.
    """
    for operation in block.operations:
        if operation.name not in _OF_TWO or len(set(operation.operands)) < 2:
            continue
        (result,) = operation.results
        if sum(user.name == "dot_general" for user in set(result.users)) > 1:
            yield result


def constants_last(steps: Sequence[Step]) -> list[Step]:
    """Moves every step that reads nothing to just before the first one that reads its result."""
    made = {step for step in steps if not step.operands and not step.bodies}
    maker = {result: step for step in made for result in step.results}
    found: dict[Step, None] = {}
    for step in steps:
        if step in made:
            continue
        for value in (*step.operands, *used_in(step.bodies)):
            if value in maker:
                found.setdefault(maker[value])
        found.setdefault(step)
    found.update(dict.fromkeys(step for step in steps if step in made and step not in found))
    return list(found)


def _users(steps: Sequence[Step]) -> dict[Step, list[Step]]:
    """Lists, for every step, those that need one of its results, in order."""
    maker = {result: step for step in steps for result in step.results}
    users: dict[Step, list[Step]] = {step: [] for step in steps}
    for step in steps:
        read = (value for value in (*step.operands, *used_in(step.bodies)) if value in maker)
        for operation in dict.fromkeys(maker[value] for value in read):
            users[operation].append(step)
    return users
