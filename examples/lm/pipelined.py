"""Training steps as pipelines: the layers dealt to the stages that lie along the mesh axis pp."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import automesh
from automesh import pipeline
from lm import adamw, sgd, text, training
from lm.layout import Layout, Weight
from lm.presets import Preset


def num_stages(mesh: Mesh, virtual_stages: int) -> int:
    """Stages of the model: `virtual_stages` on each rank of pp; 1 without a pipeline."""
    ranks = mesh.shape.get("pp", 1)
    return ranks * virtual_stages if ranks > 1 else 1


def mesh_of_stage(mesh: Mesh) -> Mesh | AbstractMesh:
    """What a stage lies on: any submesh along pp, or the mesh itself."""
    return pipeline.MpmdMesh(mesh).abstract_mesh if mesh.shape.get("pp", 1) > 1 else mesh


def workload(
    loss: training.Loss,
    plan: Any,
    size: Preset,
    *,
    mesh: Mesh,
    layout: Layout,
    stages: int,
    schedule: str,
    microbatches: int,
    facts: dict[str, int],
) -> automesh.Workload:
    """The workload of `training.workload`, run as a pipeline.

    Args:
      layout: of a stage.
      stages: how many, at least 2.
    """
    step = pipeline.train_step(
        loss,
        optimizer=_unclipped(size.optimizer),
        mesh=mesh,
        schedule=schedule,
        num_microbatches=microbatches,
        clip_norm=size.optimizer.clip,
    )
    params = _dealt(training.abstract_params(plan, layout), _shares(plan, stages), stages)
    batch = training.abstract_batch(size.rows, size.length, layout)

    def init(_: Mesh) -> tuple[Any, dict[str, np.ndarray]]:
        step.compile(params, batch)  # With these shardings; arrays of the host have none.
        values = training.initial_params(plan)
        values["layers"] = pipeline.split_layers(values["layers"], stages)
        return step.init(values, batch), next(text.batches(size.rows, size.length))

    return automesh.Workload(
        step=step,
        args=(step.abstract_state(params, batch), batch),
        init=init,
        facts=facts,
        tokens_per_step=size.rows * size.length,
    )


def _unclipped(optimizer: training.Optimizer) -> adamw.Unclipped | sgd.Unclipped:
    if isinstance(optimizer, sgd.SGD):
        return sgd.Unclipped(optimizer=optimizer)
    return adamw.Unclipped(optimizer=optimizer)


def _shares(plan: dict[str, Any], stages: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one stage's weights."""

    def share(weight: Weight) -> tuple[int, ...]:
        layers, *rest = weight.shape
        if layers % stages:
            raise ValueError(f"{layers} layers cannot be divided evenly over {stages} stages")
        return (layers // stages, *rest)

    return {name: share(weight) for name, weight in plan["layers"].items()}


def _dealt(
    params: dict[str, Any], shares: dict[str, tuple[int, ...]], stages: int
) -> dict[str, Any]:
    """The abstract parameters with a tree of layers for each stage."""
    one = {
        name: jax.ShapeDtypeStruct(shares[name], like.dtype, sharding=like.sharding)
        for name, like in params["layers"].items()
    }
    return {**params, "layers": (one,) * stages}
