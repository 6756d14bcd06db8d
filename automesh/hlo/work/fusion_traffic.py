"""Counts the bytes that a fusion reads and writes, including nested fusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automesh.hlo.kinds import ASYNC_DONE, ASYNC_START, kind_of
from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.work.memories import Touch, leaves_of, touch_all

SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATE = "dynamic-update-slice"
# An element of the result needs at most one element of each operand. Other operations may need all.
_ONE_TO_ONE = frozenset(
    (
        "abs", "add", "and", "atan2", "bitcast", "bitcast-convert", "broadcast", "cbrt", "ceil",
        "clamp", "compare", "complex", "concatenate", "convert", "copy", "cosine",
        "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor",
        "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply",
        "negate", "not", "or", "pad", "popcnt", "power", "real", "reduce-precision", "remainder",
        "reshape", "reverse", "round-nearest-afz", "round-nearest-even", "rsqrt", "select",
        "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt",
        "subtract", "tan", "tanh", "transpose", "xor",
    )
)  # fmt: skip


def fusion_touches(module: Module, fusion: Instruction, operands: Sequence[Shape]) -> list[Touch]:
    """Counts bytes read from each operand and written to each array of the result.

    Only the part of an operand that the result needs is read; an operand that is updated in place
    is only written where it changes. Buffers of a collective count in its transfer.
    """
    body = _Body.of(module, module.computations[fusion.called[0]])
    read = [
        (operands[number].memory_space, _read(body, p))
        for number, p in body.computation.parameters().items()
    ]
    written = _written(body, body.computation.root_instruction)
    spaces = [leaf.memory_space for leaf in leaves_of(fusion.shape)]
    if len(spaces) != len(written):
        return [*read, *touch_all(fusion.shape)]
    return [*read, *zip(spaces, written)]


def users_of(computation: Computation) -> dict[int, list[Instruction]]:
    """Maps each instruction id to the instructions that take it as an operand."""
    users: dict[int, list[Instruction]] = {number: [] for number in computation.instructions}
    for instruction in computation.instructions.values():
        for operand in set(instruction.operands):
            users[operand].append(instruction)
    return users


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a fusion.

    Attributes:
      leaves: ids of the instructions that make the result.
      silent: instructions of a collective, which move nothing themselves; a TPU fusion that
        overlaps with a collective also takes and returns its buffers.
      shares: id -> the needed part of a value: 1 for all of it.
    """

    module: Module
    computation: Computation
    users: dict[int, list[Instruction]]
    leaves: frozenset[int]
    silent: frozenset[int]
    shares: dict[int, float]

    @classmethod
    def of(cls, module: Module, computation: Computation) -> _Body:
        every = computation.instructions.values()
        root = computation.root_instruction
        silent = {i.id for i in every if kind_of(i) or i.target in (ASYNC_START, ASYNC_DONE)}
        if silent and root.opcode == "tuple":
            silent.add(root.id)
            silent |= {i.id for i in computation.operands(root) if i.opcode == "parameter"}
        body = cls(
            module,
            computation,
            users_of(computation),
            frozenset(_leaves(computation, root)),
            frozenset(silent),
            {},
        )
        _find_shares(body)
        return body

    def inner(self, fusion: Instruction) -> _Body:
        return _Body.of(self.module, self.module.computations[fusion.called[0]])

    def is_buffer(self, value: Instruction) -> bool:
        """Whether a value is an unchanged operand of the fusion."""
        while value.opcode != "parameter":
            number = 0
            if value.opcode == "fusion":
                handed_on = _returned_parameter(self.module.computations[value.called[0]])
                if handed_on is None:
                    return False
                number = handed_on
            elif value.opcode != "bitcast":
                return False
            value = self.computation.operands(value)[number]
        return True


def _leaves(computation: Computation, value: Instruction) -> list[int]:
    if value.opcode in ("tuple", "bitcast"):
        return [i for operand in computation.operands(value) for i in _leaves(computation, operand)]
    return [value.id]


def _read(body: _Body, parameter: Instruction) -> int:
    """Counts the bytes of an operand that are read."""
    whole = parameter.shape.bytes
    is_root = parameter.id == body.computation.root
    return whole if is_root else round(whole * body.shares[parameter.id])


def _find_shares(body: _Body) -> None:
    """Finds the needed part of every value, from the result backwards.

    Follows xla/service/gpu/model/gpu_hlo_cost_analysis.cc, which propagates the utilization of
    operands: if only a slice of an elementwise value is used, only that is computed, and read for
    it. The needs of several users add up, at most to the whole value.
    """
    # Users come after their operands; a chain of them may be as long as the program.
    for value in reversed(tuple(body.computation.instructions.values())):
        if value.id in body.leaves and value.opcode != "parameter":
            body.shares[value.id] = 1.0
        else:
            needed = sum(_needed_by(body, value, user) for user in body.users[value.id])
            body.shares[value.id] = min(needed, 1.0)


def _needed_by(body: _Body, value: Instruction, user: Instruction) -> float:
    """Returns the part of a value that one user needs."""
    if user.id in body.silent:
        return 0.0 if body.is_buffer(value) else 1.0
    if user.opcode == "fusion":
        if _returned_parameter(body.module.computations[user.called[0]]) is not None:
            return body.shares[user.id]
        inner = body.inner(user)
        return sum(
            inner.shares[parameter.id]
            for number, parameter in inner.computation.parameters().items()
            if user.operands[number] == value.id
        )
    first_only = user.operands[0] == value.id and value.id not in user.operands[1:]
    if user.opcode == _UPDATE and first_only and user.id in body.leaves:
        return 0.0 if body.is_buffer(value) else 1.0
    if user.opcode in _ONE_TO_ONE or (user.opcode in SLICES and first_only):
        return min(body.shares[user.id] * user.shape.size / max(value.shape.size, 1), 1.0)
    return 1.0


def _returned_parameter(computation: Computation) -> int | None:
    """Returns the parameter that a nested fusion returns unchanged, as XLA aliases it."""
    value = computation.root_instruction
    while value.opcode in ("copy", "bitcast"):
        (operand,) = computation.operands(value)
        if value.opcode == "copy" and operand.shape != value.shape:
            return None
        value = operand
    return value.parameter if value.opcode == "parameter" else None


def _written(body: _Body, value: Instruction) -> list[int]:
    """Counts the bytes written to each array of the result."""
    operands = body.computation.operands(value)
    if value.opcode == "tuple":
        return [size for operand in operands for size in _written(body, operand)]
    if value.id in body.silent:
        return [0] * len(leaves_of(value.shape))
    if value.opcode == "bitcast":
        return _written(body, operands[0])
    if value.opcode == "fusion":
        inner = body.inner(value)
        return _written(inner, inner.computation.root_instruction)
    if value.opcode == _UPDATE and body.is_buffer(operands[0]):
        return [operands[1].shape.bytes]
    return [leaf.bytes for leaf in leaves_of(value.shape)]
