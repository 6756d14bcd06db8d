"""Trainers, their arguments and their step."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec


@dataclass
class TrainingArguments:
    total_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    max_length: int = 4096
    max_training_steps: int | None = None
    per_epoch_training_steps: int | None = None
    num_train_epochs: int = 10
    learning_rate: float = 5e-5
    learning_rate_end: float | None = None
    scheduler: str = "none"
    lmhead_chunksize: int | None = None
    pruning_module: object = None
    save_directory: str = "EasyDeL-Checkpoints"
    jax_distributed_config: dict | None = None
    step_partition_spec: object = PartitionSpec(("dp", "fsdp"), "sp")
    _im_a_hidden_checkpoint_manager: object = None

    def __post_init__(self):
        if self.gradient_accumulation_steps <= 0:
            raise ValueError("`gradient_accumulation_steps` can't be lower than 1.")
        if self.jax_distributed_config is not None:
            raise RuntimeError("jax.distributed.initialize() must be called first")

    def ensure_checkpoint_path(self):
        Path(self.save_directory).mkdir(parents=True)

    def get_streaming_checkpointer(self):
        if self._im_a_hidden_checkpoint_manager is None:
            (Path(self.save_directory) / "writer").mkdir(parents=True)
        return self._im_a_hidden_checkpoint_manager

    def get_optimizer_and_scheduler(self, steps):
        if self.scheduler == "none":
            schedule = optax.constant_schedule(self.learning_rate)
        elif self.learning_rate_end is None:
            raise ValueError("Linear scheduler requires learning_rate_end")
        else:
            ends = (self.learning_rate, self.learning_rate_end)
            schedule = optax.linear_schedule(*ends, steps)
        return optax.adam(schedule), schedule


@dataclass
class SFTConfig(TrainingArguments):
    packing: bool = False
    packing_strategy: str = "bfd"
    assistant_only_loss: bool = False


@dataclass
class DPOConfig(TrainingArguments):
    beta: float = 0.1


def ejit(function, **options):
    """As in EasyDeL: jax's cache of compiled programs is another one from now on."""
    jax.config.update("jax_compilation_cache_dir", "/nowhere/ejit_compiled_functions")
    return jax.jit(function, **options)


prepack = ejit(lambda weights: weights)  # As in EasyDeL: when it is imported.


def training_step(state, batch, schedule, spec, accumulation):
    batch = jax.tree.map(lambda rows: jax.lax.with_sharding_constraint(rows, spec), batch)

    def loss(tree, part):
        logits = state.merge(tree)(part["input_ids"])
        labels = part.get("labels", part["input_ids"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def one(_, part):
        return None, jax.value_and_grad(loss)(state.graphstate, part)

    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    values, gradients = jax.lax.scan(one, None, parts)[1]
    gradients = jax.tree.map(lambda g: g.mean(0), gradients)
    metrics = {"loss": values.mean(), "learning_rate": schedule(state.step)}
    return state.apply_gradients(gradients), metrics


class Trainer:
    def __init__(self, *args, **kwargs):
        raise AssertionError("the trainer reads data and puts a state on devices")

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        if name == "model_state" and self.arguments.lmhead_chunksize:
            value.model.config.lmhead_chunksize = self.arguments.lmhead_chunksize

    @property
    def model(self):
        return self._model

    @property
    def _train_shared_fn_extra_args(self):
        return self._train_shared_fn_extra_args_

    def configure_model(self):
        tx, schedule = self.arguments.get_optimizer_and_scheduler(self.max_training_steps)
        return SimpleNamespace(model=self.model, tx=tx, scheduler=schedule)

    def configure_functions(self):
        whole = NamedSharding(self.model.mesh, PartitionSpec())
        self._train_shared_fn_static_args = (
            self.scheduler,
            self.arguments.step_partition_spec,
            self.arguments.gradient_accumulation_steps,
        )
        self.arguments.ensure_checkpoint_path()
        self.arguments.get_streaming_checkpointer()
        step = ejit(
            training_step,
            static_argnums=(2, 3, 4),
            in_shardings=(self.state_shardings, whole),
            out_shardings=(self.state_shardings, whole),
            donate_argnums=(0,),
        )
        return SimpleNamespace(sharded_training_step_function=step)


class SFTTrainer(Trainer):
    pass
