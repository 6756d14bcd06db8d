"""What one collective moves: its kind, the array of a group, the bytes that a device sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from automesh.hlo.narrow import narrowed_bits
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.spans import Axes, Span, span_of_groups, span_of_pairs

_KINDS = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    }
)
# Before these, each device of a group holds one part of the full array; before others, all of it.
_SHARDED_BEFORE = frozenset({"all-gather", "all-to-all", "ragged-all-to-all"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One execution of one collective.

    Attributes:
      kind: as in `outcomes.Collective`.
      payload_bytes: of the full array of one group, at the width before the compiler's promotion.
      wire_bytes: that one device sends, see `wire_bytes`.
      unproven: in words, if the width before promotion is in doubt; else empty.
    """

    kind: str
    span: Span
    payload_bytes: int
    wire_bytes: int
    unproven: str = ""


def wire_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes that one device of a group of n sends for a full array of V bytes, rounded up.

    all-gather and reduce-scatter on a ring: (n-1)/n V; all-reduce, being both in turn: 2 (n-1)/n V;
    all-to-all: every device keeps 1/n of its V/n and sends the rest, (n-1)/n V/n;
    collective-permute: all that it holds; collective-broadcast: V, handed on along a chain.
    Source: scaling-book, sharding.md, and NCCL's algorithm bandwidths (nccl-tests, PERFORMANCE.md).

    >>> wire_bytes("all-reduce", 1024, 4), wire_bytes("all-to-all", 1024, 4)
    (1536, 192)
    """
    others = group_size - 1
    if kind in ("all-gather", "reduce-scatter"):
        return -(-others * payload_bytes // group_size)
    if kind == "all-reduce":
        return -(-2 * others * payload_bytes // group_size)
    if kind in ("all-to-all", "ragged-all-to-all"):
        return -(-others * payload_bytes // group_size**2)
    return payload_bytes if others else 0


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective or of the start of an asynchronous one; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""


def transfer_of(
    module: Module, computation: Computation, instruction: Instruction, axes: Axes
) -> Transfer:
    """Says what one execution of a collective moves, on a mesh of `axes`."""
    kind = kind_of(instruction)
    if instruction.pairs or kind == "collective-permute":
        span = span_of_pairs(instruction.pairs, axes)
    else:
        span = span_of_groups(_partition_groups(instruction), axes)
    held, unproven = _held_bytes(module, computation, instruction, kind)
    payload = held * span.group_size if kind in _SHARDED_BEFORE else held
    return Transfer(
        kind=kind,
        span=span,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, span.group_size),
        unproven=unproven,
    )


def _held_bytes(
    module: Module, computation: Computation, instruction: Instruction, kind: str
) -> tuple[int, str]:
    """Bytes that one device gives to the collective."""
    operands = computation.operands(instruction)
    if kind == "ragged-all-to-all":  # Input, output, offsets and sizes.
        return operands[0].shape.bytes, f"how much `{instruction.name}` sends depends on the data"
    if kind == "collective-permute" and not operands[-1].shape.dims:
        operands = operands[:1]  # In place: input, output and the offsets in both.
    total, unproven = 0, ""
    for index, operand in enumerate(operands):
        narrow = narrowed_bits(module, computation, instruction, index)
        total += operand.shape.size * narrow.bits // 8 if narrow.bits else operand.shape.bytes
        unproven = unproven or narrow.unproven
    return total, unproven


def _partition_groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """Groups of partition ids: without global ids, those on a channel count replicas: one."""
    groups = instruction.groups or ()
    counts_replicas = (
        instruction.channel > 0
        and not instruction.global_ids
        and kind_of(instruction) in ("all-reduce", "all-gather", "reduce-scatter")
    )
    return () if counts_replicas and math.prod(map(len, groups)) <= 1 else groups
