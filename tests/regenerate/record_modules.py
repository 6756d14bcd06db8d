"""Compiles the small steps whose scheduled modules lie in tests/data/modules.

Run by hand with libtpu and the CUDA plugin installed, never by the tests:

    python -m tests.regenerate.record_modules [NAME...]

Without names, all are made again (some minutes). Each file is a gzipped HloModuleProto.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.support.paths import DATA, ROOT

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=0",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils, pallas, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# No folder of the machine that records is to be kept.
jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")

FOLDER = DATA / "modules"
AXES = ("dp", "fsdp", "tp")
GPU = ROOT / "automesh" / "hardware" / "data" / "gpus" / "h100.txtpb"
Sizes = tuple[int, int, int]


def tpu(name: str, ici: Sizes, dcn: Sizes = (1, 1, 1)) -> Mesh:
    """A mesh of a TPU topology; `dcn` over slices."""
    slices = int(np.prod(dcn))
    wanted: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **wanted)
    devices = found.devices
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, allow_split_physical_axes=True
        )
    else:
        grid = mesh_utils.create_device_mesh(ici, devices=devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES)


def gpu(topology: str, sizes: Sizes) -> Mesh:
    """A mesh of H100s; `topology` is partitions x hosts x devices of a host."""
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=GPU.read_text(), topology=topology
    )
    return Mesh(np.array(found.devices).reshape(sizes), AXES)


def cpu(sizes: Sizes) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes), AXES)


def sharded(mesh: Mesh, shape: Sequence[int], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, P(*spec)))


def transformer(
    mesh: Mesh,
    *,
    layers: int = 4,
    width: int = 1024,
    hidden: int = 4096,
    words: int = 4096,
    batch: int = 64,
    length: int = 512,
    heads: int = 8,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """A scanned, rematerialized transformer's step of plain gradient descent."""
    f32, bf16 = jnp.float32, jnp.bfloat16
    rows = ("dp", "fsdp")

    def pin(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    weight = partial(sharded, mesh)
    weights = {
        "words": weight((words, width), f32, "tp", "fsdp"),
        **{n: weight((layers, width, width), f32, None, "fsdp", "tp") for n in "qkv"},
        "o": weight((layers, width, width), f32, None, "tp", "fsdp"),
        "up": weight((layers, width, hidden), f32, None, "fsdp", "tp"),
        "down": weight((layers, hidden, width), f32, None, "tp", "fsdp"),
    }
    tokens = sharded(mesh, (batch, length), jnp.int32, rows, None)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: value.astype(bf16) for name, value in w.items()}
        scale = jnp.sqrt(jnp.mean(x.astype(f32) ** 2, -1, keepdims=True) + 1e-6)
        h = x / scale.astype(bf16)
        q, k, v = (
            pin((h @ w[n]).reshape(batch, length, heads, -1), rows, None, "tp", None) for n in "qkv"
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(f32)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(bf16), v)
        x = pin(x + mixed.reshape(batch, length, width) @ w["o"], rows, None, None)
        h = pin(jax.nn.gelu(x @ w["up"]), rows, None, "tp")
        return pin(x + h @ w["down"], rows, None, None), None

    def loss(w: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x = pin(w["words"].astype(bf16)[tokens], rows, None, None)
        stacked = {name: value for name, value in w.items() if name != "words"}
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
        logits = (x @ w["words"].astype(bf16).T).astype(f32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(chosen)

    def step(w: dict[str, jax.Array], tokens: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, tokens)
        return jax.tree.map(lambda a, g: a - 1e-3 * g, w, gradient), value

    lowered = jax.jit(step, donate_argnums=0).lower(weights, tokens)
    return lowered.compile(compiler_options=options)


def perceptron(
    mesh: Mesh, *, layers: int = 2, width: int = 512, hidden: int = 2048, rows: int = 512
) -> jax.stages.Compiled:
    """A scanned perceptron's step in float32: small enough to count its collectives by hand."""
    f32, batch = jnp.float32, ("dp", "fsdp")
    weights = (
        sharded(mesh, (layers, width, hidden), f32, None, "fsdp", None),
        sharded(mesh, (layers, hidden, width), f32, None, None, "fsdp"),
    )
    x = sharded(mesh, (rows, width), f32, batch, None)

    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        whole = NamedSharding(mesh, P(None, None))
        up, down = (jax.lax.with_sharding_constraint(one, whole) for one in w)
        return x + jnp.tanh(x @ up) @ down, None

    def step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(w: Any) -> jax.Array:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 1e-3 * g, w, gradient), value

    return jax.jit(step, donate_argnums=0).lower(weights, x).compile()


def overlapped(mesh: Mesh) -> jax.stages.Compiled:
    """Two multiplications; the second one's matrix is gathered, which the first can hide."""

    def step(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return (x @ a) @ jax.lax.all_gather(b, "fsdp", axis=0, tiled=True)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P("fsdp", None), P(None, None), P("fsdp", None)),
        out_specs=P("fsdp", None),
    )
    bf16 = jnp.bfloat16
    return (
        jax.jit(mapped)
        .lower(
            sharded(mesh, (32768, 4096), bf16, "fsdp", None),
            sharded(mesh, (4096, 4096), bf16, None, None),
            sharded(mesh, (4096, 4096), bf16, "fsdp", None),
        )
        .compile()
    )


