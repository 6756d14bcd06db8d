"""What a traced program tells: state that is passed on, gradients, loops that train."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from automesh.program.capture.flow.loops import described_turn, turn_of
from automesh.program.capture.flow.program import FunctionFacts, facts_of
from automesh.program.capture.hooks import settings_of
from automesh.program.capture.step_call import TracedCall

W, X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w) - x) ** 2)


def step(w: Any, x: Any) -> Any:
    value, g = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * g, value


def facts(function: Any, *args: Any) -> FunctionFacts:
    return facts_of(jax.jit(function).trace(*args).jaxpr, num_constants=0)


def test_an_output_that_is_an_argument_is_told_from_a_new_one() -> None:
    inner = jax.jit(lambda w, x: (w, x + 1))
    assert facts(lambda w, x: (x, *inner(w, x)), W, X).forwarded == (1, 0, None)
    assert facts(lambda w, x: (w + 0, x), W, X).forwarded[1] == 1


def test_a_gradient_is_seen_in_a_function_and_below_it() -> None:
    assert facts(step, W, X).has_gradient
    assert facts(lambda w, x: jax.jit(step)(w, x), W, X).has_gradient
    assert not facts(loss, W, X).has_gradient


def test_what_is_trained_is_made_of_its_own_gradient() -> None:
    def accumulate(w: Any, total: Any, x: Any) -> Any:
        return total + jax.grad(loss)(w, x)

    assert facts(step, W, X).trained_by[0] & 1
    # Of the weights' gradient, not of the sum's.
    assert facts(accumulate, W, W, X).trained_by == (0b101,)


def test_references_that_are_changed_are_written_and_trained() -> None:
    def in_place(ref: Any, other: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(ref[...], x)
        ref[...] = ref[...] - 0.1 * g
        return value + other[...].sum()

    seen = facts(in_place, jax.new_ref(W), jax.new_ref(W), X)
    assert seen.written == {0}
    assert seen.trained_references == {0}


def over(function: Any) -> Any:
    return lambda w, xs: jax.lax.scan(function, w, xs)


def summed(w: Any, xs: Any) -> Any:
    def micro(total: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, x)
        return total + g, value

    total, values = jax.lax.scan(micro, jnp.zeros_like(w), xs)
    return w - 0.1 * total, values


def in_layers(ws: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    def whole(ws: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, ws)[0].sum()

    return ws - jax.grad(whole)(ws)


XS, WS = jnp.ones((5, 4, 8)), jnp.ones((3, 8, 8))


@pytest.mark.parametrize(
    ("function", "args", "turns"),
    [
        (over(step), (W, XS), 5),
        (lambda w, xs: jax.jit(over(step))(w * 2, xs), (W, XS), 5),
        (lambda w, x: jax.lax.fori_loop(0, 7, lambda _, w: step(w, x)[0], w), (W, X), 7),
        (lambda w, x, n: jax.lax.fori_loop(0, n, lambda _, w: step(w, x)[0], w), (W, X, 7), 0),
        (summed, (W, XS), None),
        (in_layers, (WS, X), None),
        (step, (W, X), None),
    ],
)
def test_a_loop_that_trains_is_told_from_those_of_micro_batches_and_layers(
    function: Any, args: tuple[Any, ...], turns: int | None
) -> None:
    loop = facts(function, *args).loop
    assert (loop.turns if loop is not None else None) == turns


def test_a_turn_of_a_loop_does_what_its_first_turn_does() -> None:
    def run(w: Any, xs: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            number, w = carry
            w, value = step(w, x)
            return (number + 1, w), value

        return jax.lax.scan(turn, (0, w * 2), xs)

    traced = jax.jit(run).trace(W, XS)
    call = TracedCall(traced=traced, args=(W, XS), settings=settings_of(traced))
    loop = facts_of(traced.jaxpr, num_constants=0).loop
    assert loop is not None
    turn = turn_of(call, loop)
    assert turn.names == ("carry[0]", "carry[1]", "slice[0]")
    outputs = jax.jit(jax.extend.core.jaxpr_as_fun(turn.traced.jaxpr))(
        *turn.settings.constants, *turn.leaves
    )
    after, value = step(W * 2, XS[0])
    assert outputs[1] == pytest.approx(after)
    assert outputs[2] == pytest.approx(value)
    described, carried = described_turn(call, loop)
    assert carried == 2
    assert [leaf.shape for leaf in described.leaves] == [leaf.shape for leaf in turn.leaves]


def test_a_search_along_a_line_is_a_part_of_one_step() -> None:
    """Before, a turn of the search was the step, and the one call "the whole training"."""

    def along(w: Any, x: Any) -> Any:
        def closer(carry: Any) -> Any:
            rate, tried = carry
            return 0.5 * rate, tried - rate * jax.grad(loss)(tried, x)

        slope = jax.grad(loss)(w, x)
        _, found = jax.lax.while_loop(lambda carry: carry[0] > 1e-3, closer, (1.0, w - slope))
        return found

    assert facts(along, jnp.ones((4, 4)), jnp.ones((2, 4))).loop is None


def test_a_parameter_with_its_update_is_told_from_its_gradient() -> None:
    assert facts(step, jnp.ones((4, 4)), jnp.ones((2, 4))).updated_by[0] & 1
    gradient = facts(lambda w, x: jax.grad(loss)(w, x), jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert gradient.trained_by[0] & 1
    assert not gradient.updated_by[0] & 1
