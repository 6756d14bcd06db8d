"""What the steps beside it share: abstract arrays on a mesh, and SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

Tree = Any
BATCH = ("dp", "fsdp")
_RATE, _MOMENTUM = 1e-3, 0.9


def abstract(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    """An array of `shape` split as `spec` says."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def split(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    """Constrains an activation."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def trained(loss: Callable[[Tree, Tree], jax.Array], params: Tree, batch: Tree) -> Any:
    """A step of SGD with momentum on `loss(params, batch)`."""

    def step(params: Tree, momentum: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - _RATE * m, params, momentum), momentum, value

    return automesh.Workload(step, (params, params, batch), donate_argnums=(0, 1))
