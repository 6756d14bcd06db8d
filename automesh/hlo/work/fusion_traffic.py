"""Bytes that a fusion reads and writes: what it takes from its operands, through fusions in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automesh.hlo.kinds import ASYNC_DONE, ASYNC_START, kind_of
from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.work.memories import Touch, leaves_of, touch_all

SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATE = "dynamic-update-slice"


def fusion_touches(module: Module, fusion: Instruction, operands: Sequence[Shape]) -> list[Touch]:
    """Bytes read of each operand and written to each array of the result.

    Of an operand that is only sliced, the slices are read; one that is updated in place is written
    where it is replaced. Buffers of a collective are its transfer's.
    """
    body = _Body.of(module, module.computations[fusion.called[0]])
    read = [
        (operands[number].memory_space, _read(body, p, p.shape.bytes))
        for number, p in body.computation.parameters().items()
    ]
    written = _written(body, body.computation.root_instruction)
    spaces = [leaf.memory_space for leaf in leaves_of(fusion.shape)]
    if len(spaces) != len(written):
        return [*read, *touch_all(fusion.shape)]
    return [*read, *zip(spaces, written)]


def users_of(computation: Computation) -> dict[int, list[Instruction]]:
    """Instruction id -> the instructions that take it as an operand."""
    users: dict[int, list[Instruction]] = {number: [] for number in computation.instructions}
    for instruction in computation.instructions.values():
        for operand in set(instruction.operands):
            users[operand].append(instruction)
    return users


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a fusion.

    Attributes:
      leaves: ids of what the result consists of.
      silent: what stands in it for a collective, and moves nothing itself. A TPU fusion that
        overlaps with a collective also takes its buffers and hands them on.
    """

    module: Module
    computation: Computation
    users: dict[int, list[Instruction]]
    leaves: frozenset[int]
    silent: frozenset[int]

    @classmethod
    def of(cls, module: Module, computation: Computation) -> _Body:
        every = computation.instructions.values()
        root = computation.root_instruction
        silent = {i.id for i in every if kind_of(i) or i.target in (ASYNC_START, ASYNC_DONE)}
        if silent and root.opcode == "tuple":
            silent.add(root.id)
            silent |= {i.id for i in computation.operands(root) if i.opcode == "parameter"}
        return cls(
            module,
            computation,
            users_of(computation),
            frozenset(_leaves(computation, root)),
            frozenset(silent),
        )

    def inner(self, fusion: Instruction) -> _Body:
        return _Body.of(self.module, self.module.computations[fusion.called[0]])


def _leaves(computation: Computation, value: Instruction) -> list[int]:
    if value.opcode in ("tuple", "bitcast"):
        return [i for operand in computation.operands(value) for i in _leaves(computation, operand)]
    return [value.id]


def _read(body: _Body, value: Instruction, whole: int) -> int:
    """Bytes of `value`, of which there are `whole`, that are read."""
    total = 0
    for user in body.users[value.id]:
        if user.id in body.silent:
            continue
        first_only = user.operands[0] == value.id and value.id not in user.operands[1:]
        if user.opcode == "bitcast":
            total += _read(body, user, whole)
        elif user.opcode == "fusion":
            inner = body.inner(user)
            if _hands_on(inner):
                total += _read(body, user, whole)
                continue
            taken = [p for n, p in inner.computation.parameters().items()
                     if user.operands[n] == value.id]  # fmt: skip
            total += sum(_read(inner, one, whole) for one in taken)
        elif user.opcode in SLICES and first_only:
            total += user.shape.bytes
        elif not (user.opcode == _UPDATE and user.id in body.leaves and first_only):
            return whole
    if value.id == body.computation.root and value.opcode == "parameter":
        return whole
    return min(total, whole)


def _hands_on(inner: _Body) -> bool:
    """True if a fusion inside a fusion gives on its operand as it is: XLA aliases the two."""
    value = inner.computation.root_instruction
    while value.opcode in ("copy", "bitcast"):
        (operand,) = inner.computation.operands(value)
        if value.opcode == "copy" and operand.shape != value.shape:
            return False
        value = operand
    return value.opcode == "parameter"


def _written(body: _Body, value: Instruction) -> list[int]:
    """Bytes written to each array of the result."""
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
    if value.opcode == _UPDATE:
        return [operands[1].shape.bytes]
    return [leaf.bytes for leaf in leaves_of(value.shape)]
