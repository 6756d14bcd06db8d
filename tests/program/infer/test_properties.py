"""What holds of the classes of any step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.program.infer.nouns import Role, StepClasses
from tests.support import infer_models
from tests.support.infer_models import Model

Partition = set[frozenset[tuple[str, int]]]


def partition(
    classes: StepClasses, names: Sequence[str], order: dict[str, tuple[int, ...]] | None = None
) -> Partition:
    """Which dimensions of which arguments are together.

    Args:
      names: of the arguments.
      order: by argument, which of its own dimensions each is.
    """
    found: dict[str, set[tuple[str, int]]] = {}
    for called, one in zip(names, classes.arguments, strict=True):
        for place, name in enumerate(one.dims):
            if name:
                own = order[called][place] if order else place
                found.setdefault(name, set()).add((called, own))
    return {frozenset(members) for members in found.values()}


def turned(model: Model, seed: int) -> tuple[Model, dict[str, tuple[int, ...]]]:
    """The step with its arguments in another order, each with its axes in another order."""
    chance = random.Random(seed)
    leaves, tree = jax.tree.flatten(model.args)
    names = model.leaf_names
    axes = [tuple(chance.sample(range(leaf.ndim), leaf.ndim)) for leaf in leaves]
    order = chance.sample(range(len(leaves)), len(leaves))
    state = set(model.carried)

    def step(*given: Any) -> tuple[Any, ...]:
        back: list[Any] = [None] * len(leaves)
        for place, leaf in zip(order, given, strict=True):
            back[place] = jnp.transpose(leaf, np.argsort(axes[place]))
        made = jax.tree.leaves(model.step(*tree.unflatten(back)))
        first = [jnp.transpose(made[place], axes[place]) for place in order if place in state]
        return (*first, *made[len(state) :])

    def described(place: int) -> Any:
        leaf = leaves[place]
        return jax.ShapeDtypeStruct(tuple(leaf.shape[k] for k in axes[place]), leaf.dtype)

    other = replace(
        model,
        step=step,
        args=tuple(map(described, order)),
        names=tuple(names[place] for place in order),
        num_state=0,
    )
    return other, {names[place]: axes[place] for place in range(len(leaves))}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("transformer", 1),
        ("scanned_layers", 2),
        ("experts", 3),
        ("unet", 4),
        ("recurrent", 5),
        ("graph", 6),
        ("recommender", 7),
        ("two_optimizers", 8),
    ],
)
def test_the_order_of_arguments_and_axes_is_nothing_to_classes(name: str, seed: int) -> None:
    model: Model = getattr(infer_models, name)()
    # Without names: layers are found to be alike by these, and by the order of axes.
    before = model.classes(with_names=False)
    other, axes = turned(model, seed)
    count = 0
    carried: dict[int, int] = {}
    state = {model.leaf_names[place] for place in model.carried}
    for place, called in enumerate(other.names):
        if called in state:
            carried[place] = count
            count += 1
    traced = jax.jit(other.step).trace(*other.args)
    after = infer_models.classes_of(traced.jaxpr, carried=carried)
    assert partition(after, other.names, axes) == partition(before, model.leaf_names)
    assert dict(zip(other.names, (one.role for one in after.arguments), strict=True)) == dict(
        zip(model.leaf_names, (one.role for one in before.arguments), strict=True)
    )
    assert {(c.size, c.parts, c.is_batch) for c in before.classes} == {
        (c.size, c.parts, c.is_batch) for c in after.classes
    }


def values(model: Model, classes: StepClasses) -> list[Any]:
    chance = np.random.default_rng(0)

    def value(leaf: Any, role: Role) -> Any:
        if role == Role.KEY:
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.asarray(chance.integers(0, 4, leaf.shape), leaf.dtype)
        made = 0.1 * chance.standard_normal(leaf.shape)
        return jnp.asarray(abs(made) if role == Role.MOMENT else made, leaf.dtype)

    leaves = jax.tree.leaves(model.args)
    return [value(leaf, one.role) for leaf, one in zip(leaves, classes.arguments, strict=True)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("transformer", (2, 2)),
        ("recurrent", (4, 1)),
        ("two_optimizers", (2, 2)),
        pytest.param("scanned_layers", (2, 2), marks=pytest.mark.long),
        pytest.param("experts", (4, 1), marks=pytest.mark.long),
        pytest.param("unet", (2, 2), marks=pytest.mark.long),
        pytest.param("graph", (4, 1), marks=pytest.mark.long),
        pytest.param("encoder_decoder", (2, 2), marks=pytest.mark.long),
    ],
)
def test_any_legal_split_gives_the_same_numbers(name: str, sizes: tuple[int, int]) -> None:
    model: Model = getattr(infer_models, name)()
    classes = model.classes()
    tree = jax.tree.structure(model.args)
    given = values(model, classes)

    def step(*leaves: Any) -> Any:
        return model.step(*tree.unflatten(leaves))

    alone = jax.tree.leaves(jax.jit(step)(*given))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(sizes), ("a", "b"))
    chance = random.Random(name)
    over: dict[str, str] = {}
    for axis, size in mesh.shape.items():
        legal = [
            one.name
            for one in classes.classes
            if not one.whole and one.parts % size == 0 and one.name not in over
        ]
        over[chance.choice(legal)] = axis
    batch = classes.batches[0]
    if batch.name not in over and batch.parts % sizes[0] == 0:
        over = {batch.name: "a", **{one: axis for one, axis in over.items() if axis != "a"}}
    placed: list[Any] = []
    for leaf, one in zip(given, classes.arguments, strict=True):
        axes = [over.get(of) for of in one.dims]
        once = [axis if axis not in axes[:place] else None for place, axis in enumerate(axes)]
        placed.append(jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*once))))
    split = jax.tree.leaves(jax.jit(step)(*placed))
    for mine, yours in zip(alone, split, strict=True):
        np.testing.assert_allclose(mine, yours, rtol=2e-3, atol=2e-4)
