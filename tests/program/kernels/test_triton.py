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
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.targets import parse_target
from automesh.hlo import hlo_pb2, read_module
from automesh.hlo.schedule.core_work import stated_cost
from automesh.hlo.schedule.nouns import Compute
from automesh.hlo.schedule.read import read_schedule
from automesh.hlo.work.uncounted import remark_on_counted
from automesh.ir.kernel_cost import cost_of, matmuls_of
from automesh.program.absent import client
from automesh.program.absent.device_queries import answering
from automesh.program.absent.fake_devices import fake_devices
from automesh.program.kernels.annotate import kernel_costs, state_costs, with_costs
from automesh.program.kernels.nouns import GROUP
from automesh.program.kernels.triton import TRITON_CONFIG, TRITON_TARGET, function_of
from automesh.program.lower.compiled import count_serialized, serialized
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.passes import partitioned
from tests.support.samples import recorded

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
HEADS, LENGTH, WIDTH, BLOCK = 8, 1024, 128, 64
BYTES = 2
QKV = [(HEADS, LENGTH, WIDTH)] * 3


def lowered_for_gpus(step: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """A step as it is lowered for H100s."""
    found = parse_target("gpu-h100-8", {}).absent
    assert found is not None
    one = absent_devices_of(found)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with answering(one, lambda: fake_devices(one), in_meshes=False):
        return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))


def stated(step: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Any, list[dict[str, Any]]]:
    """A step as it is lowered for H100s, and what is written beside its kernels."""
    module = lowered_for_gpus(step, *shapes).compiler_ir("stablehlo")
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


def module_with(config: str) -> bytes:
    """A compiled module whose one custom call is a kernel for GPUs of this text."""
    module = hlo_pb2.Module.FromString(recorded.serialized("tpu_pallas_bare"))
    for computation in module.computations:
        for one in computation.instructions:
            if one.custom_call_target:
                one.custom_call_target = TRITON_TARGET
                one.backend_config = config.encode()
                one.ClearField("backend_config_payload")
    return module.SerializeToString()


def test_what_is_counted_stands_in_the_compiled_program() -> None:
    lowered = lowered_for_gpus(functools.partial(attend, causal=True), *QKV)
    (cost,) = kernel_costs(lowered).values()
    configs: list[str] = []

    def visit(call: Any) -> Any:
        if call.name == "stablehlo.custom_call":
            configs.append(str(call.attributes[TRITON_CONFIG]))
        return importlib.import_module("jaxlib.mlir.ir").WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    (config,) = configs
    read = read_module(with_costs(module_with(config), kernel_costs(lowered)))
    (call,) = (
        one
        for part in read.computations.values()
        for one in part.instructions.values()
        if one.target == TRITON_TARGET
    )
    found = stated_cost(call)
    assert found is not None
    assert found.flops == cost.flops > 0
    # The sample's arrays are of 32 bits, the products of the kernel are not; its bytes are those of
    # the call's own arrays.
    sizes, dcn = recorded.MESHES["tpu_pallas_bare"]
    body = read_schedule(read, tuple(zip(recorded.AXES, sizes)), dcn).body
    (one,) = [one for one in body.operations if isinstance(one, Compute) and one.kind == "kernel"]
    assert (one.flops, one.dtype) == (cost.flops, "bf16")
    assert one.hbm_bytes + one.onchip_bytes == 2 * 512 * 512 * 4
    other = module_with(config.replace("num_warps = 4", "num_warps = 8"))
    assert with_costs(other, kernel_costs(lowered)) is other


@pytest.mark.gpu
def test_a_compiled_kernel_has_the_work_that_was_counted() -> None:
    found = parse_target("gpu-h100-8", {}).absent
    assert found is not None
    one = absent_devices_of(found)
    devices = client.devices_of(one)
    mesh = jax.sharding.Mesh(np.array(devices), ("dp",))
    rows = jax.sharding.PartitionSpec("dp")
    step = jax.shard_map(
        functools.partial(attend, causal=True),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        check_vma=False,
    )
    sharding = jax.sharding.NamedSharding(mesh, rows)
    args = [
        jax.ShapeDtypeStruct((8 * HEADS, LENGTH, WIDTH), jnp.bfloat16, sharding=sharding)
        for _ in QKV
    ]
    options: Any = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    with answering(one, lambda: devices, in_meshes=False):
        lowered = jax.jit(step, compiler_options=options).trace(*args).lower()
    (cost,) = kernel_costs(lowered).values()
    module = serialized(lowered.compile(), kernel_costs(lowered))
    counts = count_serialized(module, (("dp", 8),))
    assert counts.flops == cost.flops > 0


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
