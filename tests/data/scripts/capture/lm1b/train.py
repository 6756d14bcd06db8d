"""The mesh of a config, logical axis rules, and a TrainState that is made where it belongs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass
class Config:
    """What lm1b reads from ml_collections."""

    num_train_steps: int = 4
    per_device_batch_size: int = 2
    max_length: int = 16
    learning_rate: float = 1e-3
    mesh_axes: tuple = ("data", "fsdp", "tensor")
    data_sharding: tuple = ("data", "fsdp")
    logical_axis_rules: tuple = (
        ("activation_batch", ("data", "fsdp")),
        ("activation_embed", "tensor"),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
        ("mlp", "tensor"),
    )
    ici_data_parallelism: int = 1
    ici_fsdp_parallelism: int = -1
    ici_tensor_parallelism: int = 1


def create_device_mesh(config):
    parallelism = [
        config.ici_data_parallelism,
        config.ici_fsdp_parallelism,
        config.ici_tensor_parallelism,
    ]
    rest = -np.prod(parallelism)
    parallelism[parallelism.index(-1)] = jax.device_count() // rest
    assert np.prod(parallelism) == jax.device_count()
    return mesh_utils.create_device_mesh(parallelism)


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": dropout_rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "step": state.step}


def eval_step(params, batch, *, model):
    logits = model.apply({"params": params}, batch["inputs"], deterministic=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def init_state(rng, model, tx, config, batch_size):
    tokens = jnp.ones((batch_size, config.max_length), jnp.int32)
    params = model.init(rng, tokens, deterministic=True)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_and_evaluate(config):
    mesh = Mesh(create_device_mesh(config), config.mesh_axes)
    batch_size = config.per_device_batch_size * jax.device_count()
    model = models.TransformerLM(vocab=64, embed=32, mlp=64, layers=2)
    tx = optax.adamw(config.learning_rate)
    rng = jax.random.key(0)
    rng, init_rng, dropout_rng = jax.random.split(rng, 3)

    init_fn = functools.partial(
        init_state, model=model, tx=tx, config=config, batch_size=batch_size
    )
    abstract_state = jax.eval_shape(init_fn, init_rng)
    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        logical = nn.get_partition_spec(abstract_state)
        state_sharding = nn.logical_to_mesh_sharding(logical, mesh, config.logical_axis_rules)
        state = jax.jit(init_fn, out_shardings=state_sharding)(init_rng)
        state = nn.unbox(state)
        data_sharding = NamedSharding(mesh, P(config.data_sharding))
        jit_train_step = jax.jit(
            train_step,
            in_shardings=(state_sharding, data_sharding, None),
            out_shardings=(state_sharding, None),
            donate_argnums=(0,),
        )
        jit_eval_step = jax.jit(eval_step, static_argnames=("model",))
        for step, batch in enumerate(batches(config, batch_size, data_sharding)):
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = jit_train_step(state, batch, dropout_rng)
            if step % 2 == 0:
                evaluated = jit_eval_step(state.params, batch, model=model)
                print(f"step {step}: {float(metrics['loss']):.4f}, {float(evaluated):.4f}")


def batches(config, batch_size, sharding):
    rng = np.random.default_rng(0)
    for _ in range(config.num_train_steps):
        tokens = rng.integers(0, 64, (batch_size, config.max_length + 1), np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        yield jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(sharding, array), batch
        )
