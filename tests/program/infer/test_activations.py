"""Where data meets parameters that fsdp keeps in parts: the batch decides how results are split."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import StepClasses
from automesh.program.infer.search.build import constraints_of, sharding_of
from automesh.program.infer.search.constrain import constrained
from automesh.program.infer.search.layout import lay_out

PARAMS = {
    "embed": jnp.zeros((256, 64)),
    "layers": {"down": jnp.zeros((2, 128, 64)), "up": jnp.zeros((2, 64, 128))},
    "out": jnp.zeros((64, 256)),
}
NAMES = ["p['embed']", "p['layers']['down']", "p['layers']['up']", "p['out']", "tokens"]
TOKENS = jnp.zeros((8, 16), jnp.int32)


def step(params: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(hidden: Any, weights: Any) -> Any:
            return hidden + jax.nn.gelu(hidden @ weights["up"]) @ weights["down"], None

        hidden, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = jax.nn.log_softmax(hidden @ params["out"])
        return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def program() -> Any:
    return jax.jit(step).trace(PARAMS, TOKENS).jaxpr


@pytest.fixture(scope="module")
def found(program: Any) -> StepClasses:
    return classes_of(program, carried={n: n for n in range(4)}, names=NAMES)


def test_products_with_parameters_are_split_over_the_batch_in_both_passes(
    found: StepClasses,
) -> None:
    products = [one for one in found.activations if one.leaves_others]
    assert {one.dims for one in products} == {("batch", "", "")}
    # Forward: the lookup, two in the layers, the head; backward: two in the layers, the head.
    assert [one.shape[-1] for one in products] == [64, 128, 64, 256, 64, 128, 64]


def test_a_table_is_gathered_for_its_lookup_and_its_gradient_is_summed_up_as_a_whole(
    found: StepClasses,
) -> None:
    tables = [one for one in found.activations if one.is_gathered]
    assert [(one.shape, one.dims, one.output) for one in tables] == [
        ((256, 64), ("vocab", "embed"), -1),
        ((256, 64), ("vocab", "embed"), 0),
    ]


def test_fsdp_gathers_parameters_and_sums_up_no_activation(
    program: Any, found: StepClasses
) -> None:
    layout = lay_out(found, num_devices=4, script="train.py")
    mapping = {"batch": ("fsdp",), "params": ("fsdp",), "embed": ()}
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Auto,))
    at = [sharding_of(one.split, mapping, mesh) for one in layout.arguments]

    def sums_of_activations(inner: Any) -> int:
        jitted = jax.jit(
            jaxpr_as_fun(constrained(program, constraints_of(inner, mapping, mesh))),
            in_shardings=at,
            out_shardings=[*at[:4], None],
        )
        text = jitted.lower(*jax.tree.leaves((PARAMS, TOKENS))).compile().as_text() or ""
        sums = re.findall(r"(f32\[[\d,]*\])\S* all-reduce\(", text)
        return sum(one.startswith(("f32[8,16", "f32[2,16")) for one in sums)

    assert sums_of_activations(()) > 0  # What the compiler does by itself.
    assert sums_of_activations(layout.inner) == 0


def test_a_step_without_a_batch_gets_no_constraints() -> None:
    def stencil(field: Any, weights: Any) -> Any:
        return jnp.roll(field, 1, 0) * 0.5, weights

    jaxpr = jax.jit(stencil).trace(jnp.zeros((64, 64)), jnp.zeros((64, 64))).jaxpr
    assert classes_of(jaxpr, carried={0: 0, 1: 1}).activations == ()
