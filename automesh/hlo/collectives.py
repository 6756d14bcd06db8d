"""What one collective moves: its kind, the array of a group, the bytes that a device sends."""

from __future__ import annotations

import math
from pathlib import PurePath

from automesh.collectives import kind_named
from automesh.hlo.kinds import kind_of
from automesh.hlo.nouns import Computation, Groups, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.cpu_promotion import narrowed_bits
from automesh.hlo.schedule.nouns import Transfer
from automesh.hlo.spans import span_of_groups, span_of_pairs
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
) -> Transfer:
    """Says what one execution of a collective moves.

    Args:
      platform: whose compiler wrote the module.
      by: what stands for it in the schedule: itself, or a fusion or start that holds it.
      kind: what it amounts to there, if that is not what its opcode says.

    Raises:
      ValueError: a device id is outside the mesh.
    """
    groups: Groups = ()
    kind = kind or kind_of(instruction)
    pairs = partitions.pairs(instruction.pairs)
    if pairs or kind == "collective-permute":
        span = span_of_pairs(pairs, partitions.axes)
    else:
        groups = partitions.groups(_listed_groups(instruction))
        span = span_of_groups(groups, partitions.axes)
    held, unproven = _held_bytes(module, computation, instruction, kind, platform)
    payload = held * span.group_size if kind_named(kind).is_sharded_before else held
    return Transfer(
        name=by.name,
        kind=kind,
        medium="fabric",
        axes=span.axes,
        groups=groups,
        pairs=pairs,
        group_size=span.group_size,
        payload_bytes=payload,
        wire_bytes=kind_named(kind).wire_bytes(payload, span.group_size),
        hbm_bytes=hbm_bytes,
        synchronous=synchronous,
        uncounted=unproven,
        op_name=instruction.op_name or by.op_name,
        source=source_of(instruction) or source_of(by),
    )


def source_of(instruction: Instruction) -> str:
    """`step.py:123`; empty if unknown."""
    if not instruction.source_file:
        return ""
    return f"{PurePath(instruction.source_file).name}:{instruction.source_line}"


def _held_bytes(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    platform: PlatformName,
) -> tuple[int, str]:
    """Bytes that one device gives to the collective."""
    operands = computation.operands(instruction)
    if kind == "ragged-all-to-all":  # Input, output, offsets and sizes.
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
    """Groups of partitions; empty for one group of all.

    Without global ids, those on a channel count replicas, of which there is one.
    """
    groups = instruction.groups or ()
    counts_replicas = (
        instruction.channel > 0
        and not instruction.global_ids
        and kind_of(instruction) in ("all-reduce", "all-gather", "reduce-scatter")
    )
    return () if counts_replicas and math.prod(map(len, groups)) <= 1 else groups
