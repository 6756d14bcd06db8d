"""The trainer and its step."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(kw_only=True)
class TrainingConfig:
    """What a training is told."""

    eval_every_n_steps: int
    max_steps: int | None = None
    gradient_accumulation_steps: int | None = None
    checkpoint_root_directory: str | None = None
    checkpointing_options: object = None
    metrics_logging_options: object = None
    perf_metrics_options: object = None
    profiler_options: object = None
    data_sharding_axis: tuple = ("fsdp",)


@flax.struct.dataclass
class TrainingInput:
    """A batch."""

    input_tokens: jax.Array
    input_mask: jax.Array


class PeftTrainer:
    """Makes the optimizer's state when it is made, and would write what it is told to."""

    def __init__(self, model, optimizer, training_config):
        written = (training_config.checkpoint_root_directory, training_config.profiler_options)
        if any(written):
            raise RuntimeError("a search writes nothing")
        self.model = model
        kinds = {type(variable) for _, variable in nnx.iter_graph(model)}
        self.kind = nnx.LoRAParam if nnx.LoRAParam in kinds else nnx.Param
        if steps := training_config.gradient_accumulation_steps:
            optimizer = optax.MultiSteps(optimizer, steps)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=self.kind)
        self.inputs_of = None

    def with_gen_model_input_fn(self, function):
        self.inputs_of = function
        return self

    def jit_train_and_eval_step(self, skip_jit=False):
        assert skip_jit
        return self._train_step, None

    def _train_step(self, model, optimizer, inputs):
        inputs = self.inputs_of(inputs)
        targets, mask = inputs["input_tokens"], inputs.pop("input_mask")

        def loss_of(model):
            logits, _ = model(inputs["input_tokens"], inputs["positions"], None, None)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return jnp.sum(losses * mask) / jnp.sum(mask)

        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, self.kind))(model)
        optimizer.update(model, gradients)
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in jax.tree.leaves(gradients)))
        return loss, None, norm
