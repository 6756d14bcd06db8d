"""What was counted in kernels is added to what a compiler gave back, and to what is estimated."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from automesh.hlo import read_module
from automesh.hlo.nouns import Instruction
from automesh.hlo.schedule.nouns import Compute, ScheduledMatmul
from automesh.hlo.schedule.read import read_schedule
from automesh.program.kernels.annotate import kernel_costs, state_costs, with_costs
from automesh.program.kernels.grid import count_kernel
from automesh.program.kernels.mosaic import UnreadableKernel, body_of, read_kernel
from automesh.program.kernels.nouns import KernelCost, KernelProduct
from tests.support.samples import recorded

BARE, ROWS, WIDTH = "tpu_pallas_bare", 512, 512


def calls(module: bytes) -> list[Instruction]:
    read = read_module(module)
    every = [one for part in read.computations.values() for one in part.instructions.values()]
    return [one for one in every if one.target == "tpu_custom_call"]


def kernel_of(module: bytes) -> Compute:
    sizes, dcn = recorded.MESHES[BARE]
    body = read_schedule(read_module(module), tuple(zip(recorded.AXES, sizes)), dcn).body
    (found,) = [one for one in body.operations if isinstance(one, Compute) and one.kind == "kernel"]
    return found


def key_of(module: bytes) -> str:
    (call,) = calls(module)
    return hashlib.sha256(body_of(call.backend_config.decode()).encode()).hexdigest()


def test_a_kernel_of_a_compiled_module_is_read_and_counted() -> None:
    module = recorded.serialized(BARE)
    (call,) = calls(module)
    try:
        kernel = read_kernel(body_of(call.backend_config.decode()))
    except UnreadableKernel as error:
        if "Unsupported version" not in str(error):
            raise
        pytest.skip(f"the sample was written by a later jax: {error}")
    cost = count_kernel(kernel, [])
    assert (cost.flops, cost.bytes_accessed) == (0, 2 * ROWS * WIDTH * 4)
    one = kernel_of(with_costs(module, {key_of(module): cost}))
    assert one.hbm_bytes == cost.bytes_accessed
    assert one.uncounted == (
        "custom call `tpu_custom_call` counted by its matrix products and blocks, "
        "its elementwise arithmetic left out"
    )


def test_a_kernel_of_a_later_jax_is_refused_with_both_versions() -> None:
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    (call,) = calls(recorded.serialized(BARE))
    body = base64.b64decode(body_of(call.backend_config.decode()))
    context = ir.Context()
    context.allow_unregistered_dialects = True
    importlib.import_module("jax._src.lib").tpu.register_dialect(context)
    with context:
        module = ir.Module.parse(body)
        later = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 9999)
        module.operation.attributes["stable_mosaic.version"] = later
        written = io.BytesIO()
        module.operation.write_bytecode(written)
    with pytest.raises(
        UnreadableKernel, match=r"Unsupported version: expected <= \d+ but got 9999"
    ):
        read_kernel(base64.b64encode(written.getvalue()).decode())


@pytest.mark.parametrize("is_most", [False, True])
def test_the_product_that_a_kernel_repeats_is_priced_by_its_shape(is_most: bool) -> None:
    module = recorded.serialized(BARE)
    product = KernelProduct(m=256, n=512, k=128, dtype="bf16")
    cost = KernelCost(
        flops=10 * product.flops,
        transcendentals=5,
        bytes_accessed=4096,
        product=product,
        is_most=is_most,
    )
    one = kernel_of(with_costs(module, {key_of(module): cost}))
    assert one.matmuls == (ScheduledMatmul(dtype="bf16", batch=10, m=256, n=512, k=128),)
    assert (one.flops, one.dtype, one.hbm_bytes) == (10 * product.flops, "bf16", 4096)
    assert ("as if it skipped no block" in one.uncounted) == is_most


def test_a_module_without_such_kernels_stays_as_it_is() -> None:
    module = recorded.serialized("tpu_fsdp")
    cost = KernelCost(flops=1, transcendentals=1, bytes_accessed=1)
    assert with_costs(module, {"0" * 64: cost}) is module
    stated = recorded.serialized("tpu_pallas")
    assert with_costs(stated, {"0" * 64: cost}) is stated


def test_costs_stand_in_the_estimated_program_and_not_in_the_compiled_one() -> None:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] + 1

    def step(x: jax.Array) -> jax.Array:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    args = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    lowered = jax.jit(step).trace(args).lower(lowering_platforms=("tpu",))
    before = lowered.as_text()
    (cost,) = kernel_costs(lowered).values()
    assert lowered.as_text() == before and "cost_estimate" not in before
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        copy = module.operation.clone()
    state_costs(copy)
    assert f"bytes_accessed\\22: {cost.bytes_accessed}" in str(copy)
