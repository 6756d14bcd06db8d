"""A step is done when what it writes is there, not when it was dispatched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

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
