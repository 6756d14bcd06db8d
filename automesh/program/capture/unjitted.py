"""Finds steps that a script takes outside of any `jax.jit`: gradients and `shard_map`s, which jax
runs operation by operation (jax).

`jax.grad`, `jax.value_and_grad` and `jax.shard_map` are replaced once and stay replaced. The
functions that they make do what jax does, unless a script is being run that has no jitted step:
then their calls are handled like those of a jitted function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.core import Tracer

from automesh.program.capture.abstract.arrays import is_abstract

_FORMER = "jax.experimental.shard_map"
_SOURCE: Any = importlib.import_module("jax._src.source_info_util")
_MADE_BY = "automesh_made_by"



class Seen(Protocol):
    """What answers for a call outside of any jit."""

    def __call__(
        self,
        function: Any,
        inner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_gradient: bool,
    ) -> Any:
        """Returns what the script gets.

        Args:
          function: the user's function.
          inner: the function that jax made of it.
          args, kwargs: the arguments of the call.
          is_gradient: whether jax made it by `jax.grad` or the like, and not by `jax.shard_map`.
        """
        ...


def hook_unjitted(seen: Seen, traced: Callable[[], None]) -> None:
    """Lets `seen` answer for calls of the functions that `jax.grad` and the like have made, if no
    trace is in progress and all arguments are arrays or numbers.

    Args:
      traced: is called where a gradient is taken of values that are being traced.
    """
    owner: Any = jax
    for name in ("grad", "value_and_grad", "shard_map"):
        setattr(owner, name, _hooked(getattr(owner, name), seen, ("jax", name), traced))
    # An error or a finding in such a step names the script's line, and not one of this file.
    _SOURCE.register_exclusion(__file__)
    try:
        former: Any = importlib.import_module(_FORMER)
    except ImportError:
        return
    if callable(original := in_module(former, "shard_map")):
        former.shard_map = _hooked(original, seen, (_FORMER, "shard_map"), traced)


def in_module(module: Any, name: str) -> Any:
    """Returns what a module of jax has under a name, without the warning that jax gives if the name
    is deprecated; None if it has nothing there."""
    if name in vars(module):
        return vars(module)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(module, name, None)


def made_by(made: Any) -> tuple[tuple[str, str], tuple[Any, ...], dict[str, Any]] | None:
    """Returns how a changed function of jax made an object: the function's module and name, and the
    arguments that it got; None for all other objects.

    What is made holds what sees its calls, so a process that has not run the script makes it anew.
    """
    return vars(made).get(_MADE_BY) if inspect.isfunction(made) else None


def _hooked(
    original: Any, seen: Seen, name: tuple[str, str], traced: Callable[[], None]
) -> Any:
    is_gradient = name[1] != "shard_map"

    @functools.wraps(original)
    def make(*given: Any, **settings: Any) -> Any:
        function = given[0] if given else settings.get("fun", settings.get("f"))
        inner = original(*given, **settings)
        if function is None:  # A decorator with arguments.
            return lambda function: make(function, **settings)

        @functools.wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not all(map(_is_value, jax.tree.leaves((args, kwargs)))):
                if is_gradient:
                    traced()
                return inner(*args, **kwargs)
            return seen(function, inner, args, kwargs, is_gradient=is_gradient)

        setattr(called, _MADE_BY, (name, given, settings))
        return called

    return make


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is an argument that `jax.jit` takes and is not being traced."""
    if isinstance(leaf, Tracer) and not is_abstract(leaf):
        return False
    return isinstance(leaf, numbers.Number) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
