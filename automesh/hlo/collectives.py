"""Finds what a collective moves: its kind, the array of a group, the bytes of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import PurePath

from automesh.collectives import kind_named
from automesh.hlo.kinds import kind_of
from automesh.hlo.nouns import Computation, Groups, Instruction, Module, Shape
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.nouns import DeviceTransfer
from automesh.hlo.spans import Axes, span_of_groups, span_of_pairs
from automesh.hlo.trace import CalledInstruction, origin
from automesh.hlo.work.fusion_traffic import users_of
from automesh.platforms import platform_named
from automesh.platforms.platform import PlatformName


def transfer_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    partitions: Partitions,
    *,
    platform: PlatformName,
    by: Instruction,
    kind: str = "",
    hbm_bytes: int = 0,
    synchronous: bool = False,
) -> DeviceTransfer:
    """Describes what one execution of a collective moves.

    Args:
      platform: whose compiler wrote the module.
      by: the instruction that runs it in the schedule: itself, or a fusion or start that contains
        it.
      kind: its kind there, if it differs from its opcode.

    Raises:
      ValueError: a device id is outside the mesh.
    """
    kind = kind or kind_of(instruction)
    pairs = partitions.pairs(instruction.pairs)
    in_pairs = bool(pairs) or kind == "collective-permute"
    held, unproven = _operand_bytes(module, computation, instruction, kind, platform)
    moved = DeviceTransfer(
        name=by.name,
        kind=kind,
        medium="fabric",
        groups=() if in_pairs else partitions.groups(_listed_groups(instruction)),
        pairs=pairs,
        payload_bytes=held,
        wire_bytes=held,
        hbm_bytes=hbm_bytes,
        synchronous=synchronous,
        uncounted=unproven,
        op_name=instruction.op_name or by.op_name,
        source=source_of(instruction) or source_of(by),
    )
    return spread(moved, partitions.axes)


def spread(moved: DeviceTransfer, axes: Axes) -> DeviceTransfer:
    """Completes a collective with the axes, sizes and bytes that follow from its kind and groups.

    Args:
      moved: with the bytes that one device gives to it as payload.

    Raises:
      ValueError: a device id is outside the mesh.
    """
    kind = kind_named(moved.kind)
    span = span_of_groups(moved.groups, axes) if moved.groups else span_of_pairs(moved.pairs, axes)
    payload = moved.payload_bytes * (span.group_size if kind.is_sharded_before else 1)
    return replace(
        moved,
        axes=span.axes,
        group_size=span.group_size,
        payload_bytes=payload,
        wire_bytes=kind.wire_bytes(payload, span.group_size),
    )


def source_of(instruction: Instruction) -> str:
    """Returns the source line, as `step.py:123`; empty if unknown."""
    if not instruction.source_file:
        return ""
    return f"{PurePath(instruction.source_file).name}:{instruction.source_line}"


def _operand_bytes(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    platform: PlatformName,
) -> tuple[int, str]:
    """Counts the bytes that one device gives to the collective."""
    operands = computation.operands(instruction)
    if kind_named(kind).is_ragged:  # Input, output, offsets and sizes.
        return operands[0].shape.bytes, f"how much `{instruction.name}` sends depends on the data"
    if kind == "collective-permute" and not operands[-1].shape.dims:
        operands = operands[:1]  # In place: input, output and the offsets in both.
    total, unproven = 0, ""
    for index, operand in enumerate(operands):
        narrow = narrowed_bits(module, computation, instruction, index, platform)
        total += operand.shape.size * narrow.bits // 8 if narrow.bits else operand.shape.bytes
        unproven = unproven or narrow.unproven
    return total, unproven


def _listed_groups(instruction: Instruction) -> Groups:
    """Returns groups of partitions; empty if all partitions are one group.

    Without global ids, groups on a channel count replicas, of which there is one.
    """
    groups, kind = instruction.groups or (), kind_of(instruction)
    counts_replicas = (
        instruction.channel > 0
        and not instruction.global_ids
        and kind != ""
        and kind_named(kind).may_count_replicas
    )
    return () if counts_replicas and math.prod(map(len, groups)) <= 1 else groups


# Undoes the widening of collectives: XLA's CPU compiler runs 16-bit ones in 32 bits.
#
# Other compilers do move in 32 bits what they leave in 32 bits. Two marks prove that something was
# widened. An all-reduce or reduce-scatter that XLA's AllReducePromotion pass widened calls a
# reduction whose name ends in `_promoted`, but not in `_reassoc_promoted`: with those
# AllReduceReassociate replaces several 16-bit reductions by one of their sum, in 32 bits. Float
# normalization puts a conversion on both sides of any other: if every value comes from a narrower
# type and goes to that type again, the program meant the narrower type.


_MOVES = frozenset(
    {
        "bitcast",
        "copy",
        "reshape",
        "transpose",
        "slice",
        "dynamic-slice",
        "broadcast",
        "reverse",
        "concatenate",
    }
)
_PROMOTED, _SUMMED = "_promoted", "_reassoc_promoted"
_WIDE, _PROMOTABLE_BITS = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """The width that one operand of a collective had before promotion.

    Attributes:
      bits: per element; 0 if it was not promoted.
      unproven: in words, if it may have been, but there is no proof.
    """

    bits: int = 0
    unproven: str = ""


def narrowed_bits(
    module: Module,
    computation: Computation,
    collective: Instruction,
    index: int,
    platform: PlatformName,
) -> Narrow:
    """Finds how wide operand `index` of `collective` was before promotion.

    Args:
      platform: whose compiler wrote the module.
    """
    operand = computation.instructions[collective.operands[index]]
    if operand.shape.element_bits != _WIDE or not platform_named(platform).scheduling.widens:
        return Narrow()
    kind = kind_of(collective)
    if kind and kind_named(kind).reduces:
        reducer = module.computations[collective.called[0]].name
        is_widened = reducer.endswith(_PROMOTED) and not reducer.endswith(_SUMMED)
        return Narrow(bits=_PROMOTABLE_BITS) if is_widened else Narrow()
    before = _widened_from(module, CalledInstruction(computation=computation, instruction=operand))
    if before is None:
        return Narrow()
    after = {
        _narrowed_to(module, computation, user) for user in _readers(computation, collective, index)
    }
    if after == {before.element_type}:
        return Narrow(bits=before.element_bits)
    return Narrow(
        unproven=f"{kind or collective.opcode} of values widened from {before.element_type} "
        f"counted as {operand.shape.element_type}"
    )


def _widened_from(module: Module, place: CalledInstruction) -> Shape | None:
    """Finds the narrower float type that all values at `place` come from, unchanged."""
    place = origin(module, place)
    opcode = place.instruction.opcode
    if opcode == "convert":
        source, result = place.operand(0).instruction.shape, place.instruction.shape
        if not _is_float(source) or source.element_bits >= result.element_bits:
            return None
        return source
    if opcode == "concatenate":
        sources = [_widened_from(module, operand) for operand in place.operands()]
        types = {source.element_type if source else "" for source in sources}
        return sources[0] if len(types) == 1 else None
    return _widened_from(module, place.operand(0)) if opcode in _MOVES else None


def _readers(
    computation: Computation, collective: Instruction, index: int
) -> list[tuple[Instruction, Instruction]]:
    """Yields result `index` of `collective` with each instruction that reads it."""
    users = users_of(computation)
    results = [collective]
    if collective.opcode.endswith("-start"):
        results = users[collective.id]
    members: list[Instruction] = []
    for result in results:
        if result.shape.element_type == "tuple":
            members += [
                user
                for user in users[result.id]
                if user.opcode == "get-tuple-element" and user.tuple_index == index
            ]
        else:
            members.append(result)
    return [(member, user) for member in members for user in users[member.id]]


def _narrowed_to(
    module: Module, computation: Computation, taken: tuple[Instruction, Instruction]
) -> str:
    """Returns the type to which the instruction at once converts the value, or empty."""
    value, user = taken
    if user.opcode == "convert":
        narrower = user.shape.element_bits < value.shape.element_bits and _is_float(user.shape)
        return user.shape.element_type if narrower else ""
    if user.opcode in ("fusion", "call"):
        body = module.computations[user.called[0]]
        numbers = [number for number, operand in enumerate(user.operands) if operand == value.id]
        parameters = [p for p in body.parameters().values() if p.parameter in numbers]
        return _agreed(module, body, parameters)
    if user.opcode in _MOVES and (user.opcode == "concatenate" or user.operands[0] == value.id):
        return _agreed(module, computation, [user])
    return ""


def _agreed(module: Module, computation: Computation, values: list[Instruction]) -> str:
    users = users_of(computation)
    if any(value.id == computation.root for value in values):
        return ""
    types = {
        _narrowed_to(module, computation, (value, user))
        for value in values
        for user in users[value.id]
    }
    return types.pop() if len(types) == 1 else ""


def _is_float(shape: Shape) -> bool:
    return shape.element_type.startswith(("f", "bf"))
