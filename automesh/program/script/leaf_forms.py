"""Compares pytrees leaf by leaf: names, shapes, types and shardings (jax).

The treedefs of two calls of the same code are rarely equal: a node keeps functions and settings
besides its leaves (the optimizer and the `apply` of a Flax TrainState, the graph of an nnx module),
and each call makes new ones. In two processes they are never equal, and if a node keeps an array, a
comparison of treedefs may even fail. So trees count as equal here if their leaves have equal names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from automesh.program.lower.static_args import is_ref, leaf_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafForm:
    """One leaf of a tree, without its values.

    Attributes:
      name: its path as a Python expression: `.params['w']`.
      dtype: its type; empty if it is no array and no number.
      is_ref: True for a mutable array reference.
      sharding: its stated sharding; None if there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_ref: bool
    sharding: Any

    def __str__(self) -> str:
        return f"{'Ref ' if self.is_ref else ''}{self.dtype}{list(self.shape)}"

    def has_type_of(self, other: LeafForm) -> bool:
        """Whether one can be passed if the other is expected."""
        mine = (self.shape, self.dtype, self.is_ref)
        return mine == (other.shape, other.dtype, other.is_ref)

    def is_split_like(self, other: LeafForm) -> bool:
        """Whether both are split in the same way, as far as both state it."""
        if self.sharding is None or other.sharding is None:
            return True
        return self.sharding.is_equivalent_to(other.sharding, len(self.shape))


def forms_of(tree: Any) -> tuple[LeafForm, ...]:
    """Returns the leaves of a tree, in its order."""
    return tuple(
        LeafForm(
            name=jax.tree_util.keystr(path),
            shape=leaf_shape(leaf),
            dtype=_dtype(leaf),
            is_ref=is_ref(leaf),
            sharding=getattr(leaf, "sharding", None),
        )
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    )


def _dtype(leaf: Any) -> str:
    if hasattr(leaf, "dtype"):
        return str(leaf.dtype)
    if isinstance(leaf, (bool, int, float, complex)):
        return str(jax.dtypes.result_type(leaf))
    return ""


def same_names(one: Sequence[LeafForm], other: Sequence[LeafForm]) -> bool:
    """Whether the leaves of two trees have the same names, in the same order."""
    return [form.name for form in one] == [form.name for form in other]


def same_types(one: Sequence[LeafForm], other: Sequence[LeafForm]) -> bool:
    """Whether the leaves of two trees have the same names, shapes and types."""
    return same_names(one, other) and all(map(LeafForm.has_type_of, one, other))


def same_treedef(one: Any, other: Any) -> bool:
    """Whether two treedefs are equal; False if they cannot be compared."""
    try:
        return bool(one == other)
    # Data of nodes are compared, too, and a comparison of arrays has no single truth value.
    except Exception:  # noqa: BLE001
        return False


def repacked(tree: Any, like: Any) -> Any:
    """Returns the leaves of `tree` in the structure of `like`, whose leaves have the same names."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def difference(
    now: Sequence[LeafForm], before: Sequence[LeafForm], *, where: str = "", shardings: bool = True
) -> str:
    """Returns the first leaf that differs from an earlier tree, in words; empty if none does.

    Args:
      where: name of the tree: `args[0]`.
      shardings: whether shardings must be equal as well.
    """
    if not same_names(now, before):
        return _of_names(now, before, where)
    for new, old in zip(now, before, strict=True):
        if not new.has_type_of(old):
            return f"`{where}{new.name}` is {new}, was {old}"
        if shardings and not new.is_split_like(old):
            return f"`{where}{new.name}` is split as {new.sharding}, was as {old.sharding}"
    return ""


def _of_names(now: Sequence[LeafForm], before: Sequence[LeafForm], where: str) -> str:
    names = [[form.name for form in forms] for forms in (now, before)]
    for forms, others, word in ((now, names[1], "new"), (before, names[0], "missing")):
        for form in forms:
            if form.name not in others:
                return f"`{where}{form.name}` ({form}) is {word}"
    first = next(new for new, old in zip(*names) if new != old)
    return f"the leaves of `{where or 'the arguments'}` come in another order, first `{first}`"
