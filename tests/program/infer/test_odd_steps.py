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


def loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


PARAMS = {"down": jnp.ones((64, 8)), "up": jnp.ones((WIDTH, 64))}


def test_what_a_gradient_is_returned_of_is_a_parameter_though_it_changes_outside() -> None:
    found = classes(jax.value_and_grad(loss), PARAMS, jnp.ones((32, WIDTH)), carried={})
    assert [one.role for one in found.arguments] == [Role.PARAMETER, Role.PARAMETER, Role.DATA]
    # Not the outputs of the last layer, too, over which the loss is a mean.
    assert [one.size for one in found.batches] == [32]
    assert any(found.batches[0].name in one.dims for one in found.activations)


def test_rows_that_are_taken_part_by_part_are_split_inside_of_each_part() -> None:
    def step(p: Any, x: Any) -> Any:
        def turn(total: Any, part: Any) -> Any:
            value, slope = jax.value_and_grad(loss)(p, part)
            return jax.tree.map(jnp.add, total, slope), value

        slope, values = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, p), x.reshape(4, 24, WIDTH))
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, slope), values.mean()

    found = classes(step, PARAMS, jnp.ones((96, WIDTH)), carried={0: 0, 1: 1})
    assert [(one.size, one.parts) for one in found.batches] == [(24, 24)]
    layout = lay_out(found, num_devices=8, script="train.py")
    assert found.batches[0].name in [one.name for one in layout.logical]
    assert layout.arguments[-1].split == ((), ())  # 96 rows: 8 devices have 3 of each part.
    assert any(found.batches[0].name in part for one in layout.inner for part in one.split)


def test_a_sequence_that_is_summed_like_a_batch_is_searched_once() -> None:
    found = classes(
        lambda p, x: jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, x)),
        PARAMS,
        jnp.ones((16, 32, WIDTH)),
        carried={0: 0, 1: 1},
    )
    names = [one.name for one in lay_out(found, num_devices=8, script="train.py").logical]
    assert len(names) == len(set(names))


def test_what_is_taken_at_the_same_drawn_places_has_the_same_rows() -> None:
    def step(p: Any, codes: Any, seen: Any, done: Any, key: Any) -> Any:
        places = jax.random.randint(key, (DRAWN,), 0, ROWS)

        def error(p: Any, codes: Any) -> Any:
            return jnp.mean((seen[places] @ p + codes[places]) ** 2 * done[places][:, None])

        value, (slope, change) = jax.value_and_grad(error, argnums=(0, 1))(p, codes)
        return p - slope, codes - change, value

    rows = jnp.ones((ROWS, WIDTH))
    found = classes(
        step,
        jnp.ones((WIDTH, 8)),
        jnp.ones((ROWS, 8)),
        rows,
        jnp.ones(ROWS),
        jax.random.key(0),
        carried={0: 0, 1: 1},
    )
    _, codes, seen, done, _ = found.arguments
    assert seen.dims[0] == done.dims[0]
    assert codes.dims[0] != seen.dims[0]  # Parameters of each row are no data set.
    (caution,) = [one for one in found.cautions if "takes its rows" in one.text]
    assert f"from {seen.dims[0]} (4,096): " in caution.text
    assert [one.size for one in found.batches] == [DRAWN]


def test_a_small_table_that_is_looked_up_in_needs_no_caution() -> None:
    levels = jnp.linspace(0, 1, 1000)

    def step(p: Any, x: Any, key: Any) -> Any:
        level = levels[jax.random.randint(key, (64,), 0, 1000)]
        return p - jax.grad(lambda p: jnp.mean((x * level[:, None] @ p) ** 2))(p)

    found = classes(
        step, jnp.ones((WIDTH, 8)), jnp.ones((64, WIDTH)), jax.random.key(0), carried={0: 0}
    )
    assert not [one for one in found.cautions if "takes its rows" in one.text]


def test_slices_of_an_argument_are_batches() -> None:
    def step(p: Any, x: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, p)
        for part in range(4):
            slope = jax.grad(loss)(p, x[part * 24 : (part + 1) * 24])
            total = jax.tree.map(jnp.add, total, slope)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, total)

    found = classes(step, PARAMS, jnp.ones((96, WIDTH)), carried={0: 0, 1: 1})
    (batch,) = found.batches
    assert (batch.size, batch.parts) == (24, 24)
    # Each of the four is split where it is taken; 8 devices have 3 rows of each.
    taken = [one for one in found.inner if one.dims == (batch.name, "")]
    assert [one.shape for one in taken] == [(24, WIDTH)] * 4
    layout = lay_out(found, num_devices=8, script="train.py")
    assert layout.arguments[-1].split == ((), ())
    (caution,) = [one for one in found.cautions if one.about == batch.name and "slices" in one.text]
    assert caution.text.startswith("the step takes 4 slices of 24 from the 96 rows of its data")


