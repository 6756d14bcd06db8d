"""At which call of a function its step is taken."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.capture.flow.finder import FoundStep, StepFinder
from automesh.program.capture.hooks import Call
from automesh.program.capture.run_script import ScriptStopped


def train(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a gradient descent."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    return w - 0.1 * gradient, loss


def test_a_script_that_was_let_go_on_is_stopped_at_a_usual_call() -> None:
    jitted: Any = jax.jit(train)
    asked = list[bool]()

    def may_stop(has_gradient: bool) -> bool:
        asked.append(has_gradient)
        return len(asked) > 2

    finder = StepFinder(wanted="", on_long_loop=lambda: None, may_stop=may_stop)
    w, calls = jnp.eye(32), 0
    with pytest.raises(ScriptStopped):
        for rows in (16, 16, 16, 16, 3, 16, 16):
            x = jnp.full((rows, 32), float(calls))
            given = (w, x)
            run = partial(jitted, *given)
            call = Call(jitted=jitted, args=given, kwargs={}, run=run, function=train, settings={})
            w, _ = finder.call(call)
            calls += 1
    assert asked == [True, True, True]
    assert calls == 5  # Not at the call with three rows.
    assert finder.found is not None
    assert finder.found.whole.args[1].shape == (16, 32)


def test_a_step_that_ends_early_keeps_its_values_on_the_host() -> None:
    jitted: Any = jax.jit(train, donate_argnums=0)
    finder = StepFinder(wanted="", on_long_loop=lambda: None)
    w, x = jnp.eye(32), np.zeros((16, 32), np.float32)
    before = np.array(w)
    for turn in range(2):
        x[...] = turn + 1.0  # As loaders do, which write each batch into the same array.
        before, given = np.array(w), (w, x)
        run = partial(jitted, *given)
        call = Call(jitted=jitted, args=given, kwargs={}, run=run, function=train, settings={})
        w, _ = finder.call(call)
    x[...] = np.nan
    found = finder.ended()
    assert isinstance(found, FoundStep)
    assert not isinstance(found.whole.args[0], jax.Array), "jax has deleted it"
    made = found.with_values()
    assert np.array_equal(made.args[0], before)
    assert np.array_equal(made.args[1], np.full((16, 32), 2.0))


def called(finder: StepFinder, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call of a jitted function returns, from one line for all functions."""
    jitted: Any = jax.jit(function, static_argnames=tuple(kwargs))
    run = partial(jitted, *args, **kwargs)
    settings = {"static_argnames": tuple(kwargs)}
    return finder.call(
        Call(jitted=jitted, args=args, kwargs=kwargs, run=run, function=function, settings=settings)
    )


def ends_with(calls: Iterator[Any]) -> int:
    """How many calls a script makes until it is stopped."""
    done = 0
    with pytest.raises(ScriptStopped):
        for _ in calls:
            done += 1
    return done


def test_batches_of_another_length_in_every_call_have_a_step() -> None:
    """Before, the training was run to its end: "without calling a jitted function twice with the
    same shapes"."""
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def script() -> Iterator[None]:
        w = jnp.eye(32)
        for rows in (40, 8, 31, 12, 25, 9, 30, 5, 33, 7, 6, 4, 3):
            w, _ = called(finder, train, w, np.ones((rows, 32), np.float32))
            yield

    assert ends_with(script()) < 10
    found = finder.found
    assert found is not None
    assert not found.step.doubt
    assert [(run.argument, run.output, run.count) for run in found.step.carried] == [(0, 0, 1)]
    assert found.whole.args[1].shape[0] >= 25, "not one of the shortest"
    (said,) = found.notices
    assert "programs in" in said
    assert "`x` is float32[40,32], float32[8,32], float32[31,32], ...; what is searched" in said


def test_batches_of_a_few_lengths_have_a_step() -> None:
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def script() -> Iterator[None]:
        w = jnp.eye(32)
        for turn in range(100):
            w, _ = called(finder, train, w, np.ones((8 * (1 + turn * 7 % 4), 32), np.float32))
            yield

    assert ends_with(script()) < 30
    assert finder.found is not None
    assert "ran 4 programs in" in finder.found.notices[0]


