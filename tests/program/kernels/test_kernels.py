"""Kernels for TPUs, lowered by Pallas and counted in their own programs; no TPU is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from automesh.program.kernels import grid
from automesh.program.kernels.annotate import kernel_costs
from automesh.program.kernels.mosaic import UnreadableKernel, read_kernel
from automesh.program.kernels.nouns import KernelCost, KernelProduct

BLOCK, HEADS, LENGTH, WIDTH = 256, 2, 1024, 128
BYTES = 2
P = PartitionSpec


def costs(step: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    """What is counted in the kernels of a step, lowered for TPUs."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",))
    return list(kernel_costs(lowered).values())


def multiply(x: jax.Array, y: jax.Array, tile: tuple[int, int, int]) -> jax.Array:
    """A blocked product that keeps its sum on the chip."""
    (m, k), n = x.shape, y.shape[1]
    bm, bn, bk = tile

    def kernel(x_ref: Any, y_ref: Any, z_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == k // bk - 1)
        def _() -> None:
            z_ref[...] = jnp.exp(sum_ref[...]).astype(z_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, s: (i, s)),
            pl.BlockSpec((bk, bn), lambda i, j, s: (s, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, y)


@pytest.mark.parametrize("sizes", [(512, 768, 1024), (1024, 256, 512)])
@pytest.mark.parametrize("tile", [(256, 128, 256), (128, 256, 512)])
def test_a_blocked_product_is_counted_exactly(
    sizes: tuple[int, int, int], tile: tuple[int, int, int]
) -> None:
    (m, n, k), (bm, bn, bk) = sizes, tile
    (cost,) = costs(functools.partial(multiply, tile=tile), (m, k), (k, n))
    assert cost.flops == 2 * m * n * k and not cost.is_most
    assert cost.product == KernelProduct(m=bm, n=bn, k=bk, dtype="bf16")
    assert cost.transcendentals == m * n
    # The left side is read once for every block of columns, the right side once for every block of
    # rows; a block stays where the next step has the same.
    left = m * k if k == bk else m * k * (n // bn)
    right = k * n if (k, n) == (bk, bn) else k * n * (m // bm)
    assert cost.bytes_accessed == BYTES * (left + right + m * n)


def attention(mask: Any, heads: int = HEADS, shards: int = 1) -> Any:
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": BLOCK for name in names}
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        head_shards=shards,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**sizes),
    )


WHOLE = (HEADS, LENGTH, WIDTH)
BLOCKS = LENGTH // BLOCK


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (masks.FullMask((LENGTH, LENGTH)), BLOCKS**2),
        (masks.CausalMask((LENGTH, LENGTH)), BLOCKS * (BLOCKS + 1) // 2),
        (masks.LocalMask((LENGTH, LENGTH), (BLOCK, 0), 0), 2 * BLOCKS - 1),
    ],
    ids=["full", "causal", "local"],
)
def test_attention_skips_the_blocks_that_its_mask_hides(mask: Any, blocks: int) -> None:
    kernel = attention(mask)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel(q, k, v).astype(jnp.float32).sum()

    found = costs(jax.grad(loss, argnums=(0, 1, 2)), WHOLE, WHOLE, WHOLE)
    product = 2 * BLOCK * BLOCK * WIDTH
    # Two products forward, four for keys and values, three for queries (FlashAttention-2,
    # arXiv:2307.08691, algorithm 2, scores computed again in both).
    assert sorted(cost.flops for cost in found) == [
        HEADS * blocks * products * product for products in (2, 3, 4)
    ]
    assert not any(cost.is_most for cost in found)
    for cost in found:  # Hidden blocks are not fetched either.
        assert cost.bytes_accessed < 12 * HEADS * (blocks + BLOCKS) * BLOCK * WIDTH * BYTES


def test_a_device_counts_its_own_part_and_waits_for_the_one_with_the_most_work() -> None:
    """Heads with unequal masks on two devices, in a loop over layers."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    each = [masks.CausalMask((LENGTH, LENGTH)), masks.FullMask((LENGTH, LENGTH))]
    sizes = splash.BlockSizes(block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask(each), head_shards=2, q_seq_shards=1, block_sizes=sizes
    )
    spec = kernel.manual_sharding_spec(jax.sharding.NamedSharding(mesh, P("tp", None)))
    part = P("tp")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, part, part, part), out_specs=part, check_vma=False
    )
    def attend(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel(q, k, v)

    def step(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return attend(kernel, x, x, x).astype(x.dtype), None

        return jax.lax.scan(layer, x, length=3)[0]

    (cost,) = costs(step, WHOLE)
    assert cost.flops == 2 * BLOCKS**2 * 2 * BLOCK * BLOCK * WIDTH and not cost.is_most


def choose(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Squares the blocks of `x` that `rows`, which are data, ask for."""

    def kernel(rows_ref: Any, x_ref: Any, y_ref: Any) -> None:
        @pl.when(rows_ref[pl.program_id(0)] > 0)
        def _() -> None:
            square = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)
            y_ref[...] = square.astype(y_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, rows: (rows[i], 0))],
            out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, rows: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(rows, x)


