"""Loops and state: accumulation, optimizers in a scan, rematerialized stacks, offloaded state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import automesh
from benchmarks.support.scripts.steps.training import BATCH, abstract, split, trained


def build(mesh: Mesh, step: str = "accumulated") -> Any:
    """The step of that name and its arguments on `mesh`."""
    return {
        "accumulated": lambda mesh: _accumulated(mesh, contiguous=True),
        "accumulated_strided": lambda mesh: _accumulated(mesh, contiguous=False),
        "several_updates": _several_updates,
        "remat_stack": _remat_stack,
        "layer_split_stack": _layer_split_stack,
        "offloaded": _offloaded,
        "adafactor": _adafactor,
        "lora": _lora,
        "replicated": _replicated,
        "wide_perceptron": _wide_perceptron,
    }[step](mesh)


def _accumulated(mesh: Mesh, *, contiguous: bool) -> Any:
    """Four microbatches in a scan, cut from the batch along it or across."""
    parts = 4
    w = [abstract(mesh, (512, 2048), "fsdp", "tp"), abstract(mesh, (2048, 512), "tp", "fsdp")]
    x = abstract(mesh, (64, 128, 512), BATCH)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    def update(w: Any, x: jax.Array) -> Any:
        if contiguous:
            cut = x.reshape(parts, -1, *x.shape[1:])
        else:
            cut = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

        def body(total: Any, part: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(w, part)
            return jax.tree.map(jnp.add, total, (gradients, value)), None

        zeros = (jax.tree.map(jnp.zeros_like, w), jnp.float32(0))
        (gradients, value), _ = jax.lax.scan(body, zeros, cut)
        return jax.tree.map(lambda a, g: a - 0.1 * g / parts, w, gradients), value

    return jax.jit(update, donate_argnums=0), (w, x)


def _several_updates(mesh: Mesh) -> Any:
    """Twenty updates in one loop, as `fori_loop(n, n + 20)`."""
    w = abstract(mesh, (1024, 1024), "fsdp", "tp")
    x = abstract(mesh, (20, 256, 1024), None, BATCH)
    n = abstract(mesh, (), dtype=jnp.int32)

    def update(w: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        def one(i: jax.Array, state: Any) -> Any:
            w, total = state
            value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x[i - n] @ w) ** 2))(w)
            return w - 0.1 * g, total + value

        return jax.lax.fori_loop(n, n + 20, one, (w, 0.0))

    return jax.jit(update, donate_argnums=0), (w, x, n)


def _remat_stack(mesh: Mesh) -> Any:
    """A scanned stack in bfloat16, of whose body only the products are kept."""
    params = {
        "up": abstract(mesh, (8, 512, 2048), None, "fsdp", "tp"),
        "down": abstract(mesh, (8, 2048, 512), None, "tp", "fsdp"),
    }
    x = abstract(mesh, (32, 256, 512), BATCH, dtype=jnp.bfloat16)

    def layer(x: jax.Array, weights: Any) -> Any:
        up, down = (weights[name].astype(jnp.bfloat16) for name in ("up", "down"))
        y = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(
            x.dtype
        )
        y = jax.nn.gelu(split(mesh, y @ up, BATCH, None, "tp")) @ down
        return x + split(mesh, y, BATCH), None

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(kept, x, params)[0].astype(jnp.float32) ** 2)

    return trained(loss, params, x)


def _layer_split_stack(mesh: Mesh) -> Any:
    """A scanned stack that is split over its layers, not over their rows."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    weights = abstract(mesh, (8, 1024, 1024), "fsdp", None, "tp")
    return trained(loss, weights, abstract(mesh, (512, 1024), BATCH))


