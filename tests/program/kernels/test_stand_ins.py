"""Programs with kernels for accelerators are compiled here for the shardings of their results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from automesh.program.kernels.stand_ins import is_for_accelerators, standing_in

ONLY_ELSEWHERE = Primitive("only_elsewhere")
ONLY_ELSEWHERE.def_abstract_eval(lambda x: x)
ROWS = jax.ShapeDtypeStruct((8, 128), np.float32)


def kernel(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(body, out_shape=ROWS, interpret=interpret)(x)


def test_a_kernel_for_accelerators_is_compiled_as_zeros_of_its_shape() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.jit(kernel)(x) + ONLY_ELSEWHERE.bind(x) + kernel(x, interpret=True)

    traced = jax.jit(step).trace(ROWS)
    with pytest.raises((ValueError, NotImplementedError)):
        traced.lower()
    with standing_in([traced.jaxpr]):
        lowered = jax.jit(lambda x: step(x)).lower(ROWS)
    assert np.array_equal(lowered.compile()(jnp.ones(ROWS.shape)), jnp.full(ROWS.shape, 2.0))
    with pytest.raises((ValueError, NotImplementedError)):
        jax.jit(lambda x: step(x)).lower(ROWS)


def test_what_the_cpu_runs_is_not_replaced() -> None:
    traced = jax.jit(lambda x: jnp.sin(x) @ kernel(x, interpret=True).T).trace(ROWS)
    assert not [one for one in traced.jaxpr.eqns if is_for_accelerators(one)]
