"""Calls from a step to Python on the host, where it is lowered for devices that are not here (jax).

A callback belongs to the client of the devices that run it, and there is none. Where the program is
only looked at, it is kept as an operation, of unknown cost if it gives arrays (`pure_callback`,
`io_callback`). Where it is compiled, what only shows something (`jax.debug.print`,
`jax.debug.callback`) is left out, and what gives arrays gives zeros.

Private is `jax._src.callback.emit_python_callback`, by which all of them are lowered; looked at in
jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TARGET = "host_callback"
"""The operation that stands for a call of the host, where a program is only looked at."""
_SHOWN = (
    "calls from the step to the host that only show something (jax.debug.print, "
    "jax.debug.callback) are left out: the target's devices are not here"
)
_GIVES = (
    "the step takes arrays from the host (pure_callback, io_callback): what that costs on the "
    "target is not counted"
)


@dataclass(slots=True)
class _CallbackState:
    """Of this process: what became of callbacks so far, one sentence each."""

    said: dict[str, None] = field(default_factory=dict[str, None])


_STATE = _CallbackState()


def said_of_callbacks() -> tuple[str, ...]:
    """What the user should know of the callbacks that were lowered in this process."""
    return tuple(_STATE.said)


@contextmanager
def without_host(*, is_compiled: bool) -> Generator[None]:
    """What is lowered in the body calls nothing on the host.

    Args:
      is_compiled: True if the program is to be compiled, and not only looked at.
    """
    place: Any = importlib.import_module("jax._src.callback")
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    original = place.emit_python_callback

    def emit(
        ctx: Any,
        callback: Any,
        token: Any,
        operands: Sequence[Any],
        operand_avals: Sequence[Any],
        result_avals: Sequence[Any],
        **_: Any,
    ) -> tuple[list[Any], Any, None]:
        del callback, operand_avals
        _STATE.said.setdefault(_GIVES if result_avals else _SHOWN)
        zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in result_avals]
        if is_compiled:
            return zeros, token, None
        call = mlir.custom_call(
            TARGET,
            result_types=[zero.type for zero in zeros],
            operands=[operand for operand in operands if operand is not None],
            has_side_effect=True,
        )
        return list(call.results), token, None

    place.emit_python_callback = emit
    try:
        yield
    finally:
        place.emit_python_callback = original
