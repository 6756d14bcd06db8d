"""Arrays are called what the user calls them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.capture.flow.names import leaf_names, variables_like
from automesh.program.capture.hooks import Call
from automesh.program.lower.static_args import Split

W, X = jnp.ones((2, 3)), jnp.ones(4)


def call_of(function: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(jitted=None, args=args, kwargs=kwargs, run=lambda: None, function=function)


def step(state: Any, *batch: Any, rate: float = 0.1, config: str = "") -> None:
    """Takes what a step takes."""


class Trainer:
    def step(self, params: Any, x: Any) -> None:
        """A step that is a method."""


def test_leaves_are_called_by_parameters() -> None:
    call = call_of(step, {"w": [W, W]}, X, X, rate=0.2)
    assert leaf_names(call, Split()) == (
        *("state['w'][0]", "state['w'][1]", "batch[0]", "batch[1]", "rate"),
    )


def test_static_arguments_have_no_names() -> None:
    call = call_of(Trainer.step, Trainer(), W, X)
    assert leaf_names(call, Split(positions=(0,))) == ("params", "x")
    call = call_of(step, W, config="large")
    assert leaf_names(call, Split(names=("config",))) == ("state",)


def test_what_is_bound_already_is_left_out() -> None:
    assert leaf_names(call_of(functools.partial(step, rate=0.3), W, X), Split()) == (
        *("state", "batch[0]"),
    )


def test_leaves_of_a_wrapper_are_followed_to_the_users_trees() -> None:
    eqx = pytest.importorskip("equinox")
    seen: list[tuple[str, ...]] = []

    # As text, which is no code of the user's: the wrapper is between this file and it.
    handed_on = eval(
        "lambda *given: seen.append(leaf_names(call_of(given), Split(positions=(2,))))",
        {
            "seen": seen,
            "leaf_names": leaf_names,
            "Split": Split,
            "call_of": lambda given: call_of(step, *given),
        },
    )

    @eqx.filter_jit
    def make_step(model: Any, moments: Any, x: Any) -> None:
        """Has a model, its moments and a batch."""

    object.__setattr__(make_step, "_cached", handed_on)
    model = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    with pytest.raises(TypeError):
        make_step(model, [jnp.zeros(2)], X)
    (names,) = seen
    assert {"model.layers[0].weight", "model.layers[1].bias", "moments[0]", "x"} <= set(names)


def test_variables_with_the_same_arrays_are_found_beside_the_call() -> None:
    params = {"w": jnp.zeros((5, 7))}
    moments = [jnp.zeros((5, 7)), jnp.zeros(())]
    rows = [0.0] * 20_000
    found = dict(variables_like([((5, 7), "float32")]))
    assert set(found) >= {"params", "moments"}
    assert "rows" not in found
    assert len(params) + len(moments) + len(rows) == 20_003


HELD = {"w": jnp.ones((5, 7))}


class Own:
    def __init__(self) -> None:
        self.params = [jnp.ones((5, 7))]


def test_variables_of_the_module_and_of_objects_are_found() -> None:
    own = Own()
    assert HELD and own
    found = dict(variables_like([((5, 7), "float32")]))
    assert set(found) == {"HELD", "own.params"}


def test_what_is_compiled_ahead_leaves_the_names_of_its_parameters() -> None:
    seen: list[tuple[str, ...]] = []

    class Compiled(jax.stages.Compiled):
        def __init__(self) -> None: ...

    # As text, which is no code of the user's.
    exec(
        "def __call__(self, *args, **kwargs):\n"
        "    seen.append(leaf_names(call_of(step, *args), Split()))\n"
        "Compiled.__call__ = __call__",
        {
            "seen": seen,
            "leaf_names": leaf_names,
            "call_of": call_of,
            "step": step,
            "Split": Split,
            "Compiled": Compiled,
        },
    )
    Compiled()(W, X)
    assert seen == [("state", "batch[0]")]
