"""The arguments of a call, taken apart into arrays and what `jit` must know while it traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.partition.carriers import is_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A leaf that is no array, so that 1, 1.0 and True are three programs.

    Attributes:
      kind: its type.
      key: equal for equal values: the bits of a float, since 0.0 == -0.0 and NaN != NaN.
      value: any hashable object.
    """

    kind: type
    key: Any
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A tree without its arrays.

    Attributes:
      structure: of the whole tree, a PyTreeDef.
      leaves: the others, and None in place of every array.
    """

    structure: Any
    leaves: tuple[Static | None, ...]

    def joined(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays in their places, in order."""
        rest = iter(arrays)
        return self.structure.unflatten(
            next(rest) if leaf is None else leaf.value for leaf in self.leaves
        )


def take_apart(tree: Any) -> tuple[list[Any], Parts]:
    """The arrays of a tree, in order, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    rest = tuple(None if is_array(leaf) else _static(leaf) for leaf in leaves)
    return arrays, Parts(structure=structure, leaves=rest)


def check_hashable(tree: Any, parts: Parts) -> None:
    """Accepts what `jit` can use as a key.

    Raises:
      WrongType: a leaf of the tree is neither an array nor hashable.
    """
    try:
        hash(parts)
    except TypeError as error:
        raise WrongType(_unhashable(tree), hint=_STATIC_HINT) from error


_STATIC_HINT = "pass arrays, or hashable values such as numbers, strings and frozen dataclasses"


def donated_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], donate_args: Any, donate_kwargs: Any
) -> list[bool]:
    """For every leaf of `(args, kwargs)`, whether it is donated.

    Args:
      donate_args: one bool for all, or a sequence with, for each argument, a bool, a tree of bools
        that is a prefix of the argument, or a function leaf -> bool; arguments that it leaves out
        are kept.
      donate_kwargs: the same by name, in a dict.

    Raises:
      UsageError: there are more entries than arguments, or an entry does not fit its argument.
      WrongType: something else than a bool says whether a leaf is donated.
    """
    chosen = _for_each_argument(donate_args, len(args))
    named = _for_each_name(donate_kwargs, kwargs)
    flags: list[bool] = []
    for index, (wish, arg) in enumerate(zip(chosen, args, strict=True)):
        flags += _flags(wish, arg, f"donate_args[{index}]")
    # A dict is flattened in the order of its keys, sorted.
    for name in sorted(kwargs):
        flags += _flags(named.get(name, False), kwargs[name], f"donate_kwargs[{name!r}]")
    return flags


def _static(leaf: Any) -> Static:
    return Static(kind=type(leaf), key=_key(leaf), value=leaf)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return leaf.hex()
    return (leaf.real.hex(), leaf.imag.hex()) if isinstance(leaf, complex) else leaf


def _unhashable(tree: Any) -> str:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(leaf):
            try:
                hash(leaf)
            except TypeError:
                where = keystr(path[1:], simple=True, separator="/")
                return f"argument `{where}` is neither an array nor hashable, but {kind_of(leaf)}"
    return "the arguments have a tree whose static part is not hashable"


def _for_each_argument(wish: Any, count: int) -> list[Any]:
    if wish is None or isinstance(wish, bool):
        return [bool(wish)] * count
    if not isinstance(wish, tuple | list):
        raise WrongType(
            f"`donate_args` must be a bool or a tuple with an entry for each argument, got {wish!r}"
        )
    wishes: list[Any] = list(wish)
    if len(wishes) > count:
        raise UsageError(
            f"expected {count} donate_args, got {len(wishes)}",
            hint="give one entry for each positional argument",
        )
    return wishes + [False] * (count - len(wishes))


def _for_each_name(wish: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if wish is None or isinstance(wish, bool):
        return dict.fromkeys(kwargs, bool(wish))
    if not isinstance(wish, Mapping):
        raise WrongType(f"`donate_kwargs` must be a bool or a dict by argument name, got {wish!r}")
    named: Mapping[str, Any] = wish
    for name in named:
        if name not in kwargs:
            raise UsageError(
                f"`donate_kwargs` names `{name}`, which the call does not pass by name"
                f"{did_you_mean(name, kwargs)}",
                hint=f"it passes by name: {', '.join(kwargs) or 'nothing'}",
            )
    return named


def _flags(wish: Any, argument: Any, where: str) -> list[bool]:
    leaves = jax.tree.leaves(argument)
    if isinstance(wish, bool):
        return [wish] * len(leaves)
    try:
        spread: list[Any] = jax.tree.leaves(jax.tree.broadcast(wish, argument))
    except ValueError as error:
        raise UsageError(
            f"`{where}` does not fit its argument: {str(error).splitlines()[0]}",
            hint="give a bool, or a tree of bools with the structure of the argument",
        ) from error
    return [
        _flag(one(leaf) if callable(one) else one, where)
        for one, leaf in zip(spread, leaves, strict=True)
    ]


def _flag(wish: object, where: str) -> bool:
    # Comparisons of sizes may give NumPy's bools.
    if not isinstance(wish, bool | np.bool_):
        raise WrongType(
            f"`{where}` must say by bools what is donated, got {kind_of(wish)}: {wish!r}",
            hint="give a bool, a tree of bools, or a function leaf -> bool",
        )
    return bool(wish)
