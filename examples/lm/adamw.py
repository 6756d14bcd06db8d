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
    """Parameters, running mean and running square of their gradients (None where an optimizer keeps
    none), and the steps taken."""

    params: Any
    mean: Any
    square: Any
    count: jax.Array


def update(state: State, gradients: Any, optimizer: AdamW) -> State:
    """One step of the optimizer; matrices of the layers decay, norms, embedding and head do not."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    shrink = jnp.minimum(1.0, optimizer.clip / (norm + 1e-6))
    taken, new = _steps(state, gradients, optimizer, shrink)
    return new._replace(params=jax.tree.map(jnp.subtract, state.params, taken))


def _steps(
    state: State, gradients: Any, optimizer: AdamW, shrink: jax.Array | float
) -> tuple[Any, State]:
    """What is taken from the parameters, and the state with its moments brought up to date."""
    count = state.count + 1
    steps = count.astype(jnp.float32)
    rate = optimizer.learning_rate * jnp.minimum(1.0, steps / optimizer.warmup)

    def mean_of(mean: jax.Array, gradient: jax.Array) -> jax.Array:
        return optimizer.mean_decay * mean + (1 - optimizer.mean_decay) * gradient * shrink

    def square_of(square: jax.Array, gradient: jax.Array) -> jax.Array:
        decay = optimizer.square_decay
        return decay * square + (1 - decay) * jnp.square(gradient * shrink)

    def taken(param: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        unbiased_mean = mean / (1 - optimizer.mean_decay**steps)
        unbiased_square = square / (1 - optimizer.square_decay**steps)
        direction = unbiased_mean / (jnp.sqrt(unbiased_square) + optimizer.epsilon)
        decay = optimizer.weight_decay if param.ndim > 2 else 0.0
        return rate * (direction + decay * param)

    mean = jax.tree.map(mean_of, state.mean, gradients)
    square = jax.tree.map(square_of, state.square, gradients)
    away = jax.tree.map(taken, state.params, mean, square)
    return away, State(params=state.params, mean=mean, square=square, count=count)


class Moments(NamedTuple):
    """Running mean and running square of gradients, and the steps taken."""

    mean: Any
    square: Any
    count: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclipped:
    """The same optimizer for gradients that are clipped already, in the form of optax's: what
    `automesh.pipeline.train_step` takes, which clips by the norm over all stages."""

    optimizer: AdamW

    def init(self, params: Any) -> Moments:
        """No steps taken yet."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(mean=zeros, square=zeros, count=jnp.zeros((), jnp.int32))

    def update(self, gradients: Any, state: Moments, params: Any) -> tuple[Any, Moments]:
        """What is added to the parameters, and the new state."""
        away, new = _steps(State(params, *state), gradients, self.optimizer, 1.0)
        added = jax.tree.map(jnp.negative, away)
        return added, Moments(mean=new.mean, square=new.square, count=new.count)
