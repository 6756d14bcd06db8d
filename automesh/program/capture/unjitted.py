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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.core import Tracer

from automesh.mesh.layout.context import is_tracing
from automesh.program.capture.abstract.arrays import is_abstract

_FORMER = "jax.experimental.shard_map"
_SOURCE: Any = importlib.import_module("jax._src.source_info_util")
_MADE_BY = "automesh_made_by"
# Loops of `jax.lax`: the parameter that is their body, and the arrays that they begin with, each
# with the place that it has among the parameters of the body.
LOOPS: dict[str, tuple[str, dict[str, int]]] = {
    "scan": ("f", {"init": 0, "xs": 1}),
    "while_loop": ("body_fun", {"init_val": 0}),
    "fori_loop": ("body_fun", {"init_val": 1}),
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCall:
    """A call of a loop of `jax.lax` by the script itself.

    Attributes:
      name: such as `scan`.
      settings: what the loop has besides its body and its arrays, as far as it can be compared.
      body: the user's function.
      function: the loop as a function of the arrays that it begins with, which have the names of
        the parameters of the body.
      args: these arrays.
    """

    name: str
    settings: tuple[tuple[str, Any], ...]
    body: Any
    function: Any
    args: tuple[Any, ...]


def hook_unjitted(
    seen: UnjittedCalls, traced: Callable[[], None], loops: Callable[[LoopCall], Any]
) -> None:
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


def _hooked_loop(original: Any, seen: Callable[[LoopCall], Any], name: str) -> Any:
    body, arrays = LOOPS[name]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loop(*given: Any, **settings: Any) -> Any:
        if is_tracing() or jax.config.jax_disable_jit:
            return original(*given, **settings)
        try:
            stated = dict(signature.bind(*given, **settings).arguments)
        except TypeError:  # jax says what is wrong with the call.
            return original(*given, **settings)
        begin = {one: stated.pop(one) for one in arrays if one in stated}
        if not all(map(_is_value, jax.tree.leaves(begin))):
            return original(*given, **settings)

        def looped(*values: Any) -> Any:
            return original(**stated, **dict(zip(begin, values, strict=True)))

        of: Any = looped
        of.__wrapped__ = stated[body]  # For the name of the user's function, and its line.
        of.__signature__ = _signature_of(stated[body], [arrays[one] for one in begin])
        return seen(
            LoopCall(
                name=name,
                settings=tuple((one, _comparable(value)) for one, value in stated.items()),
                body=stated[body],
                function=looped,
                args=tuple(begin.values()),
            )
        )

    return loop


def _signature_of(body: Any, places: Sequence[int]) -> inspect.Signature:
    """Returns the signature of a loop: its parameters have the names that its body gives them."""
    try:
        names = list(inspect.signature(body).parameters)
    except (TypeError, ValueError):
        names = []
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(names[place] if place < len(names) else f"arg{place}", kind)
            for place in places
        ]
    )


def _comparable(value: Any) -> Any:
    plain = (bool, int, float, str, type(None))
    return value if isinstance(value, plain) else type(value).__name__


def _is_value(leaf: Any) -> bool:
    """Whether a leaf is an argument that `jax.jit` takes and is not being traced."""
    if isinstance(leaf, Tracer) and not is_abstract(leaf):
        return False
    return isinstance(leaf, numbers.Number) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
