"""Gradients that a loop adds up in its turns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind
from tests.support.infer_models import Model, descended, f32


def said(uses: int, *, is_checkpointed: bool = False, is_carried: bool = True) -> list[str]:
    """What is said of a loop that uses its weights several times in each of 8 turns."""

    def loss(p: Any, x: Any) -> Any:
        def turn(h: Any, _: Any) -> Any:
            for _ in range(uses):
                h = h + jnp.tanh(h @ p["w"])
            return h, None

        if not is_carried:
            return jnp.mean(turn(x, None)[0] ** 2)
        inside = jax.checkpoint(turn) if is_checkpointed else turn
        return jnp.mean(jax.lax.scan(inside, x, None, length=8)[0] ** 2)

    def step(p: Any, x: Any) -> Any:
        return descended(loss, p, x)

    model = Model(step=step, args=({"w": f32(96, 96)}, f32(64, 96)), names=("p", "x"), num_state=1)
    cautions = model.classes().cautions
    return [one.text for one in cautions if one.kind is CautionKind.GRADIENT_IN_LOOP]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("uses", [1, 2, 4])
def test_weights_that_a_turn_uses_several_times_have_one_gradient_in_it(
    uses: int, is_checkpointed: bool
) -> None:
    """As in a method of Runge and Kutta. Before, that was told of a single use alone."""
    (text,) = said(uses, is_checkpointed=is_checkpointed)
    assert f"gradients of {96 * 96:,} numbers" in text
    assert "each of 8 turns" in text


def test_uses_outside_of_a_loop_are_not_told() -> None:
    assert not said(4, is_carried=False)
