"""Prepares the step for tracing and calls: separates static arguments and names leaves (jax)."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from automesh.errors import UsageError
from automesh.program.script.module_objects import is_nnx_jitted, jax_function_in
from automesh.program.script.workload import Workload

# An error of jax/_src/tree_util.py and jaxlib about treedefs in the keys of their caches.
_INCOMPARABLE = "checking equality of metadata fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The static arguments of a call.

    Attributes:
      positions: static positional arguments, ascending.
      names: static keyword arguments.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def dynamic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with which a compiled step is called."""
        kept = tuple(arg for position, arg in enumerate(args) if position not in self.positions)
        return kept, {name: value for name, value in kwargs.items() if name not in self.names}

    def places(self, count: int) -> list[int]:
        """Returns the positions of `count` dynamic positional arguments among all arguments."""
        whole = range(count + len(self.positions))
        return [place for place in whole if place not in self.positions]

    def named_leaves(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[str] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Yields each leaf of the dynamic arguments with its name: `args[1]['x']`.

        Args:
          known: the user's names of the first leaves, if there are any.
        """
        for position, (place, leaf) in enumerate(self._named_by_place(args, kwargs)):
            yield known[position] if position < len(known) else place, leaf

    def _named_by_place(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for place, arg in zip(self.places(len(args)), args, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
                yield f"args[{place}]{jax.tree_util.keystr(path)}", leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(kwargs):
            yield f"kwargs{jax.tree_util.keystr(path)}", leaf

    def whole(self, dynamic: Sequence[Any], like: Sequence[Any]) -> tuple[Any, ...]:
        """Puts the static arguments of `like` back among the dynamic positional ones."""
        rest = iter(dynamic)
        return tuple(
            arg if position in self.positions else next(rest) for position, arg in enumerate(like)
        )


def is_ref(leaf: Any) -> bool:
    """Whether a leaf is a mutable array reference, real or abstract."""
    return isinstance(leaf, jax.Ref) or bool(getattr(leaf, "is_ref", False))


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf has values: an array, a reference to one, or a number."""
    return isinstance(leaf, (jax.Array, jax.Ref, np.ndarray, np.generic, bool, int, float, complex))


def is_array_like(leaf: Any) -> bool:
    """Whether a step can be traced for a leaf: one with values, or a description of one."""
    return is_concrete(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _is_static(arg: Any) -> bool:
    return not all(is_array_like(leaf) for leaf in jax.tree.leaves(arg))


def is_jitted(step: Any) -> bool:
    """Whether `jax.jit` has made a function.

    False for a bound method: its attributes are those of the function, which counts `self` as an
    argument.
    """
    has_stages = hasattr(step, "trace") and hasattr(step, "lower")
    return has_stages and not isinstance(step, types.MethodType) and not is_nnx_jitted(step)


def jitted(workload: Workload, *, donated: Sequence[int] = ()) -> Any:
    """Returns the workload's step as a jitted function.

    Args:
      donated: positions of further arguments that a step without `jax.jit` donates.

    Raises:
      UsageError: donation is asked of a function that is jitted already, or a static argument is
        not hashable.
    """
    step: Any = workload.step
    stated = _positions(workload.donate_argnums, len(workload.args), "donate_argnums")
    if is_jitted(step):
        if stated:
            raise UsageError(
                "`donate_argnums` has no effect on a step that is jitted already",
                hint="give it to the `jax.jit` of the step, or return the plain function",
            )
        return step
    split = static_by_description(workload, step)
    static = [workload.args[position] for position in split.positions]
    static += [workload.kwargs[name] for name in split.names]
    for value in static:
        try:
            hash(value)
        except TypeError as error:
            raise UsageError(
                f"a static argument of the step is a {type(value).__name__}, "
                "which cannot be hashed",
                hint="use a frozen dataclass or a tuple, or close over the value instead",
            ) from error
    return jax.jit(
        _hashable(step),
        static_argnums=split.positions,
        static_argnames=split.names or None,
        donate_argnums=tuple(sorted({*stated, *donated})),
    )


def _hashable(step: Any) -> Any:
    """Returns the step, or a function that calls it if it cannot be hashed, as jax requires: a
    module that contains a dict (Haliax's `named_jit`) cannot."""
    try:
        hash(step)
    except TypeError:

        @functools.wraps(step, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        return call
    return step


def trace(function: Any, workload: Workload) -> jax.stages.Traced:
    """Traces the workload's step for its arguments.

    Args:
      function: result of `jitted`.
    """
    try:
        return function.trace(*workload.args, **workload.kwargs)
    except ValueError as error:
        if _INCOMPARABLE not in str(error):
            raise
        # Nodes of the arguments cannot be compared, since they contain an array besides their
        # leaves. With empty caches there is nothing to compare them with.
        jax.clear_caches()
        return function.trace(*workload.args, **workload.kwargs)


def static_by_description(workload: Workload, function: Any) -> Split:
    """Returns the static arguments that the workload or jax's description of the function
    states."""
    stated, jit = _stated_or_seen(workload), static_of_jit(function, workload) or Split()
    return Split(
        positions=tuple(sorted({*stated.positions, *jit.positions})),
        names=tuple(dict.fromkeys((*stated.names, *jit.names))),
    )


def split_of(workload: Workload, function: Any, traced: jax.stages.Traced) -> Split:
    """Finds the arguments that the traced step took as static.

    Raises:
      UsageError: the trace does not show it.
    """
    stated = _stated_or_seen(workload)
    candidates = [stated, static_of_jit(function, workload), *_all_splits(workload, stated)]
    for candidate in candidates:
        if candidate is not None and _fits(candidate, workload, traced):
            return candidate
    raise UsageError(
        "the trace of the step does not show which of its arguments are static",
        hint="list their positions in `Workload(static_argnums=...)`",
    )


def _fits(split: Split, workload: Workload, traced: jax.stages.Traced) -> bool:
    named, _ = jax.tree_util.tree_flatten_with_path(split.dynamic(workload.args, workload.kwargs))
    avals, _ = jax.tree_util.tree_flatten_with_path(traced.in_avals)
    if [jax.tree_util.keystr(path) for path, _ in named] != [
        jax.tree_util.keystr(path) for path, _ in avals
    ]:
        return False
    return all(is_array_like(leaf) for _, leaf in named) and all(
        tuple(aval.shape) == leaf_shape(leaf)
        for (_, aval), (_, leaf) in zip(avals, named, strict=True)
    )


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of an array, a reference, a struct or a number."""
    return tuple(getattr(leaf, "shape", ()))


def leaf_dtype(leaf: Any) -> Any:
    """Returns the type of an array, a reference, a struct or a number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def stated_static(workload: Workload) -> Split:
    """Returns the static arguments that the workload and the jitted function in its step state."""
    stated = _positions(workload.static_argnums, len(workload.args), "static_argnums")
    jit = static_of_jit(workload.step, workload) or Split()
    return Split(positions=tuple(sorted({*stated, *jit.positions})), names=jit.names)


def _stated_or_seen(workload: Workload) -> Split:
    seen = {position for position, arg in enumerate(workload.args) if _is_static(arg)}
    stated = _positions(workload.static_argnums, len(workload.args), "static_argnums")
    names = tuple(name for name, value in workload.kwargs.items() if _is_static(value))
    return Split(positions=tuple(sorted({*stated, *seen})), names=names)


def static_of_jit(step: Any, workload: Workload) -> Split | None:
    """Returns the static arguments of the jitted function in a step: the step itself, or the
    function that a bound method, a `partial` or `nnx.jit` calls; None if there is none or it does
    not state them."""
    bound = 0
    while not is_jitted(step):
        if isinstance(step, types.MethodType):
            step, bound = step.__func__, bound + 1
        elif isinstance(step, functools.partial):
            part = cast("functools.partial[Any]", step)
            step, bound = part.func, bound + len(part.args)
        elif is_nnx_jitted(step):
            step = jax_function_in(step)
        else:
            return None
    # Private in jax; without it the arguments are compared with the trace.
    info: Any = getattr(step, "_jit_info", None)
    if info is None:
        return None
    places = [position - bound for position in info.static_argnums]
    names = tuple(name for name in (info.static_argnames or ()) if name in workload.kwargs)
    return Split(
        positions=tuple(sorted(place for place in places if 0 <= place < len(workload.args))),
        names=names,
    )


def _all_splits(workload: Workload, least: Split) -> list[Split]:
    others = [position for position in range(len(workload.args)) if position not in least.positions]
    return [
        Split(positions=tuple(sorted((*least.positions, *more))), names=least.names)
        for size in range(1, min(len(others), 3) + 1)
        for more in itertools.combinations(others, size)
    ]


def _positions(stated: int | Sequence[int], count: int, field: str) -> tuple[int, ...]:
    numbers = (stated,) if isinstance(stated, int) else tuple(stated)
    for number in numbers:
        if not isinstance(cast("Any", number), int) or not -count <= number < count:
            raise UsageError(f"`{field}` names the argument {number!r}, but the step has {count}")
    return tuple(sorted({number % count for number in numbers}))
