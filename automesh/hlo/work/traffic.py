"""Counts the bytes that one instruction reads and writes in memory.

An instruction or fusion reads its operands and writes its result once; slices read only what they
take, and an update in place touches only the part that it replaces (as in
xla/service/hlo_cost_analysis.cc).
"""

from __future__ import annotations

from dataclasses import replace

from automesh.hlo.nouns import Computation, Instruction, Module, Shape
from automesh.hlo.work.fusion_traffic import SLICES, fusion_touches
from automesh.hlo.work.memories import Touch, Touched, by_memory, leaves_of, touch_all
from automesh.platforms.platform import PlatformName

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
# Custom calls that move nothing: libtpu's buffers that are filled later, or in parts, and its calls
# around a collective on a SparseCore.
FREE_TARGETS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart"}
)
_LIBRARIES = ("__cublas$", "__cudnn$")


def traffic_of(
    module: Module, computation: Computation, instruction: Instruction, platform: PlatformName
) -> Touched:
    """Counts bytes read and written by one instruction that is not inside a fusion.

    Instructions that only name memory are free. So are loops, calls and branches, as their
    computations are counted separately. A `-start` has the traffic of its `-done`.
    """
    if instruction.opcode in _FREE or instruction.target in FREE_TARGETS:
        return Touched()
    return by_memory(_touches(module, computation, instruction), platform)


def traffic_of_fused_collective(
    computation: Computation, fusion: Instruction, platform: PlatformName
) -> Touched:
    """Counts the bytes of a collective in a fusion: the fusion's operands and results.

    The first result of a TPU fusion that begins a collective is an unchanged operand.
    """
    made = leaves_of(fusion.shape)
    if len(made) > 1:
        made = made[1:]
    operands = [operand.shape for operand in computation.operands(fusion)]
    return by_memory(touch_all(*operands, *made), platform)


def _touches(module: Module, computation: Computation, instruction: Instruction) -> list[Touch]:
    opcode = instruction.opcode
    operands = [operand.shape for operand in computation.operands(instruction)]
    if opcode == "fusion":
        return fusion_touches(module, instruction, operands)
    result = touch_all(_without_workspace(instruction))
    if opcode in SLICES:
        taken = instruction.shape.bytes
        return [(operands[0].memory_space, taken), *result, *touch_all(*operands[1:])]
    if opcode == "dynamic-update-slice":
        return [*touch_all(operands[1]), (instruction.shape.memory_space, operands[1].bytes)]
    if opcode == "scatter":
        half = len(operands) // 2
        targets, updates = operands[:half], operands[half + 1 :]
        rewritten = [(t.memory_space, 2 * u.bytes) for t, u in zip(targets, updates)]
        return [*rewritten, *touch_all(*updates), *touch_all(operands[half])]
    if opcode == "copy-start":
        return touch_all(operands[0], instruction.shape.elements[0])
    if opcode == "all-gather-start":  # The result repeats the operands.
        return result
    if opcode in ("all-reduce-start", "collective-permute-start"):
        return 2 * touch_all(*operands)
    distinct = {i: computation.instructions[i].shape for i in instruction.operands}
    return [*result, *touch_all(*distinct.values())]


def _without_workspace(instruction: Instruction) -> Shape:
    """Returns the result, without the scratch memory of a library call."""
    shape = instruction.shape
    if instruction.target.startswith(_LIBRARIES) and len(shape.elements) > 1:
        kept = tuple(
            element for element in shape.elements if element.element_type not in ("s8", "u8")
        )
        return replace(shape, elements=kept or shape.elements)
    return shape
