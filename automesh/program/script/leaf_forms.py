"""Pytrees compared leaf by leaf: what each leaf is called, its shape, its type, its place (jax).

The treedefs of two calls of the same code are seldom equal: a node keeps functions and settings
beside its leaves (the optimizer and the `apply` of a Flax TrainState, the graph of an nnx module),
and each call makes these anew. Two processes never agree on them. Comparing treedefs may even fail,
where a node keeps an array. So trees are the same here if their leaves are called the same.
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
      name: the keys that lead to it, as one writes them: `.params['w']`.
      dtype: empty for what is no array and no number.
      is_ref: True for a mutable array reference.
      sharding: of an array or a description of one that states it; None otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_ref: bool
    sharding: Any

    def __str__(self) -> str:
        return f"{'Ref ' if self.is_ref else ''}{self.dtype}{list(self.shape)}"

    def has_type_of(self, other: LeafForm) -> bool:
        """Whether one can be given where the other is expected."""
        mine = (self.shape, self.dtype, self.is_ref)
        return mine == (other.shape, other.dtype, other.is_ref)

    def lies_like(self, other: LeafForm) -> bool:
        """Whether both are split in the same way, as far as both say how."""
        if self.sharding is None or other.sharding is None:
            return True
        return self.sharding.is_equivalent_to(other.sharding, len(self.shape))


def forms_of(tree: Any) -> tuple[LeafForm, ...]:
    """The leaves of a tree, in its order."""
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
    """Whether the leaves of two trees are called the same, in the same order."""
    return [form.name for form in one] == [form.name for form in other]


def same_types(one: Sequence[LeafForm], other: Sequence[LeafForm]) -> bool:
    """Whether, besides, all shapes and types are the same."""
    return same_names(one, other) and all(map(LeafForm.has_type_of, one, other))


def same_treedef(one: Any, other: Any) -> bool:
    """Whether two treedefs are equal; not so if they cannot be compared."""
    try:
        return bool(one == other)
    # What nodes keep beside their leaves decides: arrays there have no single truth value.
    except Exception:  # noqa: BLE001
        return False


def repacked(tree: Any, like: Any) -> Any:
    """The leaves of `tree` in the structure of `like`, whose leaves are called the same."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def difference(
    now: Sequence[LeafForm], before: Sequence[LeafForm], *, where: str = "", shardings: bool = True
) -> str:
    """The first leaf in which a tree differs from what it was, in words; empty if none does.

    Args:
      where: what the tree is called: `args[0]`.
      shardings: whether these must be the same, too.
    """
    if not same_names(now, before):
        return _of_names(now, before, where)
    for new, old in zip(now, before, strict=True):
        if not new.has_type_of(old):
            return f"`{where}{new.name}` is {new}, was {old}"
        if shardings and not new.lies_like(old):
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