def test_a_step_with_its_number_as_a_static_argument_is_found_and_told() -> None:
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def slower(w: jax.Array, x: jax.Array, turn: int) -> jax.Array:
        return w - (0.1 / (1 + turn)) * jax.grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)

    def script() -> Iterator[None]:
        w = jnp.eye(32)
        for turn in range(100):
            w = called(finder, slower, w, np.ones((16, 32), np.float32), turn=turn)
            yield

    assert ends_with(script()) < 10
    assert finder.found is not None
    assert "its static argument `turn` differs; pass as an array" in finder.found.notices[0]


def test_a_critic_is_one_step_with_the_generator_that_is_trained_less_often() -> None:
    """Before, the critic alone was the step, and the generator was not even named."""
    finder = StepFinder(wanted="", on_long_loop=lambda: None, trains_often=lambda: True)

    def critic(d: jax.Array, g: jax.Array, x: jax.Array) -> jax.Array:
        return d - 0.1 * jax.grad(lambda d: jnp.mean(x @ d) - jnp.mean(x @ g @ d))(d)

    def generator(g: jax.Array, d: jax.Array, x: jax.Array) -> jax.Array:
        return g - 0.1 * jax.grad(lambda g: jnp.mean(x @ g @ d))(g)

    def script() -> Iterator[None]:
        d, g, x = jnp.eye(32), 2 * jnp.eye(32), np.ones((16, 32), np.float32)
        for _ in range(100):
            for _ in range(3):
                d = called(finder, critic, d, g, x)
                yield
            g = called(finder, generator, g, d, x)
            yield

    assert ends_with(script()) < 20
    assert finder.found is not None
    assert [part.name for part in finder.found.step.parts] == [*["critic"] * 3, "generator"]
    assert sum(run.count for run in finder.found.step.carried) == 2


def test_what_stays_the_same_for_long_is_no_reason_to_wait_for_ever() -> None:
    finder = StepFinder(wanted="", on_long_loop=lambda: None, trains_often=lambda: True)

    def student(w: jax.Array, teacher: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - x @ teacher) ** 2))(w)

    def script() -> Iterator[None]:
        w, teacher, x = jnp.eye(32), 2 * jnp.eye(32), np.ones((16, 32), np.float32)
        for _ in range(100):
            w = called(finder, student, w, teacher, x)
            yield

    assert 10 < ends_with(script()) < 20
    assert finder.found is not None
    assert finder.found.step.name == "student"


def test_parts_that_hold_the_same_arrays_at_first_are_taken_later() -> None:
    """Before, other runs took the first round, in which the target is the critic itself: "has 3
    arrays as arguments there, and 4 elsewhere", and the script was run again for each mesh."""
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def critic(d: jax.Array, target: jax.Array, a: jax.Array, x: jax.Array) -> jax.Array:
        return d - 0.1 * jax.grad(lambda d: jnp.mean((x @ d - x @ a @ target) ** 2))(d)

    def actor(a: jax.Array, d: jax.Array, x: jax.Array) -> jax.Array:
        return a - 0.1 * jax.grad(lambda a: jnp.mean(x @ a @ d))(a)

    def script() -> Iterator[None]:
        d, a, x = jnp.eye(32), 2 * jnp.eye(32), np.ones((16, 32), np.float32)
        target = d
        while True:
            d = called(finder, critic, d, target, a, x)
            a = called(finder, actor, a, d, x)
            target = 0.9 * target + 0.1 * d
            yield

    ends_with(script())
    assert finder.found is not None
    assert [part.skipped for part in finder.found.step.parts] == [1, 1]


