"""Losses made of stages: from a list of functions, or from one layer and a count (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from automesh.errors import UsageError, WrongType, kind_of
from automesh_pipeline.runtime.split.marks import stage_boundary

Stage = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any], Any]


def chain(stages: Sequence[Stage], loss: Callable[[Any, Any], Any]) -> Loss:
    """Joins functions, each of which is a stage, to one loss for `microbatch` and `train_step`.

    Args:
      stages: functions `(weights, x) -> x`. The first gets the batch, each other one the result of
        the one before, which may have any shape.
      loss: `(x, batch) -> scalar`, part of the last stage.

    Returns:
      `(params, batch) -> scalar`, where `params` is a sequence of the stages' weights. Weights that
      two stages share are passed to both; see `microbatch`.

    Raises:
      WrongType: something is no function.
      UsageError: there are no stages; when called: not as many weights as stages.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import pipeline
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> loss = pipeline.chain([layer, layer], lambda y, batch: jnp.mean((y - batch) ** 2))
      >>> loss((jnp.eye(4), jnp.eye(4)), jnp.zeros((8, 4))).item()
      0.0
    """
    listed = list(stages)
    for one in (*listed, loss):
        if not callable(one):
            raise WrongType(f"stages and loss of a chain are functions, got {kind_of(one)}")
    if not listed:
        raise UsageError("a chain has at least 1 stage, got none")

    def run(params: Sequence[Any], batch: Any) -> Any:
        if len(params) != len(listed):
            raise UsageError(
                f"the chain has {len(listed)} stages, and weights for {len(params)} are given"
            )
        x = batch
        for number, (stage, weights) in enumerate(zip(listed, params, strict=True)):
            x = stage(weights, stage_boundary(x) if number else x)
        return loss(x, batch)

    return run


def repeat_layer(layer: Stage, num_stages: int) -> tuple[Stage, ...]:
    """Makes the stages of a model that repeats one layer.

    Args:
      layer: `(weights, x) -> x`, with `x` of one shape throughout.
      num_stages: how many stages.

    Returns:
      For each stage, a function `(weights, x) -> x` that scans the layers. The first dimension of
      the arrays of `weights` is the stage's layers, as `split_layers` cuts them.

    Raises:
      UsageError: `num_stages` is less than 1; when called: `layer` changes the shape of `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import pipeline
      >>> stages = pipeline.repeat_layer(lambda w, x: x @ w, 2)
      >>> weights = pipeline.split_layers(jnp.stack([2 * jnp.eye(3)] * 4), 2)
      >>> loss = pipeline.chain(stages, lambda y, batch: jnp.mean(y))
      >>> loss(weights, jnp.ones((1, 3))).item()
      16.0
    """
    _check_count(num_stages)

    def run(weights: Any, x: Any) -> Any:
        def one(x: Any, weights: Any) -> tuple[Any, None]:
            y = layer(weights, x)
            _check_same(x, y)
            return y, None

        return jax.lax.scan(one, x, weights)[0]

    return (run,) * num_stages


def split_layers(weights: Any, num_stages: int) -> tuple[Any, ...]:
    """Cuts the weights of all layers into the weights of each stage.

    Args:
      weights: a tree of arrays of shape `[layers, ...]`.

    Returns:
      For each stage, the same tree with arrays of shape `[layers / num_stages, ...]`.

    Raises:
      UsageError: the layers cannot be divided evenly over the stages.

    Example:
      >>> import numpy as np
      >>> from automesh import pipeline
      >>> [part["w"].shape for part in pipeline.split_layers({"w": np.ones((6, 4, 4))}, 2)]
      [(3, 4, 4), (3, 4, 4)]
    """
    _check_count(num_stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        shape = np.shape(leaf)
        if not shape or shape[0] % num_stages:
            raise UsageError(
                f"weights{jax.tree_util.keystr(path)} of shape {shape} cannot be divided evenly "
                f"over {num_stages} stages",
                hint="the layers are the first dimension, and a multiple of the stages",
            )

    def part(stage: int) -> Any:
        def cut(leaf: Any) -> Any:
            each = leaf.shape[0] // num_stages
            return leaf[stage * each : (stage + 1) * each]

        return jax.tree.map(cut, weights)

    return tuple(part(stage) for stage in range(num_stages))


def _check_count(num_stages: object) -> None:
    if not isinstance(num_stages, int) or isinstance(num_stages, bool):
        raise WrongType(f"the number of stages is an int, got {kind_of(num_stages)}")
    if num_stages < 1:
        raise UsageError(f"there is at least 1 stage, got {num_stages}")


def _check_same(x: Any, y: Any) -> None:
    def kinds(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)

    if kinds(x) != kinds(y):
        raise UsageError(
            f"the layer makes {kinds(y)} of {kinds(x)}; a layer that is repeated must return what "
            "it takes",
            hint="give layers of different shapes as stages of their own: chain([...])",
        )
