"""How far the memory of an estimate may be off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from automesh.ir.terms.collect import collect
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import partitioned


def spread(step, *args, platform="tpu"):
    lowered = jax.jit(step).lower(*args).compiler_ir("stablehlo")
    return collect(read_graph(partitioned(lowered)), active=(), platform=platform).memory_spread


SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((1, 64, 64, 1), jnp.float32)


def test_products_have_the_usual_interval():
    least, most = spread(lambda x: jnp.tanh(x @ x), SQUARE)
    assert 0.6 < least < 1 < most < 2


@pytest.mark.parametrize("step", [lambda x: jnp.fft.fft2(x).real, lambda x: jnp.linalg.cholesky(x)])
def test_what_a_library_takes_has_no_upper_end(step):
    assert spread(step, SQUARE)[1] == 0.0


def test_images_of_few_channels_grow_on_tpus_alone():
    def step(x):
        return jax.lax.conv_general_dilated(
            x, jnp.ones((3, 3, 1, 1)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert spread(step, IMAGE)[1] == 0.0
    assert spread(step, IMAGE, platform="cpu")[1] > 1.0


def test_sorts_may_need_a_third():
    assert spread(jnp.sort, SQUARE)[0] == pytest.approx(1 / 3)