def every_kind(mesh: Mesh) -> jax.stages.Compiled:
    """Every collective that a program can ask for by name, along dp."""
    size = mesh.shape["dp"]
    ring = [(one, (one + 1) % size) for one in range(size)]

    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jax.lax.psum(x, "dp"),
            jax.lax.psum_scatter(2 * x, "dp", tiled=True),
            jax.lax.all_gather(3 * x, "dp", tiled=True),
            jax.lax.all_to_all(4 * x, "dp", 0, 1, tiled=True),
            jax.lax.ppermute(5 * x, "dp", ring),
        )

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"),) * 5, check_vma=False
    )
    return jax.jit(mapped).lower(sharded(mesh, (1024 * size, 1024), jnp.float32, "dp")).compile()


def offloaded(mesh: Mesh, kind: str = "pinned_host") -> jax.stages.Compiled:
    """Two scanned layers whose inputs wait for the backward pass in the host's memory."""
    rows = ("dp", "fsdp")
    weights = sharded(mesh, (4, 1024, 1024), jnp.bfloat16, None, None, None)
    x = sharded(mesh, (4096, 1024), jnp.bfloat16, rows, None)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["into"],
        offload_src="device",
        offload_dst=kind,
    )

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, "into")
        return jnp.sin(x @ w), None

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            return jnp.mean(jax.lax.scan(body, x, w)[0].astype(jnp.float32) ** 2)

        return w - 1e-3 * jax.grad(loss)(w)

    return jax.jit(step, donate_argnums=0).lower(weights, x).compile()


def kernelled(mesh: Mesh, *, estimate: bool) -> jax.stages.Compiled:
    """A Pallas kernel between two plain multiplications."""
    rows, width = 512, 512

    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    cost = pallas.CostEstimate(flops=3 * rows * width, transcendentals=0, bytes_accessed=123456)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        call = pallas.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            cost_estimate=cost if estimate else None,
        )
        return call(x @ w) @ w

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=False
    )
    f32, size = jnp.float32, mesh.shape["dp"]
    x, w = sharded(mesh, (rows * size, width), f32, "dp"), sharded(mesh, (width, width), f32)
    return jax.jit(mapped).lower(x, w).compile()


CASES: dict[str, Callable[[], jax.stages.Compiled]] = {
    "tpu_fsdp": lambda: transformer(tpu("v5e:4x4", (4, 4, 1))),
    "tpu_ring": lambda: transformer(tpu("v5e:4x4", (1, 4, 4))),
    "tpu_overlapped": lambda: overlapped(tpu("v5e:4x4", (1, 16, 1))),
    "tpu_dcn_dp": lambda: perceptron(tpu("v5e:4x4", (1, 16, 1), (2, 1, 1))),
    "tpu_dcn_fsdp": lambda: perceptron(tpu("v5e:4x4", (1, 16, 1), (1, 2, 1))),
    "tpu_dcn_inner": lambda: perceptron(tpu("v5e:4x4", (2, 8, 1), (1, 2, 1))),
    "tpu_dcn_four": lambda: perceptron(tpu("v5e:2x4", (2, 4, 1), (2, 2, 1))),
    "tpu_dcn_kinds": lambda: every_kind(tpu("v5e:2x2", (1, 4, 1), (2, 1, 1))),
    "tpu_dcn_transformer": lambda: transformer(tpu("v5e:4x4", (1, 16, 1), (2, 1, 1))),
    "tpu_sparsecore": lambda: perceptron(
        tpu("tpu7x:2x2x1", (2, 4, 1)), width=2048, hidden=8192, rows=4096
    ),
    "tpu_offload": lambda: offloaded(tpu("v5e:4x4", (16, 1, 1))),
    "tpu_pallas": lambda: kernelled(tpu("v5e:4x4", (16, 1, 1)), estimate=True),
    "tpu_pallas_bare": lambda: kernelled(tpu("v5e:4x4", (16, 1, 1)), estimate=False),
    "gpu_fsdp": lambda: transformer(gpu("1x2x8", (2, 8, 1))),
    "gpu_tp": lambda: transformer(gpu("1x2x8", (1, 2, 8))),
    "gpu_cublas": lambda: transformer(
        gpu("1x2x8", (1, 2, 8)), options={"xla_gpu_enable_triton_gemm": False}
    ),
    "gpu_overlapped": lambda: overlapped(gpu("1x1x8", (1, 8, 1))),
    "gpu_offload": lambda: offloaded(gpu("1x1x8", (8, 1, 1))),
    "cpu_fsdp": lambda: transformer(cpu((2, 2, 2)), layers=2, width=64, hidden=128, words=64,
                                    batch=8, length=16, heads=4),
}  # fmt: skip


def record(name: str) -> None:
    (module,) = CASES[name]().runtime_executable().hlo_modules()
    path = FOLDER / f"{name}.pb.gz"
    path.write_bytes(gzip.compress(module.as_serialized_hlo_module_proto(), 9, mtime=0))
    print(f"{name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        record(name)
