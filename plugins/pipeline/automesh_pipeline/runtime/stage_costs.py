"""Measures the costs of the stages of a compiled pipeline on their devices (jax)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from automesh.errors import UsageError
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.costs import StageCost
from automesh_pipeline.runtime.compiled import CompiledPipeline


def measure_costs(compiled: CompiledPipeline, *, repeats: int = 5) -> tuple[StageCost, ...]:
    """Times every program and transfer of a pipeline by itself; `simulate` needs these times.

    Args:
      compiled: a pipeline; its devices should be idle.
      repeats: how often each is timed, after one run to warm up; the median counts.

    Returns:
      The costs of each stage; 0 for programs that the pipeline does not run. The forward pass of a
      last stage that recomputes is part of its backward pass.

    Raises:
      UsageError: `repeats` is less than 1, or the stages belong to several processes.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import create_mesh, pipeline
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> loss = pipeline.chain([layer, layer], lambda y, batch: jnp.mean(y**2))
      >>> step = pipeline.microbatch(
      ...     loss, mesh=create_mesh((2, 4), ("pp", "dp")), num_microbatches=4
      ... )
      >>> compiled = step.compile((jnp.eye(4), jnp.eye(4)), jnp.ones((8, 4)))
      >>> costs = pipeline.measure_costs(compiled)
      >>> costs[0].forward_s > 0, costs[1].forward_s, costs[1].activation_bytes
      (True, 0.0, 32)
      >>> pipeline.simulate(compiled.schedule, costs).makespan_s > 0
      True
    """
    if repeats < 1:
        raise UsageError(f"`repeats` is at least 1, got {repeats}")
    if compiled.stages.transfers.spans:
        raise UsageError("the stages are on several processes, and none of them can time all")
    return tuple(_stage_cost(compiled, stage, repeats) for stage in range(len(compiled.meshes)))


def _stage_cost(compiled: CompiledPipeline, stage: int, repeats: int) -> StageCost:
    def seconds(kind: ActionKind) -> float:
        program = compiled.programs.get((stage, kind))
        return 0.0 if program is None else _time_program(compiled, stage, kind, repeats)

    return StageCost(
        forward_s=seconds("F"),
        backward_s=seconds("B"),
        input_gradient_s=seconds("I"),
        weight_gradient_s=seconds("W"),
        to_next_s=_time_sends(compiled, stage, repeats, forward=True),
        to_previous_s=_time_sends(compiled, stage, repeats, forward=False),
        activation_bytes=compiled.activation_bytes[stage],
    )


def _time_program(compiled: CompiledPipeline, stage: int, kind: ActionKind, repeats: int) -> float:
    stages = compiled.stages
    program, shapes = compiled.programs[stage, kind], stages.shapes[stage]
    params, batch, inputs = (
        tuple(map(_ones, likes)) for likes in (shapes.params, shapes.batch, shapes.inputs)
    )
    if kind == "F":
        return _median(lambda: program(params, batch, inputs), repeats)
    saved = tuple(map(_ones, shapes.saved))
    gradients = jax.tree.map(_ones, shapes.gradients)
    sums: list[Any] = [stages.zeros[stage]() if kind != "I" else ()]

    def call() -> Any:
        # The sums are donated, so the next call gets the results.
        added, *others = program(params, batch, inputs, saved, gradients, sums[0])
        sums[0] = added
        return added, others

    return _median(call, repeats)


def _time_sends(compiled: CompiledPipeline, stage: int, repeats: int, *, forward: bool) -> float:
    """Returns the seconds for everything that a stage sends on or back for one microbatch."""
    total = 0.0
    for transfer in compiled.transfers:
        if transfer.from_stage == stage and (transfer.kind == "F") == forward:
            array, sharding = _ones(transfer.source), transfer.target.sharding
            total += _median(
                lambda array=array, sharding=sharding: jax.device_put(array, sharding), repeats
            )
    return total


def _median(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())
    seconds: list[float] = []
    for _ in range(repeats):
        begun = perf_counter()
        jax.block_until_ready(call())
        seconds.append(perf_counter() - begun)
    return statistics.median(seconds)


def _ones(like: Any) -> Any:
    return jax.device_put(jnp.ones(like.shape, like.dtype), like.sharding)
