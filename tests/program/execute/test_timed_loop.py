"""A step is done when what it writes is there, not when it was dispatched."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from automesh.errors import UsageError
from automesh.program.execute import timed_loop
from automesh.program.execute.timed_loop import wait
from automesh.worker.handlers import jobs
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import Worker, own_process, script

__all__ = ["own_process"]


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


@pytest.mark.slow
def test_a_kept_state_goes_on_and_another_visit_frees_it(own_process: Path) -> None:
    """The losses tell at which step a visit began."""
    worker = Worker(script(SCRIPTS / "key_bias.py"), own_process / "cache", ("dp", "tp"))
    whole = worker.visit("dp:1", loss_steps=4).losses
    assert len(set(whole)) == 4
    kept = jobs._MEMORY.kept
    first = worker.visit("dp:1", loss_steps=1, keep=True)
    beside = worker.visit("dp:2", loss_steps=1, keep=True)
    assert (first.losses, beside.losses[0]) == (whole[:1], pytest.approx(whole[0], rel=1e-5))
    second = worker.visit("dp:1", loss_steps=1, steps=1, samples=1, keep=True, warmup_s=5.0)
    # No state was made, and nothing warmed up.
    assert second.losses == whole[1:2] and second.setup_s < 1.0
    worker.visit("dp:2", loss_steps=1)
    assert worker.visit("dp:1", loss_steps=1).losses == whole[3:4]
    assert worker.visit("dp:1", loss_steps=1).losses == whole[:1]
    worker.visit("dp:2", loss_steps=1, keep=True)
    worker.visit("dp:1", loss_steps=1)  # A visit that keeps nothing needs the whole memory.
    assert kept._loops == {}
    worker.visit("dp:2", loss_steps=1, keep=True)
    worker.compile("dp:2")
    assert kept._loops == {}
