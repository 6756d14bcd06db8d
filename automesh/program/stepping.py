"""The step as something that can be traced and called: static arguments set apart, leaves in order
(jax)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from automesh.errors import UsageError
from automesh.program.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which arguments of a call are static, and what they are.

    Attributes:
      positions: static positional arguments, ascending.
      names: static keyword arguments.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def dynamic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a compiled step is called with."""
        kept = tuple(arg for position, arg in enumerate(args) if position not in self.positions)
        return kept, {name: value for name, value in kwargs.items() if name not in self.names}

    def whole(self, dynamic: Sequence[Any], like: Sequence[Any]) -> tuple[Any, ...]:
        """Puts the static arguments of `like` back among the dynamic positional ones."""
        rest = iter(dynamic)
        return tuple(
            arg if position in self.positions else next(rest) for position, arg in enumerate(like)
        )


def is_ref(leaf: Any) -> bool:
    """True for a mutable array reference, real or abstract."""
    return isinstance(leaf, jax.Ref) or bool(getattr(leaf, "is_ref", False))


def is_concrete(leaf: Any) -> bool:
    """True for a leaf with values: an array, a reference to one, or a number."""
    return isinstance(leaf, (jax.Array, jax.Ref, np.ndarray, np.generic, bool, int, float, complex))


def _is_array_like(leaf: Any) -> bool:
    return is_concrete(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _is_static(arg: Any) -> bool:
    return not all(_is_array_like(leaf) for leaf in jax.tree.leaves(arg))


def jitted(workload: Workload) -> Any:
    """The workload's step as a jitted function.

    Raises:
      UsageError: donation is asked of a function that is jitted already, or a static argument is
        not hashable.
    """
    step: Any = workload.step
    donated = _positions(workload.donate_argnums, len(workload.args), "donate_argnums")
    if hasattr(step, "trace") and hasattr(step, "lower"):
        if donated:
            raise UsageError(
                "`donate_argnums` has no effect on a step that is jitted already",
                hint="give it to the `jax.jit` of the step, or return the plain function",
            )
        return step
    split = _stated_or_seen(workload)
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
        donate_argnums=donated,
    )


def _hashable(step: Any) -> Any:
    """The step, or a function that calls it: jax wants to hash it, which a module with a dict in it
    (Haliax's `named_jit`) does not allow."""
    try:
        hash(step)
    except TypeError:

        @functools.wraps(step, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        return call
    return step


def static_by_description(workload: Workload, function: Any) -> Split:
    """Static arguments as the workload or jax's description of the function states them."""
    stated, jit = _stated_or_seen(workload), _of_jit(function, workload) or Split()
    return Split(
        positions=tuple(sorted({*stated.positions, *jit.positions})),
        names=tuple(dict.fromkeys((*stated.names, *jit.names))),
    )


def split_of(workload: Workload, function: Any, traced: jax.stages.Traced) -> Split:
    """Which arguments the traced step took as static.

    Raises:
      UsageError: the arguments do not tell.
    """
    stated = _stated_or_seen(workload)
    candidates = [stated, _of_jit(function, workload), *_all_splits(workload, stated)]
    for candidate in candidates:
        if candidate is not None and _fits(candidate, workload, traced):
            return candidate
    raise UsageError(
        "which arguments of the step are static cannot be told from its trace",
        hint="list their positions in `Workload(static_argnums=...)`",
    )


def _fits(split: Split, workload: Workload, traced: jax.stages.Traced) -> bool:
    dynamic = split.dynamic(workload.args, workload.kwargs)
    if jax.tree.structure(dynamic) != traced.in_tree:
        return False
    avals = jax.tree.leaves(traced.in_avals)
    leaves = jax.tree.leaves(dynamic)
    return all(map(_is_array_like, leaves)) and all(
        tuple(aval.shape) == leaf_shape(leaf) for aval, leaf in zip(avals, leaves, strict=True)
    )


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of an array, a reference, a struct or a number."""
    return tuple(getattr(leaf, "shape", ()))


def _stated_or_seen(workload: Workload) -> Split:
    seen = {position for position, arg in enumerate(workload.args) if _is_static(arg)}
    stated = _positions(workload.static_argnums, len(workload.args), "static_argnums")
    names = tuple(name for name, value in workload.kwargs.items() if _is_static(value))
    return Split(positions=tuple(sorted({*stated, *seen})), names=names)


def _of_jit(function: Any, workload: Workload) -> Split | None:
    # Private in jax: without it the arguments themselves have to tell.
    info: Any = getattr(function, "_jit_info", None)
    if info is None:
        return None
    positions = {position for position in info.static_argnums if position < len(workload.args)}
    names = tuple(name for name in (info.static_argnames or ()) if name in workload.kwargs)
    return Split(positions=tuple(sorted(positions)), names=names)


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
