"""Compares the classes of a model's training step with the names of its authors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from automesh.program.infer.classes import classes_of

Names = Mapping[str, Sequence[str | None]]
BATCH, LENGTH, VOCAB = 8, 16, 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of others.

    Attributes:
      params: its parameters.
      names: by path, what the authors call the dimensions; None for one without a name.
      loss: of parameters and tokens.
      mesh: the mesh with Explicit axes for which it is written, if there is one.
    """

    params: Any
    names: Names
    loss: Callable[[Any, Any], Any]
    mesh: jax.sharding.Mesh | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is the same, and what is not.

    Attributes:
      arrays: how many have names.
      one_to_one: (name, class) where each of both is always beside the other.
      split: by name, the classes that it has, where these are several.
      merged: by class, the names that it has.
    """

    model: str
    arrays: int
    one_to_one: tuple[tuple[str, str], ...]
    split: Mapping[str, tuple[str, ...]]
    merged: Mapping[str, tuple[str, ...]]


def compare(name: str, model: Model) -> Comparison:
    """Traces a step of a model and compares its classes."""

    def step(params: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(model.loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    with nullcontext() if model.mesh is None else jax.set_mesh(model.mesh):
        traced = jax.jit(step).trace(model.params, tokens)
    found = classes_of(
        traced.jaxpr, carried={n: n for n in range(len(paths))}, names=[*paths, "tokens"]
    )
    classes_by: dict[str, set[str]] = defaultdict(set)
    names_by: dict[str, set[str]] = defaultdict(set)
    arrays = 0
    for array in found.arguments:
        names = model.names.get(array.name)
        # Names that are given before a kernel gets its last shape do not say which is which.
        if names is None or len(names) != len(array.dims):
            continue
        arrays += 1
        for theirs, ours, size in zip(names, array.dims, array.shape, strict=True):
            if theirs and size > 1:
                classes_by[theirs].add(ours)
                names_by[ours].add(theirs)
    pairs = [
        (theirs, *ours)
        for theirs, ours in classes_by.items()
        if len(ours) == 1 and len(names_by[next(iter(ours))]) == 1
    ]
    return Comparison(
        model=name,
        arrays=arrays,
        one_to_one=tuple((theirs, ours) for theirs, ours in pairs),
        split={one: tuple(sorted(many)) for one, many in classes_by.items() if len(many) > 1},
        merged={one: tuple(sorted(many)) for one, many in names_by.items() if len(many) > 1},
    )


def cross_entropy(logits: Any, tokens: Any) -> Any:
    """Returns the mean loss of scores, shape (batch, length, vocab), for these tokens."""
    chosen = jax.nn.one_hot(tokens, VOCAB, dtype=logits.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * chosen, -1))
