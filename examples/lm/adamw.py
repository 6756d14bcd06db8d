"""AdamW with warm-up and clipping by global norm (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Hyperparameters; `warmup` counts steps."""

    learning_rate: float = 3e-4
    warmup: int = 10
    mean_decay: float = 0.9
    square_decay: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


class State(NamedTuple):
    """Parameters, running mean and running square of their gradients, and the steps taken."""

    params: Any
    mean: Any
    square: Any
    count: jax.Array


def update(state: State, gradients: Any, optimizer: AdamW) -> State:
    """One step of the optimizer; matrices of the layers decay, norms, embedding and head do not."""
    count = state.count + 1
    steps = count.astype(jnp.float32)
    rate = optimizer.learning_rate * jnp.minimum(1.0, steps / optimizer.warmup)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    shrink = jnp.minimum(1.0, optimizer.clip / (norm + 1e-6))

    def mean_of(mean: jax.Array, gradient: jax.Array) -> jax.Array:
        return optimizer.mean_decay * mean + (1 - optimizer.mean_decay) * gradient * shrink

    def square_of(square: jax.Array, gradient: jax.Array) -> jax.Array:
        decay = optimizer.square_decay
        return decay * square + (1 - decay) * jnp.square(gradient * shrink)

    def moved(param: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        unbiased_mean = mean / (1 - optimizer.mean_decay**steps)
        unbiased_square = square / (1 - optimizer.square_decay**steps)
        direction = unbiased_mean / (jnp.sqrt(unbiased_square) + optimizer.epsilon)
        decay = optimizer.weight_decay if param.ndim > 2 else 0.0
        return param - rate * (direction + decay * param)

    mean = jax.tree.map(mean_of, state.mean, gradients)
    square = jax.tree.map(square_of, state.square, gradients)
    params = jax.tree.map(moved, state.params, mean, square)
    return State(params=params, mean=mean, square=square, count=count)
