"""Sees steps that a script takes outside of any `jax.jit`: gradients and `shard_map`s that jax runs
operation by operation (jax).

`jax.grad`, `jax.value_and_grad` and `jax.shard_map` are changed once and stay so. The functions
that they make do what jax does, unless a script is being run that has no jitted step: then their
calls are handled like those of a jitted function.
"""

from __future__ import annotations

import functools
import importlib
import numbers
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from automesh.program.capture.abstract_arrays import is_abstract

_FORMER = "jax.experimental.shard_map"

Seen = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function that takes the user's function, the function that jax made of it, and the arguments of
a call, and returns what the script gets."""


def hook_unjitted(seen: Seen) -> None:
    """Lets `seen` answer for calls of the functions that `jax.grad` and the like have made, if no
    trace is in progress and all arguments are arrays or numbers."""
    owner: Any = jax
    for name in ("grad", "value_and_grad", "shard_map"):
        setattr(owner, name, _hooked(getattr(owner, name), seen))
    try:
        former: Any = importlib.import_module(_FORMER)
    except ImportError:
        return
    if callable(original := vars(former).get("shard_map")):
        former.shard_map = _hooked(original, seen)


def _hooked(original: Any, seen: Seen) -> Any:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        function = args[0] if args else kwargs.get("fun", kwargs.get("f"))
        inner = original(*args, **kwargs)
        if function is None:  # A decorator with arguments.
            return lambda function: make(function, **kwargs)

        @functools.wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not all(map(_is_value, jax.tree.leaves((args, kwargs)))):
                return inner(*args, **kwargs)
            return seen(function, inner, args, kwargs)

        return called

    return make


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is an argument that `jax.jit` takes and is not being traced."""
    if isinstance(leaf, Tracer) and not is_abstract(leaf):
        return False
    return isinstance(leaf, numbers.Number) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
