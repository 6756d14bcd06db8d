"""What the first step of a visit says of a step without a loss, and of the values it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.program.nouns import VisitAnswer
from automesh.tuner.measure.numerics import Reference, check
from tests.support.program_jobs import Worker, own_process, script

__all__ = ["own_process"]

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def build(mesh, *, returns="state", seeded=True, wrong=False):
    luck = np.random.default_rng(0 if seeded else None)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    w = put(luck.normal(size=(16, 32)).astype("float32"), None, "tp")
    x = put(luck.normal(size=(64, 16)).astype("float32"), "dp")
    ids = put(np.arange(64) if seeded else luck.integers(0, 9, 64), "dp")

    def losses(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2, axis=1) * (2.0 if wrong else 1.0)

    @jax.jit
    def step(w, x, ids, key):
        new = w - 0.1 * jax.grad(lambda w: jnp.mean(losses(w, x)))(w)
        if returns == "state":
            return new
        if returns == "nothing":
            return {"prediction": jnp.argmax(x @ w, axis=1)}
        return new, {"each": losses(w, x)}

    return step, (w, x, ids, jax.random.key(0 if seeded else int(luck.integers(1000))))
"""


@pytest.fixture
def worker(own_process: Path, tmp_path: Path) -> Worker:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return Worker(script(path), own_process / "cache", ("dp", "tp"))


def _judged(worker: Worker, mesh: str, first: VisitAnswer, **knobs: object) -> tuple[str, str]:
    settings = tuple(knobs.items())
    reference = Reference.of("one device", worker.plan("dp:1"), first)
    return check(reference, worker.plan(mesh, settings), worker.visit(mesh, settings))


def test_without_a_loss_the_first_updates_are_compared(worker: Worker) -> None:
    first = worker.visit("dp:1")
    assert first.losses == () and first.vectors == ()
    assert _judged(worker, "dp:2,tp:2", first) == ("agree", "")
    verdict, why = _judged(worker, "dp:2,tp:2", first, wrong=True)
    assert verdict == "differ" and "the first update of `[0]` differs" in why


@pytest.mark.slow
def test_losses_of_single_examples_compare_as_one(worker: Worker) -> None:
    first = worker.visit("dp:1", (("returns", "vector"),))
    (vector,) = first.vectors
    assert (vector.path, vector.size, len(vector.values)) == ("[1]['each']", 64, 64)
    assert first.losses[0] == pytest.approx(sum(vector.values) / 64)
    assert len(first.losses) == 3
    assert _judged(worker, "dp:4,tp:2", first, returns="vector") == ("agree", "")
    assert _judged(worker, "dp:4", first, returns="vector", wrong=True)[0] == "differ"


@pytest.mark.slow
def test_a_step_that_shows_nothing_is_told_to_return_its_loss(worker: Worker) -> None:
    first = worker.visit("dp:1", (("returns", "nothing"),))
    verdict, why = _judged(worker, "dp:2", first, returns="nothing")
    assert verdict == "unverified" and why.endswith("let it return its loss")


@pytest.mark.slow
def test_other_data_in_another_run_are_named_as_that(worker: Worker) -> None:
    first = worker.visit("dp:1")
    again = worker.visit("dp:4,tp:2")
    assert [one.path for one in first.arguments] == ["args[0]", "args[1]", "args[2]", "args[3]"]
    for here, there in zip(first.arguments, again.arguments, strict=True):
        assert here == there
    verdict, why = _judged(worker, "dp:2", first, seeded=False)
    assert verdict == "other_arguments"
    assert why.startswith("the arguments of the step differ between two runs of the script: ")
    assert "(`args[0]`, `args[1]` and 2 more)" in why
