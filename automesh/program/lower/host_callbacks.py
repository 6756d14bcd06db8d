"""Handles calls from a step to Python on the host if it is lowered for absent devices (jax).

A callback needs the client of the devices that run it, and absent devices have none. If the program
is only examined, the callback stays as an operation, with unknown cost if it returns arrays
(`pure_callback`, `io_callback`). If the program is compiled, callbacks that only show something
(`jax.debug.print`, `jax.debug.callback`) are left out, and those that return arrays return zeros.

This module replaces a private function of jax, `jax._src.callback.emit_python_callback`, which
lowers all of them; checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TARGET = "host_callback"
"""The name of the operation that replaces a callback if a program is only examined."""
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
    """The notices about callbacks in this process, each sentence once."""

    said: dict[str, None] = field(default_factory=dict[str, None])


_STATE = _CallbackState()


def said_of_callbacks() -> tuple[str, ...]:
    """Returns the notices for the user about callbacks that were lowered in this process."""
    return tuple(_STATE.said)


@contextmanager
def without_host(*, is_compiled: bool) -> Generator[None]:
    """Replaces or removes host callbacks in programs that are lowered in the body.

    Args:
      is_compiled: True if the program will be compiled, and not only examined.
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
