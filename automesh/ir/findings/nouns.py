"""The input of the rules: the state of a step, and every operation with the loops around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from automesh.cost.terms import Monomial, Sum, value_of
from automesh.ir.graph import Block, Graph, Operation, Value, multiplied
from automesh.ir.op_kinds import ELEMENTWISE, VIEWS

# Smaller arrays are not reported.
LEAST_BYTES = float(1 << 20)
_ONCE: Sum = (Monomial(coefficient=1.0),)
# How many views and elementwise operations a value is traced through.
_FARTHEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedConstraint:
    """A sharding that the script asks for inside the step.

    Attributes:
      axes: per dimension, the mesh axes that split it.
      source: its line: `file.py:12`.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """The arguments and results of a step, by their positions in its program.

    Attributes:
      names: of all arguments.
      pairs: (argument, the result that replaces it in the next step).
      moved: those of `pairs` whose result has another sharding than the argument.
      changed: donated arguments that come back in another type.
      lost: other donated arguments that no result replaces.
      on_one_device: arguments that are on one device, although the mesh has several.
      source: line of the step's function: `file.py:12`, or empty.
      constraints: of arrays inside the step.
    """

    names: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    moved: tuple[tuple[int, int], ...] = ()
    changed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    on_one_device: tuple[int, ...] = ()
    source: str = ""
    constraints: tuple[StatedConstraint, ...] = ()

    def name(self, argument: int) -> str:
        """Returns the name of an argument: `args[0]['w']`."""
        return self.names[argument] if argument < len(self.names) else f"argument {argument}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSite:
    """An operation with the loops around it.

    Attributes:
      count: executions in a step.
      loops: loops around it, the outermost first.
    """

    operation: Operation
    count: Sum
    loops: tuple[Operation, ...]


@dataclass(slots=True, kw_only=True)
class PartitionedProgram:
    """A partitioned program after the rewrites of a platform's compiler.

    Attributes:
      platform: whose compiler's rewrites were applied.
      state: the arguments and results that are the state of the step.
    """

    graph: Graph
    platform: str
    state: StepState
    _loops: dict[Value, tuple[Operation, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for seen in self.operations():
            if seen.operation.name == "while":
                for number, value in enumerate(seen.operation.bodies[0].arguments):
                    self._loops[value] = seen.operation, number

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.graph.mesh)

    def operations(self) -> Iterator[OperationSite]:
        """Lists every operation, including those of loops and branches."""
        yield from _within(self.graph.top, _ONCE, ())

    def carried(self) -> tuple[tuple[int, Value], ...]:
        """Returns the arguments that a result replaces."""
        arguments = self.graph.top.arguments
        return tuple(
            (argument, arguments[argument])
            for argument, _ in self.state.pairs
            if argument < len(arguments)
        )

    def batch_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes that split the rows of arguments that are no state."""
        state = {argument for argument, _ in self.state.pairs}
        found = {
            axis
            for number, value in enumerate(self.graph.top.arguments)
            if number not in state and value.shape
            for axis in value.axes[0]
        }
        return tuple(axis for axis, _ in self.graph.mesh if axis in found)

    def holds_rows(self, value: Value) -> bool:
        """Whether a value is split over the rows of a batch, as a cache of the examples is."""
        state = {argument for argument, _ in self.state.pairs}
        rows = {
            (one.shape[0], one.axes[0])
            for number, one in enumerate(self.graph.top.arguments)
            if number not in state and one.shape and one.axes[0]
        }
        return any(part in rows for part in zip(value.shape, value.axes, strict=True))

    def like_state(self, value: Value) -> tuple[int, Value] | None:
        """Returns the first argument of the state with the shape of a value."""
        return next((one for one in self.carried() if one[1].shape == value.shape), None)

    def is_state(self, value: Value) -> bool:
        """Whether a value is, or is a view of, an argument that a result replaces."""
        argument = self.argument_of(value)
        return any(argument == place for place, _ in self.state.pairs)

    def loop_of(self, value: Value) -> tuple[Operation, int] | None:
        """Returns the loop whose body takes a value, and the position among its arguments."""
        return self._loops.get(value)

    def before(self, value: Value) -> Value:
        """Traces a value out of the loops that pass it in unchanged."""
        while (found := self._loops.get(value)) is not None:
            loop, number = found
            if loop.bodies[0].returned[number] is not value:
                return value
            value = loop.operands[number]
        return value

    def maker(self, value: Value) -> Operation | None:
        """Finds the operation that makes a value.

        Views, conversions and other elementwise operations of one array are skipped, and so are
        loops that pass the value in. None: it is an argument, or comes from several arrays.
        """
        for _ in range(_FARTHEST):
            value = self.before(value)
            made = value.producer
            if made is not None and made.attributes.get("axes") == () and made.operands:
                value = made.operands[0]  # A collective that moves nothing.
                continue
            if made is None or not (made.name in VIEWS or made.name in ELEMENTWISE):
                return made
            arrays = [one for one in made.operands if one.shape and not one.is_constant]
            if made.name == "reshape" and len(made.operands[0].shape) != len(made.results[0].shape):
                return made
            if len(arrays) != 1:
                return None
            value = arrays[0]
        return None

    def argument_of(self, value: Value) -> int | None:
        """Returns the position of the program's argument that a value is, or is a view of."""
        for _ in range(_FARTHEST):
            value = self.before(value)
            if value.producer is None:
                arguments = self.graph.top.arguments
                return next((n for n, one in enumerate(arguments) if one is value), None)
            if value.producer.name not in {*VIEWS, "convert", "transpose"}:
                return None
            value = value.producer.operands[0]
        return None


def _within(block: Block, count: Sum, loops: tuple[Operation, ...]) -> Iterator[OperationSite]:
    for operation in block.operations:
        yield OperationSite(operation=operation, count=count, loops=loops)
        if not operation.bodies:
            continue
        is_loop = operation.name == "while"
        times = operation.times if is_loop else None
        inside = count if times is None else multiplied(count, times)
        for body in operation.bodies:
            yield from _within(body, inside, (*loops, operation) if is_loop else loops)


def work_of(program: PartitionedProgram, seen: OperationSite) -> float:
    """Counts the multiplications of a product in a step, on all devices together."""
    operation = seen.operation
    times = value_of(seen.count, program.sizes)
    result = math.prod(operation.results[0].shape)
    if operation.name == "convolution":
        kernel = operation.operands[1].shape
        features = kernel[operation.attributes["rhs_output"]]
        return times * result * math.prod(kernel) / max(features, 1)
    left = operation.operands[0].shape
    return times * result * math.prod(left[d] for d in operation.attributes["lhs_contracting"])


def words(value: Value) -> str:
    """Describes the whole array: `f32[64,256]`."""
    return f"{value.dtype}[{','.join(map(str, value.stated or value.shape))}]"


def several(names: list[str]) -> str:
    """Shortens a list of names: `args[0]['w'] and 3 more`."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def gathers(operation: Operation) -> bool:
    """Whether the partitioner gathers an array that is large enough to be reported."""
    if operation.name != "all_gather" or operation.attributes.get("manual"):
        return False
    whole = operation.results[0]
    return not whole.is_constant and whole.global_bytes >= LEAST_BYTES
