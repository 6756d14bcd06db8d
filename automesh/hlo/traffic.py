"""Bytes that one instruction reads and writes in memory.

An instruction or fusion reads its operands and writes its result once; slices read only what they
take, and an update in place touches only the part that it replaces (as in
xla/service/hlo_cost_analysis.cc).
"""

from __future__ import annotations

from automesh.hlo.nouns import Computation, Instruction, Module

_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "domain",
        "partition-id",
        "replica-id",
        "while",
        "conditional",
        "call",
        "async-start",
        "async-update",
        "async-done",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "copy-done",
        "send-done",
        "recv-done",
    }
)
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})


def traffic_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes read and written by one instruction that is not itself inside a fusion.

    Instructions that only name memory are free; loops, calls and branches are as well, since their
    computations are counted on their own; a `-start` carries the traffic of its `-done`.
    """
    opcode = instruction.opcode
    if opcode in _FREE:
        return 0
    if opcode == "fusion":
        return _fusion(module, instruction)
    sizes = [operand.shape.bytes for operand in computation.operands(instruction)]
    result = instruction.shape.bytes
    if opcode in _SLICES:
        return 2 * result + sum(sizes[1:])
    if opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if opcode == "scatter":
        updates = sizes[len(sizes) // 2 + 1 :]
        return 3 * sum(updates) + sizes[len(sizes) // 2]
    if opcode == "copy-start":
        return 2 * sizes[0]
    if opcode == "all-gather-start":  # The result repeats the operands.
        return result
    if opcode in ("all-reduce-start", "collective-permute-start"):
        return 2 * sum(sizes)
    return result + sum(
        computation.instructions[operand].shape.bytes for operand in set(instruction.operands)
    )


def _fusion(module: Module, fusion: Instruction) -> int:
    body = module.computations[fusion.called[0]]
    users = users_of(body)
    written = _written(body, body.root_instruction)
    in_place = set(_updates_at_root(body, body.root_instruction))
    read = sum(_read(body, users, p, p.shape.bytes, in_place) for p in body.parameters().values())
    return read + written


def users_of(computation: Computation) -> dict[int, list[Instruction]]:
    """Instruction id -> the instructions that take it as an operand."""
    users: dict[int, list[Instruction]] = {number: [] for number in computation.instructions}
    for instruction in computation.instructions.values():
        for operand in set(instruction.operands):
            users[operand].append(instruction)
    return users


def _read(
    body: Computation,
    users: dict[int, list[Instruction]],
    value: Instruction,
    whole: int,
    in_place: set[int],
) -> int:
    total = 0
    for user in users[value.id]:
        first_only = user.operands[0] == value.id and value.id not in user.operands[1:]
        if user.opcode == "bitcast":
            total += _read(body, users, user, whole, in_place)
        elif user.opcode in _SLICES and first_only:
            total += user.shape.bytes
        elif user.id in in_place and first_only:
            total += 0
        else:
            return whole
    return min(total, whole)


def _updates_at_root(body: Computation, instruction: Instruction) -> list[int]:
    if instruction.opcode in ("tuple", "bitcast"):
        return [
            i for operand in body.operands(instruction) for i in _updates_at_root(body, operand)
        ]
    return [instruction.id] if instruction.opcode == "dynamic-update-slice" else []


def _written(body: Computation, instruction: Instruction) -> int:
    if instruction.opcode in ("tuple", "bitcast"):
        return sum(_written(body, operand) for operand in body.operands(instruction))
    if instruction.opcode == "dynamic-update-slice":
        return body.operands(instruction)[1].shape.bytes
    return instruction.shape.bytes
