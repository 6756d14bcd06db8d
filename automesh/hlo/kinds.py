"""Kinds of collectives."""

from __future__ import annotations

from automesh.hlo.nouns import Instruction

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
SHARDED_BEFORE = frozenset({"all-gather", "all-to-all", "ragged-all-to-all"})
# Custom calls inside the TPU fusions that begin and end a collective.
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective or of the start of an asynchronous one; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""