def test_what_a_loop_walks_over_is_divided_by_no_dimension_of_one() -> None:
    """Labels of each time get a dimension to be looked up with, which divides nothing."""

    def step(p: Any, x: Any, labels: Any) -> Any:
        def error(p: Any) -> Any:
            def turn(hidden: Any, x: Any) -> Any:
                after = jnp.tanh(hidden + x @ p)
                return after, after

            _, hidden = jax.lax.scan(turn, jnp.zeros((32, 8)), x)
            return jnp.mean(jnp.take_along_axis(hidden, labels[..., None], -1))

        return p - jax.grad(error)(p)

    found = classes(
        step,
        jnp.ones((WIDTH, 8)),
        jnp.ones((16, 32, WIDTH)),
        jnp.zeros((16, 32), jnp.int32),
        carried={0: 0},
    )
    assert not [one for one in found.inner if "micro-batches" in one.why]


def test_a_carried_state_with_a_row_for_each_of_the_batch_is_split_like_the_batch() -> None:
    def step(p: Any, hidden: Any, x: Any) -> Any:
        def error(p: Any) -> Any:
            after = jnp.tanh(x @ p + hidden)
            return jnp.mean(after**2), after

        slope, after = jax.grad(error, has_aux=True)(p)
        return p - slope, after

    found = classes(
        step,
        jnp.ones((64, 128)),
        jnp.ones((32, 128)),
        jnp.ones((32, 64)),
        carried={0: 0, 1: 1},
    )
    assert found.arguments[1].role == Role.STATISTIC
    layout = lay_out(found, num_devices=8, script="train.py")
    batch = found.batches[0].name
    assert layout.arguments[1].split == ((batch,), ())
    assert "moments" not in [one.name for one in layout.logical]


def test_a_matrix_of_neighbours_is_split_in_its_rows() -> None:
    def step(p: Any, neighbours: Any, x: Any) -> Any:
        def error(p: Any) -> Any:
            return jnp.mean((neighbours @ jnp.tanh(neighbours @ (x @ p))) ** 2)

        return p - jax.grad(error)(p)

    found = classes(
        step,
        jnp.ones((WIDTH, 8)),
        jnp.ones((256, 256)),
        jnp.ones((256, WIDTH)),
        carried={0: 0},
    )
    own = found.arguments[1].dims
    assert own[0] == own[1] != ""
    layout = lay_out(found, num_devices=8, script="train.py")
    assert layout.arguments[1].split == ((own[0],), ())


def test_a_batch_that_is_drawn_with_a_key_or_carried_is_found() -> None:
    """A key is an argument, but no data."""

    def draws(p: Any, key: Any) -> Any:
        points = jax.random.uniform(key, (512, WIDTH))
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, points))

    found = classes(draws, PARAMS, jax.random.key(0), carried={0: 0, 1: 1})
    assert [one.size for one in found.batches] == [512]

    def acts(p: Any, places: Any, key: Any) -> Any:
        def turn(places: Any, key: Any) -> Any:
            moved = places + jnp.tanh(places @ p) + jax.random.normal(key, places.shape)
            return moved, moved

        places, seen = jax.lax.scan(turn, places, jax.random.split(key, 12))
        return p - jax.grad(lambda p: jnp.mean((seen @ p) ** 2))(p), places

    found = classes(
        acts,
        jnp.ones((WIDTH, WIDTH)),
        jnp.ones((64, WIDTH)),
        jax.random.key(0),
        carried={0: 0, 1: 1},
    )
    assert [one.size for one in found.batches] == [64]
    assert found.arguments[1].dims[0] == found.batches[0].name


def test_two_views_of_a_batch_are_one() -> None:
    def step(p: Any, x: Any, key: Any) -> Any:
        def error(p: Any) -> Any:
            views = jnp.concatenate([x, x + jax.random.normal(key, x.shape)])
            z = jnp.tanh(views @ p["up"]) @ p["down"]
            return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(error)(p))

    found = classes(step, PARAMS, jnp.ones((32, WIDTH)), jax.random.key(0), carried={0: 0, 1: 1})
    assert {one.size for one in found.batches} == {32, 64}
    assert lay_out(found, num_devices=8, script="train.py").arguments[-2].split[0]


def test_some_outputs_of_a_layer_are_no_batch() -> None:
    """Colours, which errors are summed over, are three of four outputs."""

    def step(p: Any, x: Any, colours: Any) -> Any:
        def error(p: Any) -> Any:
            out = jnp.tanh(x @ p["up"]) @ p["down"]
            return jnp.mean((out[:, :3] * out[:, 3:4] - colours) ** 2)

        return jax.tree.map(lambda p, g: p - g, p, jax.grad(error)(p))

    params = {**PARAMS, "down": jnp.ones((64, 4))}
    found = classes(step, params, jnp.ones((32, WIDTH)), jnp.ones((32, 3)), carried={0: 0, 1: 1})
    assert [one.size for one in found.batches] == [32]


def test_steps_of_several_epochs_are_all_counted() -> None:
    def step(p: Any, x: Any) -> Any:
        def learn(p: Any, part: Any) -> Any:
            return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, part)), None

        def epoch(p: Any, _: Any) -> Any:
            return jax.lax.scan(learn, p, x.reshape(8, 16, WIDTH))[0], None

        return jax.lax.scan(epoch, p, None, 4)[0]

    found = classes(step, PARAMS, jnp.ones((128, WIDTH)), carried={0: 0, 1: 1})
    assert found.steps_per_call == 32
    assert "one call is 32 steps of training" in [one.text for one in found.cautions]
