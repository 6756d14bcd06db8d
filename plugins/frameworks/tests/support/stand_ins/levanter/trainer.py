"""A trainer: settings, a state, and a step that goes down along the gradients of microbatches."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import equinox
import haliax
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.partitioning import named_jit

from levanter.tracker import current_tracker
from levanter.utils.mesh import MeshConfig


@dataclass
class WatchConfig:
    interval: int = 10

    @property
    def is_enabled(self):
        return self.interval > 0

    def build(self):
        return lambda state: haliax.sum(state.model.up**2).scalar()


@dataclass
class TrainerConfig:
    seed: int = 0
    id: str | None = None
    wandb: object = None
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    use_explicit_mesh_axes: bool = False
    batch_axis_name: str | None = "batch"
    train_batch_size: object = 512
    per_device_parallelism: int = -1
    num_train_steps: int = 100
    load_checkpoint: bool | None = None
    initialize_from: str | None = None
    jax_config: dict = dataclasses.field(
        default_factory=lambda: {"jax_threefry_partitionable": True}
    )

    compute_axis_mapping = property(lambda self: self.mesh.resolved_compute_mapping)
    parameter_axis_mapping = property(lambda self: self.mesh.resolved_param_mapping)

    @property
    def device_mesh(self):
        raise AssertionError("a mesh of `jax.devices()`")

    @property
    def data_axis_size(self):
        ici, dcn = self.mesh.axis_shapes(jax.device_count(), 1)
        return math.prod({**ici, **dcn}[name] for name in self.compute_axis_mapping["batch"])

    @property
    def microbatch_size(self):
        return self.per_device_parallelism * self.data_axis_size


class TrainerState(equinox.Module):
    step: jax.Array
    model: object
    training_key: jax.Array
    optimizer: object = equinox.field(static=True)


class StepResult(equinox.Module):
    loss: jax.Array
    new_state: TrainerState
    watched: jax.Array | None


class Trainer:
    def __init__(self, config, optimizer, loss_fn, *, add_default_hooks=True):
        assert not add_default_hooks, "these write checkpoints"
        self.config, self.optimizer, self.loss_fn = config, optimizer, loss_fn
        self.tracker = current_tracker()
        self.hooks = SimpleNamespace(jit_hooks=[])
        self._managers = []

    device_mesh = property(lambda self: self.config.device_mesh)
    compute_axis_mapping = property(lambda self: self.config.compute_axis_mapping)
    parameter_axis_mapping = property(lambda self: self.config.parameter_axis_mapping)

    def add_hook(self, hook, *, every):
        self.hooks.jit_hooks.append((hook, every))

    def __enter__(self):
        if self._managers:
            raise RuntimeError("Trainer is already entered")
        self._managers = [
            current_tracker(self.tracker),
            haliax.partitioning.set_mesh(self.device_mesh),
            haliax.axis_mapping(self.parameter_axis_mapping),
        ]
        for one in self._managers:
            one.__enter__()
        return self

    def __exit__(self, *args):
        for one in reversed(self._managers):
            one.__exit__(*args)
        self._managers = []

    def initial_state(self, training_key, *, model_init):
        assert self.config.load_checkpoint is False and self.config.initialize_from is None
        mapping = self.parameter_axis_mapping

        @named_jit(axis_resources=mapping, out_axis_resources=mapping)
        def initial(key):
            return TrainerState(jnp.array(0), model_init(), key, self.optimizer)

        return initial(training_key)

    @functools.cached_property
    def _jit_train_step_fn(self):
        return self._jitted(self._train_step)

    @functools.cached_property
    def _jit_train_step_fn_no_hook(self):
        return self._jitted(functools.partial(self._train_step, _no_hooks=True))

    def _jitted(self, step):
        mapping = self.parameter_axis_mapping
        return named_jit(
            step, axis_resources=mapping, out_axis_resources=mapping, donate_args=(True,)
        )

    def _train_step(self, state, batch, batch_kwargs, _no_hooks=False):
        (example,) = batch
        rows = example.tokens.resolve_axis("batch")
        parts = Axis("part", rows.size // self.config.microbatch_size)
        smaller = rows.resize(self.config.microbatch_size)

        @equinox.filter_value_and_grad
        def gradients_of(model, part):
            with haliax.axis_mapping(self.compute_axis_mapping):
                return haliax.mean(self.loss_fn(model, part, key=state.training_key)).scalar()

        with haliax.axis_mapping(self.compute_axis_mapping):
            split = haliax.auto_sharded(
                haliax.tree_util.tree_map(
                    lambda leaf: leaf.unflatten_axis(rows, (parts, smaller)), example
                )
            )
            loss, gradients = haliax.map(lambda part: gradients_of(state.model, part), parts)(split)
        rate = self.optimizer.learning_rate
        moved = haliax.tree_util.tree_map(
            lambda leaf, gradient: (
                leaf - rate * haliax.mean(gradient, parts)
                if isinstance(leaf, haliax.NamedArray)
                else leaf
            ),
            state.model,
            gradients,
        )
        state = TrainerState(state.step + 1, moved, state.training_key + 1, state.optimizer)
        watched = None if _no_hooks else self.hooks.jit_hooks[0][0](state)
        return StepResult(jnp.mean(loss.array if hasattr(loss, "array") else loss), state, watched)