def test_data_with_the_shape_of_a_layer_is_no_parameter() -> None:
    """A step that is timed: it gets the same arrays at each call, and nothing comes back."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = [NamedSharding(mesh, P(*spec)) for spec in ((("data",),), ("tensor",))]
    x = jax.device_put(jnp.ones((32, 32)), put[0])
    layers = tuple(jax.device_put(jnp.full((32, 32), 0.1 * turn), put[1]) for turn in range(3))

    def training_step(x: jax.Array, layers: Any) -> Any:
        def loss(layers: Any) -> jax.Array:
            return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), layers, x))

        slopes = jax.grad(loss)(layers)
        return jax.tree.map(lambda w, slope: w - 0.1 * slope, layers, slopes)

    jitted: Any = jax.jit(training_step)
    finder = StepFinder(wanted="", on_long_loop=lambda: None)
    given = (x, layers)
    for _ in range(5):
        finder.call(
            Call(
                jitted=jitted,
                args=given,
                kwargs={},
                run=partial(jitted, *given),
                function=training_step,
                settings={},
            )
        )
    found = finder.ended()
    assert isinstance(found, FoundStep)
    assert found.batch_axes == ("data",)


def test_axes_that_share_a_dimension_of_a_hidden_layer_with_the_batch_split_rows() -> None:
    """The batch itself lies on one of them: the other one comes in where the layers are split."""
    names = ("dp", "fsdp", "tp")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def at(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def training_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            hidden = jax.lax.with_sharding_constraint(x @ w, at(("dp", "fsdp"), "tp"))
            return jnp.mean(jnp.tanh(hidden) ** 2)

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    jitted: Any = jax.jit(training_step)
    finder = StepFinder(wanted="", on_long_loop=lambda: None)
    w = jax.device_put(jnp.ones((32, 32)), at("fsdp", "tp"))

    def script() -> Iterator[None]:
        nonlocal w
        while True:
            x = jax.device_put(jnp.ones((16, 32)), at("dp"))
            given = (w, x)
            w, _ = finder.call(
                Call(
                    jitted=jitted,
                    args=given,
                    kwargs={},
                    run=partial(jitted, *given),
                    function=training_step,
                    settings={},
                )
            )
            yield

    ends_with(script())
    assert finder.found is not None
    assert finder.found.batch_axes == ("dp", "fsdp")


def test_models_that_are_trained_in_turn_come_back_later() -> None:
    """Before, the third call was the step, with no state, and "only loss and gradients are
    jitted"."""
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def script() -> Iterator[None]:
        models, x = [float(k) * jnp.eye(32) for k in range(1, 5)], np.ones((16, 32), np.float32)
        while True:
            for place, w in enumerate(models):
                models[place], _ = called(finder, train, w, x)
                yield

    assert ends_with(script()) == 4
    assert finder.found is not None
    assert sum(run.count for run in finder.found.step.carried) == 1
    assert not finder.found.step.about_outside()


def test_gradients_that_a_jitted_function_clips_are_no_batch() -> None:
    """Before, they were data, which axes of the model split, and nothing was said of their sum."""
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def slopes(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)

    def clip(g: jax.Array) -> jax.Array:
        return jnp.clip(g, -1, 1)

    def update(w: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + g
        return w - 0.1 * m, m

    def script() -> Iterator[None]:
        w, m, x = jnp.eye(32), jnp.zeros((32, 32)), np.ones((16, 32), np.float32)
        while True:
            total = sum(called(finder, slopes, w, x) for _ in range(2))
            w, m = called(finder, update, w, m, called(finder, clip, total / 2))
            yield

    ends_with(script())
    assert finder.found is not None
    assert [part.name for part in finder.found.step.parts] == ["slopes", "update"]
    assert "`g` is changed outside of jit between" in finder.found.step.about_outside()


def with_switch(w: jax.Array, d: jax.Array, x: jax.Array, *, both: bool) -> tuple[jax.Array, ...]:
    """A step that trains the second parameters only if a static argument says so."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    if both:
        d = d - 0.1 * jax.grad(lambda d: jnp.mean((x @ w @ d) ** 2))(d)
    return w - 0.1 * gradient, d, loss


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ((False,) * 5, "with `both=False` alone up to here, and gives `d` back unchanged: if"),
        ((False, True) * 5, "with `both=True`, too: what is searched has `both=False`"),
        ((True,) * 5, ""),
    ],
)
def test_a_switch_that_decides_what_is_trained_is_told(calls: tuple[bool, ...], said: str) -> None:
    finder = StepFinder(wanted="", on_long_loop=lambda: None)

    def script() -> Iterator[None]:
        w, d = jnp.eye(32), jnp.eye(32)
        for both in calls:
            w, d, _ = called(finder, with_switch, w, d, jnp.ones((16, 32)), both=both)
            yield

    ends_with(script())
    assert finder.found is not None
    notices = finder.found.notices
    assert len(notices) == (1 if said else 0)
    assert not said or said in notices[0]
