"""Gradient descent with warm-up and clipping by global norm: what keeps no state per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lm.adamw import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Hyperparameters; `warmup` counts steps."""

    learning_rate: float = 0.3
    warmup: int = 10
    clip: float = 1.0


def update(state: State, gradients: Any, optimizer: SGD) -> State:
    """One step of the optimizer."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    shrink = jnp.minimum(1.0, optimizer.clip / (norm + 1e-6))
    count = state.count + 1
    rate = _rate(count, optimizer) * shrink
    params = jax.tree.map(lambda p, g: p - rate * g, state.params, gradients)
    return state._replace(params=params, count=count)


def _rate(count: jax.Array, optimizer: SGD) -> jax.Array:
    return optimizer.learning_rate * jnp.minimum(1.0, count.astype(jnp.float32) / optimizer.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclipped:
    """The same optimizer for gradients that are clipped already, in the form of optax's; its state
    is the number of steps taken."""

    optimizer: SGD

    def init(self, _: Any) -> jax.Array:
        """No steps taken yet."""
        return jnp.zeros((), jnp.int32)

    def update(self, gradients: Any, state: jax.Array, _: Any) -> tuple[Any, jax.Array]:
        """What is added to the parameters, and the new state."""
        count = state + 1
        rate = _rate(count, self.optimizer)
        return jax.tree.map(lambda g: -rate * g, gradients), count
