"""Kernels for GPUs, lowered by Pallas to Triton and counted in their own programs."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.hlo.work.uncounted import remark_on_counted
from automesh.ir.kernel_cost import cost_of, matmuls_of
from automesh.program.absent.device_queries import answering
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.kernels.annotate import state_costs
from automesh.program.kernels.nouns import GROUP
from automesh.program.kernels.triton import function_of
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import partitioned

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
HEADS, LENGTH, WIDTH, BLOCK = 8, 1024, 128, 64
BYTES = 2
QKV = [(HEADS, LENGTH, WIDTH)] * 3


def stated(step: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Any, list[dict[str, Any]]]:
    """A step as it is lowered for H100s, and what is written beside its kernels."""
    found = parse_target("gpu-h100-8", {}).absent
    assert found is not None
    one = absent_devices_of(found)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with answering(one, lambda: fake_devices(one), in_meshes=False):
        lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    state_costs(module)
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    texts: list[dict[str, Any]] = []

    def visit(call: Any) -> Any:
        if call.name == "stablehlo.custom_call":
            text = ir.StringAttr(call.attributes["backend_config"]).value
            texts.append(json.loads(text)[GROUP] if text else {})
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return module, texts


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Attention without its normalization: a program for each block of queries of a head."""
    blocks = LENGTH // BLOCK

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, out: Any) -> None:
        def body(block: Any, total: jax.Array) -> jax.Array:
            there = (0, pl.ds(block * BLOCK, BLOCK), slice(None))
            scores = jnp.dot(q_ref[0], k_ref[there].T, preferred_element_type=jnp.float32)
            weights = jnp.exp2(scores).astype(jnp.bfloat16)
            return total + jnp.dot(weights, v_ref[there], preferred_element_type=jnp.float32)

        last = pl.program_id(1) + 1 if causal else blocks
        nothing = jnp.zeros((BLOCK, WIDTH), jnp.float32)
        out[0] = jax.lax.fori_loop(0, last, body, nothing).astype(out.dtype)

    whole = pl.BlockSpec((1, LENGTH, WIDTH), lambda head, _: (head, 0, 0))
    block = pl.BlockSpec((1, BLOCK, WIDTH), lambda head, place: (head, place, 0))
    return pl.pallas_call(
        kernel,
        grid=(HEADS, blocks),
        in_specs=[block, whole, whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(q, k, v)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_counted_without_the_blocks_that_it_skips(causal: bool) -> None:
    _, (kernel,) = stated(functools.partial(attend, causal=causal), *QKV)
    blocks = LENGTH // BLOCK
    pairs = blocks * (blocks + 1) // 2 if causal else blocks**2
    products = 2 * HEADS * pairs  # scores, and values by them
    cost = kernel["cost_estimate"]
    assert cost["flops"] == products * 2 * BLOCK * BLOCK * WIDTH
    assert cost["transcendentals"] == HEADS * pairs * BLOCK * BLOCK
    assert cost["bytes_accessed"] == 4 * BYTES * HEADS * LENGTH * WIDTH
    assert kernel["counted"] == {"is_most": False, "is_whole": True, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("symbol", "name"),
    [("__nv_exp2f", "exp2"), ("__nv_exp2", "exp2"), ("__nv_erff", "erf"), ("__nv_erf", "erf"),
     ("__nv_fast_sinf", "sin"), ("own", "")],
)  # fmt: skip
def test_functions_of_the_library_have_their_usual_names(symbol: str, name: str) -> None:
    assert function_of(SimpleNamespace(attributes={"symbol": f'"{symbol}"'})) == name


def test_what_is_counted_has_a_price() -> None:
    module, (kernel,) = stated(functools.partial(attend, causal=True), *QKV)
    (call,) = (
        one
        for one in read_graph(partitioned(module)).top.operations
        if one.name == "custom_call" and cost_of(one)
    )
    (product,) = matmuls_of(call)
    assert product.dtype == "bf16"
    sizes = (product.batch, product.m, product.n, product.k)
    flops = 2.0
    for one in sizes:
        flops *= one.coefficient
    assert flops == pytest.approx(kernel["cost_estimate"]["flops"])


def test_what_data_decides_is_counted_once_and_said() -> None:
    def kernel(x: Any, y: Any, n: Any, z: Any) -> None:
        def body(_: Any, total: jax.Array) -> jax.Array:
            return total + jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

        last = n[0].astype(jnp.int32)
        z[...] = jax.lax.fori_loop(0, last, body, jnp.zeros((64, 64), jnp.float32))

    def step(x: jax.Array, y: jax.Array, n: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
            compiler_params=triton.CompilerParams(num_warps=4),
        )(x, y, n)

    _, (found,) = stated(step, (64, 32), (32, 64), (1,))
    assert found["cost_estimate"]["flops"] == 2 * 64 * 64 * 32
    assert found["counted"]["is_least"]
    assert "one turn of each loop whose length the data decides" in remark_on_counted(
        found["counted"]
    )


def test_a_kernel_that_cannot_be_read_is_said_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(importlib.sys.modules, "jaxlib.triton.dialect", None)
    _, (kernel,) = stated(functools.partial(attend, causal=True), *QKV)
    assert kernel == {}
    said = "".join(capsys.readouterr())
    assert "a kernel for GPUs is not counted: this jaxlib cannot read kernels for GPUs" in said
