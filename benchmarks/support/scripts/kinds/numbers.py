"""Narrow numbers and other arithmetic: bf16, int8, fp8, Fourier transforms, factorizations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import automesh
from benchmarks.support.scripts.steps.training import BATCH, abstract, split, trained


def build(mesh: Mesh, step: str = "bfloat16") -> Any:
    """The step of that name and its arguments on `mesh`."""
    return {
        "bfloat16": _bfloat16,
        "int8": _int8,
        "float8": _float8,
        "fourier": _fourier,
        "stencil": _stencil,
        "shampoo": _shampoo,
        "full_remat": _full_remat,
        "type_drift": _type_drift,
    }[step](mesh)


def _bfloat16(mesh: Mesh) -> Any:
    """Weights, state and activations in bfloat16, with dropout."""
    w = [
        abstract(mesh, (1024, 4096), "fsdp", "tp", dtype=jnp.bfloat16),
        abstract(mesh, (4096, 1024), "tp", "fsdp", dtype=jnp.bfloat16),
    ] * 3
    x = abstract(mesh, (2048, 1024), BATCH, dtype=jnp.bfloat16)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for number, one in enumerate(w):
            kept = jax.random.bernoulli(jax.random.key(number), 0.9, x.shape)
            x = jax.nn.relu(jnp.where(kept, x / 0.9, 0).astype(x.dtype) @ one)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return trained(loss, w, x)


def _int8(mesh: Mesh) -> Any:
    """Inference with int8 weights and activations."""
    w = [
        (
            abstract(mesh, (2048, 2048), *spec, dtype=jnp.int8),
            abstract(mesh, (2048,), spec[1]),
        )
        for spec in (("fsdp", "tp"), ("tp", "fsdp")) * 2
    ]
    x = abstract(mesh, (2048, 2048), BATCH, dtype=jnp.bfloat16)

    def step(w: Any, x: jax.Array) -> jax.Array:
        for weight, scale in w:
            most = jnp.max(jnp.abs(x.astype(jnp.float32)), -1, keepdims=True) / 127.0 + 1e-6
            q = jnp.round(x.astype(jnp.float32) / most).astype(jnp.int8)
            y = jax.lax.dot(q, weight, preferred_element_type=jnp.int32)
            x = jax.nn.relu(y.astype(jnp.float32) * most * scale).astype(jnp.bfloat16)
        return x

    return automesh.Workload(step, (w, x))


def _float8(mesh: Mesh) -> Any:
    """Training whose products take float8 operands."""
    w = [abstract(mesh, (1024, 4096), "fsdp", "tp"), abstract(mesh, (4096, 1024), "tp", "fsdp")]
    x = abstract(mesh, (4096, 1024), BATCH, dtype=jnp.bfloat16)

    def narrow(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for one in w:
            x = jax.nn.silu(narrow(x) @ narrow(one))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return trained(loss, w, x)


def _fourier(mesh: Mesh) -> Any:
    """Spectral layers (a Fourier neural operator) on fields that are split by batch."""
    modes, width = 16, 32
    layer = {
        "real": abstract(mesh, (width, width, modes, modes), None, "tp"),
        "imaginary": abstract(mesh, (width, width, modes, modes), None, "tp"),
        "skip": abstract(mesh, (width, width)),
    }
    x = abstract(mesh, (64, 64, 64, width), BATCH)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        first = x
        for one in params:
            found = jnp.fft.rfft2(x, axes=(1, 2))
            kept = found[:, :modes, :modes]
            weight = jax.lax.complex(one["real"], one["imaginary"])
            kept = jnp.einsum("bxyi,ioxy->bxyo", kept, weight)
            spread = jnp.zeros_like(found).at[:, :modes, :modes].set(kept)
            y = jnp.fft.irfft2(spread, s=(64, 64), axes=(1, 2))
            x = jax.nn.gelu(y + x @ one["skip"])
        return jnp.mean((x - first) ** 2)

    return trained(loss, [layer] * 2, x)


def _stencil(mesh: Mesh) -> Any:
    """A fluid on a grid that is split along its rows: rolls in a scan over time, no gradient."""
    rows = (*BATCH, "tp")
    field = abstract(mesh, (3, 1024, 1024), None, rows)

    def moved(x: jax.Array, shift: int, axis: int) -> jax.Array:
        return jnp.roll(x, shift, axis)

    def step(state: jax.Array) -> Any:
        def one(state: jax.Array, _: None) -> Any:
            u, v, p = state
            out = []
            for x in (u, v, p):
                dx = (moved(x, -1, 0) - moved(x, 1, 0)) / 2
                dy = (moved(x, -1, 1) - moved(x, 1, 1)) / 2
                around = sum(moved(x, s, a) for s in (-1, 1) for a in (0, 1))
                out.append(x - 0.1 * (u * dx + v * dy) + 0.05 * (around - 4 * x))
            return split(mesh, jnp.stack(out), None, rows), jnp.mean(out[2] ** 2)

        return jax.lax.scan(one, state, length=10)

    return automesh.Workload(step, (field,), donate_argnums=(0,))


def _shampoo(mesh: Mesh) -> Any:
    """Gradients that are whitened by a Cholesky factor of their own products."""
    w = [abstract(mesh, (256, 1024), "fsdp", "tp") for _ in range(4)]
    x = abstract(mesh, (2048, 256), BATCH)

    def update(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            return jnp.stack([jnp.mean(jnp.tanh(x @ one) ** 2) for one in w]).sum()

        value, gradients = jax.value_and_grad(loss)(w)
        new = []
        for a, g in zip(w, gradients, strict=True):
            factor = jnp.linalg.cholesky(g @ g.T + jnp.eye(256))
            new.append(a - jax.scipy.linalg.solve_triangular(factor, g, lower=True))
        return new, value

    return automesh.Workload(update, (w, x), donate_argnums=(0,))


def _full_remat(mesh: Mesh) -> Any:
    """An activation that changes from one constraint to another that shares no dimension."""
    before, after = ("tp", None, BATCH), (None, (*BATCH, "tp"), None)

    def loss(w: jax.Array, batch: Any) -> jax.Array:
        a, c = batch
        d = split(mesh, split(mesh, jnp.tanh(a * w), *before), *after)
        return jnp.mean((c + d) ** 2)

    shape = (64, 256, 512)
    batch = (abstract(mesh, shape, *before), abstract(mesh, shape, *after))
    return trained(loss, abstract(mesh, (512,), BATCH), batch)


def _type_drift(mesh: Mesh) -> Any:
    """State that goes in as float32 and comes back as bfloat16: donation is lost."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return (w - 0.1 * g).astype(jnp.bfloat16), value

    weights = abstract(mesh, (4096, 4096), "fsdp", "tp")
    return jax.jit(step, donate_argnums=0), (weights, abstract(mesh, (512, 4096), BATCH))