def _offloaded(mesh: Mesh) -> Any:
    """Adam whose moments lie in host memory and are copied for the update."""
    shape = (8, 1024, 1024)
    device = NamedSharding(mesh, P(None, "fsdp", "tp"))
    host = device.with_memory_kind("pinned_host")
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
    moment = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=host)
    x = abstract(mesh, (256, 1024), BATCH)

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)

    def update(state: Any, x: jax.Array) -> Any:
        p, m, v = state
        value, g = jax.value_and_grad(loss)(p, x)
        m, v = jax.device_put((m, v), device)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)
        return (p, *jax.device_put((m, v), host)), value

    jitted = jax.jit(update, donate_argnums=0, out_shardings=((device, host, host), None))
    return jitted, ((weights, moment, moment), x)


def _adafactor(mesh: Mesh) -> Any:
    """Second moments as the product of a row and a column (Adafactor), gradients clipped."""
    w = [abstract(mesh, (1024, 4096), "fsdp", "tp"), abstract(mesh, (4096, 1024), "tp", "fsdp")]
    rows = [abstract(mesh, (1024,), "fsdp"), abstract(mesh, (4096,), "tp")]
    columns = [abstract(mesh, (4096,), "tp"), abstract(mesh, (1024,), "fsdp")]
    x = abstract(mesh, (2048, 1024), BATCH)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ w[0]) @ w[1] - x) ** 2)

    def update(state: Any, x: jax.Array) -> Any:
        w, rows, columns = state
        value, gradients = jax.value_and_grad(loss)(w, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        new = []
        for a, r, c, g in zip(w, rows, columns, gradients, strict=True):
            g = g / jnp.maximum(norm, 1.0)
            r = 0.9 * r + 0.1 * jnp.mean(g**2, 1)
            c = 0.9 * c + 0.1 * jnp.mean(g**2, 0)
            scale = jax.lax.rsqrt(r[:, None] * c[None, :] / jnp.mean(r) + 1e-30)
            u = g * scale
            u = u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(u**2)))
            new.append((a - 1e-2 * u, r, c))
        return tuple(list(one) for one in zip(*new, strict=True)), value

    return automesh.Workload(update, ((w, rows, columns), x), donate_argnums=(0,))


def _lora(mesh: Mesh) -> Any:
    """Frozen bfloat16 weights with trained low-rank additions."""
    frozen = [
        abstract(mesh, shape, *spec, dtype=jnp.bfloat16)
        for shape, spec in (((1024, 4096), ("fsdp", "tp")), ((4096, 1024), ("tp", "fsdp")))
    ] * 3
    added = [
        (
            abstract(mesh, (shape[0], 16), spec[0]),
            abstract(mesh, (16, shape[1]), None, spec[1]),
        )
        for shape, spec in (((1024, 4096), ("fsdp", "tp")), ((4096, 1024), ("tp", "fsdp")))
    ] * 3
    x = abstract(mesh, (32, 128, 1024), BATCH, dtype=jnp.bfloat16)

    def loss(added: Any, batch: Any) -> jax.Array:
        frozen, x = batch
        for weight, (a, b) in zip(frozen, added, strict=True):
            low = (x @ a.astype(x.dtype)) @ b.astype(x.dtype)
            x = jax.nn.silu(x @ weight + low)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return trained(loss, added, (frozen, x))


def _replicated(mesh: Mesh) -> Any:
    """Plain data parallelism over every axis: whole weights and gradients on each device."""
    every = ("dp", "fsdp", "tp")
    w = [abstract(mesh, (2048, 2048)) for _ in range(4)]
    x = abstract(mesh, (1024, 2048), every)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for one in w:
            x = jax.nn.relu(x @ one)
        return jnp.mean(x**2)

    return trained(loss, w, x)


def _wide_perceptron(mesh: Mesh) -> Any:
    """Perceptrons of a vision transformer on a large batch: few weights, large activations."""
    w = [
        (abstract(mesh, (768, 3072), "fsdp", "tp"), abstract(mesh, (3072, 768), "fsdp", "tp"))
        for _ in range(4)
    ]
    x = abstract(mesh, (512, 197, 768), BATCH)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for up, down in w:
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(x**2)

    return trained(loss, w, x)
