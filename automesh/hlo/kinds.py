"""Recognizes collectives among the instructions of a compiled module."""

from __future__ import annotations

from automesh.collectives import is_kind
from automesh.hlo.nouns import Instruction

# Custom calls inside the TPU fusions that begin and end a collective.
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def kind_of(instruction: Instruction) -> str:
    """Returns the kind of a collective, or of the start of an asynchronous one; else empty."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if is_kind(kind) and kind != "send" else ""
