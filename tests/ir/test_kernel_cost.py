"""Multiplications of convolutions, counted as XLA counts them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.cost.terms import flops
from automesh.ir.graph import Block, Operation
from automesh.ir.kernel_cost import matmuls_of
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import partitioned

NUMBERS = ("NHWC", "HWIO", "NHWC")
IMAGES = jax.ShapeDtypeStruct((2, 9, 9, 4), jnp.float32)


def convolved(window: int, stride: int, padding: Any, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    groups = more.get("feature_group_count", 1)
    kernel = jax.ShapeDtypeStruct((window, window, 4 // groups, 8), jnp.float32)

    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, weights, (stride, stride), padding, dimension_numbers=NUMBERS, **more
        )

    return step, (IMAGES, kernel)


CASES = {
    "padded": convolved(3, 1, "SAME"),
    "stride 2": convolved(3, 2, "SAME"),
    "valid": convolved(3, 1, "VALID"),
    "dilated image": convolved(3, 1, ((2, 1), (2, 1)), lhs_dilation=(2, 2)),
    "dilated kernel": convolved(3, 1, "SAME", rhs_dilation=(2, 2)),
    "one element": convolved(1, 1, "SAME"),
    "groups": convolved(3, 1, "SAME", feature_group_count=2),
}


def products(block: Block) -> list[Operation]:
    return [one for one in block.operations if one.name == "convolution"]


def lowered(step: Any, arguments: tuple[Any, ...]) -> Any:
    return jax.jit(step).lower(*arguments)


def counted(program: Any) -> float:
    graph = read_graph(partitioned(program.compiler_ir("stablehlo")))
    return sum(flops(matmuls_of(one), {}) for one in products(graph.top))


@pytest.mark.parametrize("name", CASES)
def test_padding_and_holes_are_no_work(name: str) -> None:
    program = lowered(*CASES[name])
    assert counted(program) == pytest.approx(program.cost_analysis()["flops"])


def test_gradients_are_convolutions_as_well() -> None:
    step, arguments = CASES["stride 2"]

    def gradients(x: jax.Array, weights: jax.Array, given: jax.Array) -> Any:
        return jax.vjp(step, x, weights)[1](given)

    given = jax.eval_shape(step, *arguments)
    program = lowered(gradients, (*arguments, given))
    assert counted(program) == pytest.approx(program.cost_analysis()["flops"])


def test_a_window_of_several_elements_may_need_fewer_operations() -> None:
    """Winograd's algorithm, or a Fourier transform: the count is no bound."""
    for name, is_least in (("padded", False), ("one element", True)):
        graph = read_graph(partitioned(lowered(*CASES[name]).compiler_ir("stablehlo")))
        (product,) = products(graph.top)
        assert [one.is_least for one in matmuls_of(product)] == [is_least]
