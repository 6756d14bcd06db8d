"""A step is done when what it writes is there, not when it was dispatched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from automesh.errors import UsageError
from automesh.program.execute import timed_loop
from automesh.program.execute.timed_loop import wait


@jax.jit
def write(reference):
    x = reference[...]
    for _ in range(10):
        x = x @ x / x.shape[0]
    reference[...] = x


@pytest.mark.parametrize("hidden", [False, True])
def test_references_are_waited_for(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = jax.new_ref(jnp.ones((1000, 1000)))
    write(reference)
    read = reference._refs._buf
    if hidden:
        # As on a jax that keeps the array elsewhere: what is read comes after what was written.
        class Other:
            is_ref = True

            def __getitem__(self, index: object) -> jax.Array:
                return reference[index]

        wait(None, [Other()])
    else:
        wait(None, {"state": reference, "number": 3})
    assert read.is_ready()
    assert reference._refs._buf.is_ready()


def test_outputs_are_waited_for() -> None:
    x = jax.jit(lambda x: x @ x @ x)(jnp.ones((1000, 1000)))
    wait((x, 1.0), [])
    assert x.is_ready()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_no_clock_gives_is_no_sample(seconds: float) -> None:
    with pytest.raises(UsageError, match="the clock says that a step took"):
        timed_loop._plausible(seconds)
    assert timed_loop._plausible(1e-6) == 1e-6
