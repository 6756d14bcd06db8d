"""Collectives among the instructions of a compiled module."""

from __future__ import annotations

from automesh.collectives import is_kind
from automesh.hlo.nouns import Instruction

# Custom calls inside the TPU fusions that begin and end a collective.
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective or of the start of an asynchronous one; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if is_kind(kind) and kind != "send" else ""
