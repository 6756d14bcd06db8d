"""Bytes that a fusion reads and writes: what it takes from its operands, through fusions in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from automesh.hlo.kinds import ASYNC_DONE, ASYNC_START, kind_of
from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.work.memories import Touch, leaves_of, touch_all

SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATE = "dynamic-update-slice"
# One element of the result needs at most one of the operand, which is smaller.
_SPREADS = frozenset({"broadcast", "concatenate", "pad"})
# Any element of the result may need every one of the operand, though they are as many.
_WHOLE = frozenset(
    {
        *("dot", "ragged-dot", "convolution", "custom-call", "sort", "fft", "scatter", "reduce"),
        *("reduce-window", "select-and-scatter", "while", "conditional", "call", "cholesky"),
        *("triangular-solve", "rng", "rng-bit-generator", "map", _UPDATE),
    }
)


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
      shares: of values that were looked at, see `_share`.
    """

    module: Module
    computation: Computation
    users: dict[int, list[Instruction]]
    leaves: frozenset[int]
    silent: frozenset[int]
    shares: dict[int, float] = field(default_factory=dict[int, float])

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
    if value.id == body.computation.root and value.opcode == "parameter":
        return whole
    return round(whole * _share(body, value))


def _share(body: _Body, value: Instruction) -> float:
    """Part of a value that the fusion needs: 1 for all of it.

    As xla/service/gpu/model/gpu_hlo_cost_analysis.cc propagates the utilization of operands from
    the result: what is cut out of an elementwise value is all that is computed of it, and read for
    it. What several users need is added up; nothing is read twice.
    """
    known = body.shares.get(value.id)
    if known is not None:
        return known
    total = 0.0
    for user in body.users[value.id]:
        total += _share_of(body, value, user)
        if total >= 1.0:
            break
    if value.id in body.leaves and value.opcode != "parameter":
        total = 1.0
    body.shares[value.id] = min(total, 1.0)
    return body.shares[value.id]


def _share_of(body: _Body, value: Instruction, user: Instruction) -> float:
    """What one user needs."""
    if user.id in body.silent:
        return 0.0
    if user.opcode == "tuple":
        return 1.0
    if user.opcode == "fusion":
        inner = body.inner(user)
        if _hands_on(inner):
            return _share(body, user)
        taken = [p for n, p in inner.computation.parameters().items()
                 if user.operands[n] == value.id]  # fmt: skip
        return sum(_share(inner, one) for one in taken)
    first_only = user.operands[0] == value.id and value.id not in user.operands[1:]
    if user.opcode == _UPDATE and first_only:
        return 0.0 if user.id in body.leaves else 1.0
    if user.opcode in SLICES and not first_only:
        return 1.0
    own = _elements(value)
    if user.opcode not in SLICES and user.opcode not in _SPREADS and _elements(user) != own:
        return 1.0
    if user.opcode in _WHOLE or not own:
        return 1.0
    return min(_share(body, user) * _elements(user) / own, 1.0)


def _elements(value: Instruction) -> int:
    return math.prod(value.shape.dims)


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
