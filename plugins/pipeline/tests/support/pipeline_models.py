"""Losses with stages for the tests of running pipelines, and the single programs they equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from automesh import pipeline
from tests.support.example_runs import module

dense_lm, moe_lm = module("dense_lm"), module("moe_lm")
transformer, attention = module("lm.transformer"), module("lm.attention")
Layout = module("lm.layout").Layout

AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
WIDTH = 8


def mesh_on(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def pipeline_mesh(pp: int, **sizes: int) -> Mesh:
    """A mesh of the first devices with the axes of the examples and `pp` in front."""
    return mesh_on((pp, *(sizes.get(axis, 1) for axis in AXES[1:])), AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loss that ends its stages itself.

    Attributes:
      loss: from the mesh that its constraints refer to.
      params: arrays of the host.
      specs: a tree like `params` of PartitionSpecs.
      batch: arrays of the host.
    """

    loss: Callable[[Mesh | AbstractMesh], Callable[[Any, Any], Any]]
    params: Any
    specs: Any
    batch: Any

    def single(self) -> Callable[[Any, Any], Any]:
        """The loss on one device."""
        return self.loss(mesh_on((1,) * 5, AXES[1:]))

    @property
    def free(self) -> Callable[[Any, Any], Any]:
        """The loss of a model whose constraints refer to no mesh."""
        return self.single()

    def abstract(self, mesh: AbstractMesh) -> Any:
        """The parameters with their shardings."""
        return jax.tree.map(
            lambda array, spec: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
            ),
            self.params,
            self.specs,
        )


def perceptron(stages: int, *, rows: int = 16, tied: bool = False) -> Model:
    """A layer per stage; with `tied` the last one also reads the first one's weights."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / WIDTH**0.5

    params = [{"w": array(WIDTH, WIDTH), "b": array(WIDTH)} for _ in range(stages)]

    def make(mesh: Mesh | AbstractMesh) -> Callable[[Any, Any], Any]:
        def loss(params: Any, batch: Any) -> Any:
            x = batch["x"]
            for number, layer in enumerate(params):
                x = pipeline.stage_boundary(x) if number else x
                x = jnp.tanh(x @ layer["w"] + layer["b"])
            y = x @ params[0]["w"].T if tied else x
            return jnp.mean((y - batch["y"]) ** 2)

        return loss

    batch = {"x": array(rows, WIDTH), "y": array(rows, WIDTH)}
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
    return Model(loss=make, params=params, specs=specs, batch=batch)


def language_model(kind: str, stages: int, *, rows: int, layers: int, remat: str = "none") -> Model:
    """The examples' models at their smallest, their layers dealt to stages; embeddings tied."""
    sizes = dense_lm.SIZES if kind == "dense" else moe_lm.SIZES
    size = sizes["tiny"]
    model = replace(size.model, num_layers=layers, tied=True)
    experts = moe_lm.EXPERTS["tiny"]
    weights = (
        transformer.swiglu_weights(model)
        if kind == "dense"
        else moe_lm.expert_weights(model, experts)
    )
    plan = transformer.weights(model, weights)
    arrays = _initial(plan)
    arrays["layers"] = pipeline.split_layers(arrays["layers"], stages)
    specs = jax.tree.map(lambda weight: jax.sharding.PartitionSpec(*weight.split), plan)
    specs["layers"] = (specs["layers"],) * stages

    def make(mesh: Mesh | AbstractMesh) -> Callable[[Any, Any], Any]:
        if kind == "dense":
            layout = Layout(mesh=mesh)
            mlp: Any = partial(transformer.swiglu, layout=layout)
        else:
            layout = Layout(mesh=mesh, rows=("dp", "fsdp", "ep"), sequence=None)
            mlp = partial(moe_lm.routed, layout=layout, experts=experts)
        return partial(
            transformer.loss,
            model=model,
            layout=layout,
            plan=plan,
            attention=partial(attention.gathered_attention, layout=layout, chunk=12),
            mlp=mlp,
            remat=remat,
            adds=kind == "moe",
        )

    tokens = np.random.default_rng(1).integers(0, model.vocab, (rows, 13), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return Model(loss=make, params=arrays, specs=specs, batch=batch)


def _initial(plan: Any) -> Any:
    weights, structure = jax.tree.flatten(plan)
    arrays = [
        weight.initial(np.random.default_rng([0, number])) for number, weight in enumerate(weights)
    ]
    return jax.tree.unflatten(structure, arrays)


def single_step(model: Model, *, num_microbatches: int) -> tuple[Any, Any]:
    """Mean of value and gradients over the microbatches, in one program on one device."""
    step = jax.jit(
        pipeline.accumulate(
            jax.value_and_grad(model.single()), num_microbatches=num_microbatches, argnum=1
        )
    )
    return jax.tree.map(lambda leaf: leaf / num_microbatches, step(model.params, model.batch))


def worst(got: Any, wanted: Any) -> float:
    """The largest difference, of any array, relative to the largest value in it."""

    def of(some: Any, other: Any) -> float:
        some, other = np.asarray(some, np.float64), np.asarray(other, np.float64)
        return float(np.abs(some - other).max() / max(np.abs(other).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(of, got, wanted)))
