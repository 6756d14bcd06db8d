"""A trainer of two products and a descent along their gradients."""

import contextlib
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn.common.config import REQUIRED, ClassConfig, ConfigBase, maybe_instantiate
from axlearn.common.summary_writer import SummaryWriter
from axlearn.common.utils import get_data_dir


class TrainerState(NamedTuple):
    prng_key: Any
    model: Any


class _Spec(SimpleNamespace):
    """Shape, dtype and sharding of a parameter."""


class _Dispatcher:
    def __init__(self, cfg, mesh, axes):
        self.parts = 1
        for name in axes:
            self.parts *= mesh.shape[name]
        if cfg.global_logical_batch_size % self.parts:
            raise ValueError(
                f"attempts to divide batch over num_partitions={self.parts}, which is "
                f"incompatible with {cfg.global_logical_batch_size=}."
            )

    def logical_to_physical_shapes(self, shapes):
        return dict(shapes)


class _Input:
    def __init__(self, cfg, mesh, axes):
        if get_data_dir() != "FAKE":
            raise FileNotFoundError("a stand-in has no data")
        self.config = cfg
        self.input_dispatcher = _Dispatcher(cfg.input_dispatcher, mesh, axes)
        self.children = {"input_dispatcher": self.input_dispatcher}

    def element_spec(self):
        shape = (self.config.input_dispatcher.global_logical_batch_size, self.config.length)
        return {"input_ids": jax.ShapeDtypeStruct(shape, jnp.int32)}


class SpmdTrainer:
    @classmethod
    def default_config(cls):
        decoder = ConfigBase(dim=16, vocab_size=32, transformer=REQUIRED)
        return ClassConfig(
            cls,
            dir=REQUIRED,
            input=ConfigBase(input_dispatcher=ConfigBase(global_logical_batch_size=16), length=8),
            summary_writer=ClassConfig(SummaryWriter, dir="summaries"),
            mesh_shape=REQUIRED,
            mesh_axis_names=REQUIRED,
            mesh_rules=None,
            batch_axis_names=("data", "expert", "fsdp", "seq"),
            model=ConfigBase(decoder=decoder),
            learner=ConfigBase(forward_fn_transformation=None),
            checkpointer=ConfigBase(),
            evalers={},
            init_state_builder=None,
            context_manager=None,
            learning_rate=1e-3,
        )

    def __init__(self, cfg, *, parent, devices=None):
        assert parent is None
        self.config = cfg
        self._mesh = Mesh(devices, cfg.mesh_axis_names)
        self._context_manager = cfg.context_manager or contextlib.nullcontext
        cfg.summary_writer.instantiate()
        self.input = _Input(cfg.input, self._mesh, cfg.batch_axis_names)
        dim, layer = cfg.model.decoder.dim, cfg.model.decoder.transformer.layer
        shapes = {
            "emb": ((cfg.model.decoder.vocab_size, dim), ()),
            "up": ((dim, layer.feed_forward.hidden_dim), ("fsdp", "model")),
            "down": ((layer.feed_forward.hidden_dim, dim), ("model", "fsdp")),
        }
        self._trainer_state = None
        self._state_specs = TrainerState(
            prng_key=self._spec((4,), (), jnp.uint32),
            model={name: self._spec(*how, jnp.float32) for name, how in shapes.items()},
        )

    @property
    def trainer_state_specs(self):
        return self._state_specs

    @property
    def trainer_state(self):
        return self._trainer_state

    def init(self, prng_key):
        def make(key):
            model = jax.tree.map(
                lambda spec: jax.random.normal(key, spec.shape, spec.dtype),
                self._state_specs.model,
            )
            return TrainerState(prng_key=key, model=model)

        shardings = jax.tree.map(lambda spec: spec.sharding, self._state_specs)
        self._trainer_state = jax.jit(make, out_shardings=shardings)(prng_key)

    def _spec(self, shape, axes, dtype):
        sharding = NamedSharding(self._mesh, PartitionSpec(*axes))
        return _Spec(shape=list(shape), dtype=dtype, sharding=sharding)

    def mesh(self):
        return Mesh(self._mesh.devices, self._mesh.axis_names)

    def _train_step_input_partition_specs(self):
        return self._mesh, PartitionSpec(self.config.batch_axis_names)

    def _pjit_train_step(self):
        state = jax.tree.map(lambda spec: spec.sharding, self.trainer_state_specs)
        batch = {"input_ids": NamedSharding(*self._train_step_input_partition_specs())}
        return jax.jit(
            self._train_step,
            in_shardings=(state, batch),
            out_shardings=(state, None),
            donate_argnums=(0,),
        )

    def _train_step(self, state, batch):
        spec = self.config.model.decoder.transformer.layer.remat_spec
        steps = maybe_instantiate(self.config.learner.forward_fn_transformation) or 1

        def layer(params, rows):
            rows = jax.lax.with_sharding_constraint(rows, PartitionSpec(("data", "fsdp")))
            return jnp.tanh(checkpoint_name(rows @ params["up"], "linear1")) @ params["down"]

        if spec is not None:
            policy = maybe_instantiate(spec.policy)
            layer = jax.checkpoint(layer, prevent_cse=spec.prevent_cse, policy=policy)

        def loss(params, ids):
            rows = params["emb"][ids]
            return jnp.mean((layer(params, rows) - rows) ** 2)

        ids = batch["input_ids"]
        parts = ids.reshape(ids.shape[0] // steps, steps, -1).swapaxes(0, 1)
        value, gradients = jax.lax.scan(
            lambda _, part: (None, jax.value_and_grad(loss)(state.model, part)), None, parts
        )[1]
        rate = self.config.learning_rate
        model = jax.tree.map(lambda p, g: p - rate * g.mean(0), state.model, gradients)
        key = jax.random.split(state.prng_key, 2)[0]
        return TrainerState(prng_key=key, model=model), {"loss": value.mean()}


def select_mesh_config(trainer_config, *, mesh_selector):
    for pattern, shape in trainer_config.mesh_rules or ():
        if re.fullmatch(pattern, mesh_selector):
            trainer_config.mesh_shape = shape
            return
