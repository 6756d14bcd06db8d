"""Steps that call Python: what one device does, all others wait for and get whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate


def _array(mesh: Any, *shape: int) -> Any:
    split = P("dp", *[None] * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, split))


def _terms(step: Any, platform: str = "cpu", *shapes: tuple[int, ...]) -> Any:
    def build(mesh: Any) -> Any:
        return jax.jit(step), tuple(_array(mesh, *shape) for shape in shapes or ((64, 256),))

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp",), platform=platform
    )
    return propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_what_python_works_on_is_gathered_and_its_answer_is_whole(platform: str) -> None:
    """Before, Shardy's passes ended the process."""

    def step(x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.sum(jax.pure_callback(lambda x: np.clip(x, -1, 1), like, x) ** 2)

    terms = _terms(step, platform)
    assert [one.kind for one in terms.collectives] == ["all-gather"]
    assert [one.what for one in terms.uncounted] and "callback" in terms.uncounted[0].what


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_what_is_only_shown_leaves_nothing_uncounted(platform: str) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", jnp.sum(x))
        return jnp.sum(x**2)

    assert _terms(step, platform).uncounted == ()


def test_a_callback_beside_an_array_of_several_results() -> None:
    def step(x: Any) -> Any:
        like = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(x.shape, x.dtype)
        small, large = jax.pure_callback(lambda x: (np.float32(1), x), like, x)
        return small + jnp.sum(large)

    assert len(_terms(step).uncounted) == 1
