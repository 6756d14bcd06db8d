"""Waiting for the devices, references included (jax)."""

from __future__ import annotations

from typing import Any

import jax

from automesh.program.lower.static_args import is_ref


def wait(outputs: Any, args: Any) -> None:
    """Waits until a step is done that gave `outputs`, or wrote to references among `args`.

    `jax.block_until_ready` passes over a reference without waiting (jax 0.10.1 to 0.12.0.1).
    """
    written = [_buffer(leaf) for leaf in jax.tree.leaves(args) if is_ref(leaf)]
    jax.block_until_ready((outputs, written))


def _buffer(reference: Any) -> Any:
    """The array in a reference; where this jax hides it, what can be read from it: a copy."""
    buffer = getattr(getattr(reference, "_refs", None), "_buf", None)
    return reference[...] if buffer is None else buffer
