"""One turn of a loop that is the whole training starts from what the loop reads, as it is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.capture.flow.loops import described_turn, turn_of
from automesh.program.capture.flow.program import facts_of
from automesh.program.capture.hooks import Call
from automesh.program.capture.step_call import TracedCall, trace
from automesh.program.spec_entries import entries_of


def traced(train: Any, *args: Any) -> tuple[TracedCall, Any]:
    jitted = jax.jit(train)
    call = trace(Call(jitted=jitted, args=args, kwargs={}, run=lambda: None, function=train))
    facts = facts_of(call.traced.jaxpr, num_constants=len(call.settings.constants))
    assert facts.loop is not None
    return call, facts.loop


@pytest.mark.parametrize("is_nested", (False, True))
@pytest.mark.parametrize("is_described", (False, True))
def test_an_array_that_the_loop_reads_keeps_its_split(is_nested: bool, is_described: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.full((8, 8), 0.1), NamedSharding(mesh, P(None, "model")))

    def train(w: Any) -> Any:
        def update(w: Any, _: None) -> Any:
            loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
            return w - 0.1 * slope, loss

        def loop(w: Any) -> Any:
            return jax.lax.scan(update, w, None, length=100)

        return jax.jit(loop)(w) if is_nested else loop(w)

    call, loop = traced(train, w)
    if is_described:
        turn, _ = described_turn(call, loop)
    else:
        turn = turn_of(call, loop)
    (held,) = (leaf for leaf in turn.leaves if leaf.shape == (16, 8))
    assert entries_of(held.sharding.spec)[:1] == ("data",)
