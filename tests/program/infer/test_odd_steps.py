"""Steps that are no plain training step: replay buffers, counts, arrays that the step holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.errors import UsageError
from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import Role, StepClasses
from automesh.program.infer.search.layout import lay_out

ROWS, DRAWN, WIDTH = 4096, 256, 16


def classes(step: Callable[..., Any], *args: Any, carried: Mapping[int, int]) -> StepClasses:
    closed = jax.make_jaxpr(step)(*args)
    names = [f"args{jax.tree_util.keystr(path)}" for path, _ in
             jax.tree_util.tree_leaves_with_path(args)]  # fmt: skip
    return classes_of(closed, carried=carried, names=names)


def act_and_learn(w: Any, buffer: Any, place: Any, seen: Any, key: Any) -> Any:
    """Writes rows into a replay buffer, and learns from others that it draws."""
    buffer = buffer.at[(place + jnp.arange(32)) % ROWS].set(seen)
    rows = buffer[jax.random.randint(key, (DRAWN,), 0, ROWS)]
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(rows @ w) ** 2))(w)
    return w - 0.1 * slope, buffer, place + 32, value


def test_rows_that_are_drawn_from_a_buffer_are_the_batch() -> None:
    found = classes(
        act_and_learn,
        jnp.ones((WIDTH, 8)),
        jnp.ones((ROWS, WIDTH)),
        jnp.int32(0),
        jnp.ones((32, WIDTH)),
        jax.random.key(0),
        carried={0: 0, 1: 1, 2: 2},
    )
    assert [one.size for one in found.batches] == [DRAWN]
    assert found.arguments[1].role == Role.STATISTIC
    assert found.named(found.arguments[1].dims[0]).whole.startswith("the step takes rows of it")
    (drawn,) = [one for one in found.inner if one.shape == (DRAWN, WIDTH)]
    assert drawn.dims[0] == found.batches[0].name
    layout = lay_out(found, num_devices=8, script="train.py")
    assert found.batches[0].name in [one.name for one in layout.logical]


def test_a_step_that_trains_nothing_says_so() -> None:
    found = classes(
        lambda counts, tokens: counts.at[tokens].add(1),
        jnp.zeros(1024, jnp.int32),
        jnp.zeros(256, jnp.int32),
        carried={0: 0},
    )
    with pytest.raises(UsageError, match="trains nothing: no array has a gradient"):
        lay_out(found, num_devices=8, script="train.py")


def test_a_step_that_holds_its_arrays_says_so() -> None:
    w, x = jnp.ones((WIDTH, 8)), jnp.ones((64, WIDTH))
    found = classes(lambda: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), carried={})
    with pytest.raises(UsageError, match="takes no arrays") as refused:
        lay_out(found, num_devices=8, script="train.py")
    assert "as arguments" in str(refused.value.hint)


def test_a_batch_that_the_step_holds_is_split_nowhere_and_so_fsdp_is_not_searched() -> None:
    x = jnp.ones((64, WIDTH))
    found = classes(
        jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)),
        {"up": jnp.ones((WIDTH, 256)), "down": jnp.ones((256, 1))},
        carried={},
    )
    assert [one.size for one in found.batches] == [64]
    assert lay_out(found, num_devices=8, script="train.py").axes == ("tp",)
