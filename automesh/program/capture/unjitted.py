"""Finds steps that a script takes outside of any `jax.jit`: gradients and `shard_map`s, which jax
runs operation by operation, and loops, whose body jax compiles (jax).

`jax.grad`, `jax.value_and_grad`, `jax.shard_map` and the loops of `jax.lax` are replaced once and
stay replaced. They, or the functions that they make, do what jax does, unless a script is being run
that has no jitted step: then their calls are handled like those of a jitted function. A loop in
which gradients are taken always is: it may be the whole training.
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
# Loops of `jax.lax`: the parameters that are their body, and the arrays that they begin with.
LOOPS = {
    "scan": ("f", ("init", "xs")),
    "while_loop": ("body_fun", ("init_val",)),
    "fori_loop": ("body_fun", ("init_val",)),
}
_ORIGINALS: dict[str, Any] = {}


class UnjittedCalls(Protocol):
    """The answer to calls outside of any jit."""

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


SeenLoop = Callable[[Any, Any, tuple[Any, ...]], Any]
"""A function that takes the body of a loop, the loop as a function of the arrays that it begins
with, and these arrays, and returns what the script gets."""


def hook_unjitted(seen: UnjittedCalls, traced: Callable[[], None], loops: SeenLoop) -> None:
    """Lets `seen` answer for calls of the functions that `jax.grad` and the like have made, and
    `loops` for loops, if no trace is in progress and all arguments are arrays or numbers.

    Args:
      traced: is called where a gradient is taken of values that are being traced.
    """
    owner: Any = jax
    for name in ("grad", "value_and_grad", "shard_map"):
        setattr(owner, name, _hooked(getattr(owner, name), seen, ("jax", name), traced))
    lax: Any = jax.lax
    for name in LOOPS:
        setattr(lax, name, _hooked_loop(getattr(lax, name), loops, name))
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
    original: Any, seen: UnjittedCalls, name: tuple[str, str], traced: Callable[[], None]
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


def _hooked_loop(original: Any, seen: SeenLoop, name: str) -> Any:
    body, arrays = LOOPS[name]
    _ORIGINALS[name] = original
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loop(*given: Any, **settings: Any) -> Any:
        try:
            stated = dict(signature.bind(*given, **settings).arguments)
        except TypeError:  # jax says what is wrong with the call.
            return original(*given, **settings)
        begin = {one: stated.pop(one) for one in arrays if one in stated}
        if not all(map(_is_value, jax.tree.leaves(begin))):
            return original(*given, **settings)
        inner = functools.partial(_run_loop, name, tuple(begin), stated)
        return seen(stated[body], inner, tuple(begin.values()))

    return loop


def _run_loop(name: str, arrays: tuple[str, ...], stated: dict[str, Any], *begin: Any) -> Any:
    """Calls a loop of `jax.lax` with the arrays that it begins with.

    A function of this module, so that a step that is such a loop can be pickled.
    """
    original = _ORIGINALS.get(name) or getattr(jax.lax, name)
    return original(**stated, **dict(zip(arrays, begin, strict=True)))


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is an argument that `jax.jit` takes and is not being traced."""
    if isinstance(leaf, Tracer) and not is_abstract(leaf):
        return False
    return isinstance(leaf, numbers.Number) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