SQUARE = 2 * BLOCK**3


def test_what_data_decides_is_counted_as_if_nothing_were_skipped() -> None:
    def step(x: jax.Array) -> jax.Array:
        return choose(x, x[:4, 0].astype(jnp.int32))

    (cost,) = costs(step, (4 * BLOCK, BLOCK))
    assert cost.flops == 4 * SQUARE and cost.is_most
    assert cost.bytes_accessed == 2 * 4 * BLOCK * BLOCK * BYTES


def test_what_a_constant_decides_is_skipped() -> None:
    rows = np.array([0, 3, 3, 0], np.int32)
    (cost,) = costs(lambda x: choose(x, jnp.asarray(rows)), (4 * BLOCK, BLOCK))
    assert cost.flops == 2 * SQUARE and not cost.is_most
    assert cost.bytes_accessed == (3 + 4) * BLOCK * BLOCK * BYTES  # Block 3 is fetched once.


def test_loops_with_known_bounds_are_multiplied_out() -> None:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        def turn(_: Any, total: jax.Array) -> jax.Array:
            return total + jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)

        trips = pl.program_id(0) + 1
        start = jnp.zeros(y_ref.shape, jnp.float32)
        y_ref[...] = jax.lax.fori_loop(0, trips, turn, start).astype(y_ref.dtype)

    def step(x: jax.Array) -> jax.Array:
        block = pl.BlockSpec((BLOCK, BLOCK), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, grid=(4,), in_specs=[block], out_specs=block, out_shape=shape
        )(x)

    (cost,) = costs(step, (4 * BLOCK, BLOCK))
    assert cost.flops == (1 + 2 + 3 + 4) * SQUARE and not cost.is_most


def test_a_kernel_without_a_grid_moves_its_operands_once() -> None:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.tanh(x_ref[...])

    def step(x: jax.Array) -> jax.Array:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    (cost,) = costs(step, (BLOCK, BLOCK))
    assert cost.bytes_accessed == 2 * BLOCK * BLOCK * BYTES
    assert cost == KernelCost(
        flops=0, transcendentals=BLOCK * BLOCK, bytes_accessed=cost.bytes_accessed
    )


def test_copies_that_a_kernel_makes_itself_are_counted() -> None:
    def kernel(x_ref: Any, y_ref: Any, held: Any, done: Any) -> None:
        row = pl.program_id(0) * BLOCK
        copy = pltpu.make_async_copy(x_ref.at[pl.ds(row, BLOCK), :], held, done)
        copy.start()
        copy.wait()
        y_ref[...] = held[...]

    def step(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.bfloat16), pltpu.SemaphoreType.DMA],
        )(x)

    (cost,) = costs(step, (4 * BLOCK, BLOCK))
    assert cost.bytes_accessed == 2 * 4 * BLOCK * BLOCK * BYTES and cost.flops == 0


def test_a_kernel_that_states_its_cost_is_left_as_it_is() -> None:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...]

    def step(x: jax.Array) -> jax.Array:
        cost = pl.CostEstimate(flops=7, bytes_accessed=8, transcendentals=9)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, cost_estimate=cost)(x)

    assert costs(step, (BLOCK, BLOCK)) == []


def test_a_grid_that_data_decides_is_not_counted_and_said_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...]

    def step(x: jax.Array) -> jax.Array:
        block = pl.BlockSpec((BLOCK, BLOCK), lambda i: (i, 0))
        steps = x[0, 0].astype(jnp.int32)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, grid=(steps,), in_specs=[block], out_specs=block, out_shape=shape
        )(x)

    assert costs(step, (4 * BLOCK, BLOCK)) == []
    assert "known only when it runs" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["", "????", "bm90IGEga2VybmVs"])
def test_a_damaged_kernel_is_refused_with_a_reason(body: str) -> None:
    with pytest.raises(UnreadableKernel, match="its program cannot be read"):
        read_kernel(body)


def test_a_grid_of_too_many_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid, "MOST_STEPS", 15)
    step = functools.partial(multiply, tile=(256, 128, 256))
    assert costs(step, (512, 512), (512, 512)) == []
    assert "16 steps" in capsys.readouterr().err
