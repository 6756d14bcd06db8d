"""Tunix's own step of supervised fine-tuning, unmodified, on the mesh of a plan (jax).

The arguments are those of its training command, `python -m tunix.cli.peft_main config.yaml
key=value ...`; Tunix's own loader reads them. The step is the jitted one of its `PeftTrainer`: full
fine-tuning, or LoRA with `model_config.lora_config`. The model is Tunix's own, with abstract
arrays: nothing is downloaded.

Tunix accumulates gradients over several calls of its step: the step that is searched is one call,
with the `batch_size` rows of a microbatch. So every plan has the accumulation of the arguments: a
plan with half the rows in a call would look twice as fast, but need twice the calls.

The weights have the type in which the public checkpoints are kept, bfloat16. The optimizer's state
has the types that it has after Tunix's first call, with which all later calls run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, did_you_mean
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import import_used, kept_environment
from automesh_frameworks.steps.meshes import whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_SELF = FRAMEWORKS["tunix"]
_COMMAND = "peft_main"
_MODEL, _TRAINING, _OPTIMIZER = "model_config", "training_config", "optimizer_config"
_REMAT = "remat_config"
# Tunix looks for a file of that name, with its defaults, in the folder of its code; its wheel does
# not contain the file.
_BASE = "base_config.yaml"
# Tunix asks for a token of Hugging Face if the tokenizer is there; a step needs none.
_FIXED = "tokenizer_config.tokenizer_type=sentencepiece"
# Keys of files that a training would write; a step needs none of them.
_WRITTEN = (
    "checkpoint_root_directory",
    "checkpointing_options",
    "metrics_logging_options",
    "perf_metrics_options",
    "profiler_options",
)
# The keys, with their defaults, that `peft_main` passes to a model if they are settings of the
# model.
_SETTINGS: Mapping[str, Any] = {
    "use_flash_attention": False,
    "flash_attention_block_size": 1024,
    _REMAT: 1,
}
_SOURCES = ("huggingface", "kaggle", "gcs")
# Models that Tunix converts from Kaggle's files, without any of these settings.
_CONVERTED = ("gemma", "gemma1p1", "gemma2")
# Models whose loader keeps the types of their own description.
_OWN_TYPES = ("gemma3",)
_QUANTIZED = "weight_qtype"
# Sizes, and their names in the settings of Tunix's models.
_FACTS: Mapping[str, Sequence[str]] = {
    "embed_dim": ("embed_dim",),
    "hidden_dim": ("hidden_dim",),
    "num_layers": ("num_layers",),
    "num_heads": ("num_heads",),
    "num_kv_heads": ("num_kv_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size", "num_embed"),
    "num_experts": ("num_experts",),
}
# The names that are used of each module.
_USED = {
    "tunix": (),
    "tunix.cli.config": ("HyperParameters",),
    "tunix.cli.utils.model": ("apply_lora_to_model",),
    "tunix.models.automodel": ("ModelModule", "call_model_config", "get_model_module"),
    "tunix.models.naming": ("ModelNaming",),
    "tunix.sft.peft_trainer": ("PeftTrainer", "TrainingConfig", "TrainingInput"),
    "tunix.sft.sharding_utils": ("get_sharding",),
    "tunix.sft.utils": ("build_positions_from_mask", "make_causal_attn_mask"),
    "flax.nnx": ("eval_shape", "get_partition_spec", "merge", "split", "state"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tunix:
    """The modules of Tunix that the step is made from."""

    config: Any
    model: Any
    automodel: Any
    naming: Any
    trainer: Any
    sharding: Any
    inputs: Any
    nnx: Any


@cache
def _tunix() -> _Tunix:
    """Looks up everything that is used of Tunix, in one place.

    Raises:
      UsageError: Tunix is not completely installed, or is another version that lacks one of the
        names.
    """
    found = list(import_used(_SELF, _USED).values())[1:]
    config, model, automodel, naming, trainer, sharding, inputs, nnx = found
    return _Tunix(
        config=config,
        model=model,
        automodel=automodel,
        naming=naming,
        trainer=trainer,
        sharding=sharding,
        inputs=inputs,
        nnx=nnx,
    )


def build(mesh: Mesh, remat_config: int = 0) -> Workload:
    """Builds Tunix's training step on `mesh`.

    Args:
      mesh: axes of `model_config.mesh.axis_names`, in any order; missing ones have one device.
      remat_config: the parts that are computed again in the backward pass: 1 nothing, 2 attention
        and feed-forward blocks, 3 whole layers; 0 for that of the arguments.

    Raises:
      UsageError: Tunix is not installed, or refuses its arguments, or cannot split its model so.
    """
    asked = _asked(tuple(sys.argv[1:]))
    whole = whole_mesh(mesh, asked.axis_names, "Tunix's mesh")
    settings = asked.settings(remat_config)
    trainer = _trainer(asked, settings, whole)
    step, args = _step(trainer)
    return Workload(
        step,
        (*args, _batch(asked, whole)),
        context=lambda: _in_force(whole),
        baseline=asked.baseline(mesh),
        facts=asked.facts(settings),
        tokens_per_step=asked.rows * asked.length,
    )


@contextlib.contextmanager
def _in_force(whole: Mesh) -> Generator[None]:
    """Sets the mesh as Tunix's training does, where its models look it up; `jax.set_mesh` sets it
    elsewhere."""
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(whole)
        yield


def _step(trainer: Any) -> tuple[Any, tuple[Any, Any]]:
    """Returns the trainer's step as it jits it, and the states of its model and its optimizer.

    `nnx.jit`, which Tunix calls, splits both into states before `jax.jit`, and joins them inside.
    This function does the same explicitly, so that the arguments and results of `jax.jit` are these
    states. The program is the same.
    """
    nnx = _tunix().nnx
    train_step, _ = trainer.jit_train_and_eval_step(skip_jit=True)
    graphs, states = zip(*map(nnx.split, (trainer.model, trainer.optimizer)), strict=True)

    @functools.wraps(train_step)
    def step(model_state: Any, optimizer_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        model, optimizer = map(nnx.merge, graphs, (model_state, optimizer_state))
        told = train_step(model, optimizer, batch)
        return nnx.state(model), nnx.state(optimizer), told

    # Only the optimizer's state is donated, as in Tunix.
    return jax.jit(step, donate_argnums=1), states


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The user's arguments, as Tunix reads them.

    Attributes:
      hyper: Tunix's own object.
      name: Tunix's name of the model.
      own: the settings of the model of that name, before the arguments change them.
      sizes: the sizes of the mesh in the arguments.
      rows: the rows of one call of the step.
    """

    hyper: Any
    name: Any
    own: Any
    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: int
    length: int

    @property
    def model(self) -> Mapping[str, Any]:
        return self.hyper.config[_MODEL]

    @property
    def lora(self) -> Mapping[str, Any]:
        return self.model.get("lora_config") or {}

    def settings(self, remat_config: int) -> Any:
        """Returns the model's settings for a plan; 0 stands for the remat of the arguments."""
        if self.name.model_family in _CONVERTED:
            return self.own
        known = {one.name for one in dataclasses.fields(self.own)}
        given = {name: self.model.get(name, default) for name, default in _SETTINGS.items()}
        if remat_config:
            given[_REMAT] = remat_config
        return dataclasses.replace(
            self.own, **{name: value for name, value in given.items() if name in known}
        )

    def facts(self, settings: Any) -> dict[str, int]:
        found = {"batch": self.rows, "max_target_length": self.length}
        for fact, names in _FACTS.items():
            values = [getattr(settings, name, None) for name in names]
            found[fact] = next((int(value) for value in values if value), 1)
        if rank := self.lora.get("rank"):
            found["lora_rank"] = int(rank)
        return found

    def baseline(self, mesh: Mesh) -> str | None:
        """Returns mesh and knobs of the arguments, as text; None if they are for another number of
        devices, or if the space lacks an axis."""
        used = {n: s for n, s in zip(self.axis_names, self.sizes, strict=True) if s != 1}
        if math.prod(self.sizes) != jax.device_count() or not used.keys() <= {*mesh.axis_names}:
            return None
        sizes = ",".join(f"{name}:{size}" for name, size in used.items())
        return f"{sizes} {_REMAT}={self.model.get(_REMAT, _SETTINGS[_REMAT])}" if sizes else None


@cache
def _asked(argv: tuple[str, ...]) -> _Asked:
    """Reads the user's arguments, once, because Tunix is slow to read them.

    Raises:
      UsageError: Tunix refuses them, or a search does not support them.
    """
    tunix = _tunix()
    if not argv or "=" in argv[0]:
        raise UsageError(
            "the arguments do not begin with Tunix's file of settings",
            hint=f"write it first, as its training command does: `-- {_SELF.example}`",
        )
    for one in argv[1:]:
        if "=" not in one:
            raise UsageError(
                f"`{one}` is not an argument of Tunix",
                hint=f"write `key=value` after the file, as in `-- {_SELF.example}`",
            )
    with kept_environment():  # Tunix loads a file `.env`, if there is one above its code.
        hyper = _told(lambda: tunix.config.HyperParameters([_COMMAND, *argv, _FIXED]), argv)
    model = hyper.config[_MODEL]
    if (source := model.get("model_source")) not in _SOURCES:
        raise UsageError(
            f"the model of `model_config.model_source={source}` is not Tunix's own",
            hint="search MaxText's step with `automesh search maxtext`"
            if source == "maxtext"
            else f"take one of {', '.join(_SOURCES)}",
        )
    if _QUANTIZED in (model.get("lora_config") or {}):
        raise UsageError(
            f"a base model that is quantized (`model_config.lora_config.{_QUANTIZED}`) is not "
            "taken: how its parts are split is only known once it is loaded",
            hint=f"leave `{_QUANTIZED}` out",
        )
    name = _told(lambda: tunix.naming.ModelNaming(model_id=model["model_id"]), argv)
    own = _told(lambda: tunix.automodel.call_model_config(name.model_name), argv)
    sizes, names = _told(lambda: hyper.parse_mesh_config(_MODEL), argv)
    return _Asked(
        hyper=hyper,
        name=name,
        own=own,
        axis_names=names,
        sizes=sizes,
        rows=_count(hyper, "batch_size"),
        length=_count(hyper, "max_target_length"),
    )


def _told(call: Callable[[], Any], argv: Sequence[str] = ()) -> Any:
    """Calls a function of Tunix, and returns its result.

    Raises:
      UsageError: Tunix refuses its arguments; has the reason.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - any error here is caused by the arguments
        said = " ".join(str(error).split())[:600] or type(error).__name__
        raise UsageError(f"Tunix refuses its arguments: {said}", hint=_hint(said, argv)) from None


def _hint(said: str, argv: Sequence[str]) -> str:
    if argv and said.startswith("Config ") and "not found" in said:
        if argv[0] == _BASE:
            return (
                f"the package has no {_BASE}: take that of Tunix's repository (tunix/cli/{_BASE}) "
                f"of the same version, and name it `./{_BASE}`"
            )
        return "name a file that is there"
    unknown = said.partition("Key ")[2].partition(" ")[0] if "isn't in config" in said else ""
    if unknown:
        return f"name a key of {argv[0]}{did_you_mean(unknown, _keys(argv[0]))}"
    return "give what `python -m tunix.cli.peft_main` takes, after `--`"


def _keys(path: str) -> tuple[str, ...]:
    """Returns the outermost keys of a file of settings."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:  # Tunix found the file in the folder of its own code.
        return ()
    return tuple(line.partition(":")[0] for line in lines if line[:1].isalpha() and ":" in line)


def _count(hyper: Any, key: str) -> int:
    value = hyper.config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UsageError(
            f"`{key}` is {value!r}, and must be a number of 1 or more", hint=f"give `{key}=NUMBER`"
        )
    return value


def _trainer(asked: _Asked, settings: Any, whole: Mesh) -> Any:
    """Makes Tunix's trainer with an abstract model and optimizer."""
    tunix = _tunix()
    nnx = tunix.nnx
    hyper = asked.hyper
    optimizer = _told(lambda: hyper.create_optimizer(_OPTIMIZER))
    given = _told(
        lambda: tunix.trainer.TrainingConfig(**hyper.obtain_training_config_dict(_TRAINING))
    )
    config = dataclasses.replace(given, **dict.fromkeys(_WRITTEN))
    model = _model(asked, settings, whole)
    found: list[Any] = []

    # The trainer makes the optimizer's state; a trace describes it.
    def make(model: Any) -> Any:
        found.append(tunix.trainer.PeftTrainer(model, optimizer, config))
        return found[0].optimizer

    # An update may change types: optax begins first moments in the type of the weights, and
    # continues in float32. Nearly all steps of a training come after the first, and their types do
    # not change.
    def update(model: Any, optimizer: Any) -> Any:
        optimizer.update(model, nnx.state(model, optimizer.wrt))
        return optimizer

    described = nnx.eval_shape(update, model, nnx.eval_shape(make, model))
    (trainer,) = found
    trainer.model = model
    trainer.optimizer = _placed(described, whole)
    return trainer.with_gen_model_input_fn(_model_inputs)


def _model(asked: _Asked, settings: Any, whole: Mesh) -> Any:
    """Returns the model as Tunix loads it, abstract, with the shardings of its weights."""
    tunix = _tunix()
    nnx = tunix.nnx
    kind = tunix.automodel.ModelModule.MODEL
    module = tunix.automodel.get_model_module(asked.name.model_name, kind)
    # Each folder of models has one class, whose name is that of the folder.
    make = getattr(module, asked.name.model_config_category.capitalize())
    model = nnx.eval_shape(lambda: make(settings, rngs=nnx.Rngs(params=0)))
    model = _placed(model, whole, None if asked.name.model_family in _OWN_TYPES else jnp.bfloat16)
    if not asked.lora:
        return model
    lora = dict(asked.lora)
    adapted = nnx.eval_shape(
        lambda base: _told(lambda: tunix.model.apply_lora_to_model(base, None, lora)), model
    )
    return _placed(adapted, whole)


def _placed(described: Any, whole: Mesh, dtype: Any = None) -> Any:
    """Gives every array of a model or an optimizer the sharding that the metadata of its variable
    contains.

    Args:
      dtype: the type of all arrays; None to keep their types.

    Raises:
      UsageError: an array cannot have its sharding.
    """
    nnx = _tunix().nnx
    graph, state = nnx.split(described)
    specs = nnx.get_partition_spec(state)

    def place(path: Any, leaf: Any, spec: Any) -> Any:
        named = [one for part in spec for one in (part if isinstance(part, tuple) else (part,))]
        if unknown := {*named} - {None, *whole.axis_names}:
            raise UsageError(
                f"Tunix's model is split over `{min(unknown)}`, which is no axis of the mesh; its "
                f"axes are {', '.join(whole.axis_names)}",
                hint="name it in `model_config.mesh.axis_names`, if only with one device",
            )
        sharding = NamedSharding(whole, spec)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            name = jax.tree_util.keystr(path)
            raise UsageError(
                f"Tunix splits {name} of the shape {leaf.shape} as {spec}, and "
                f"{dict(whole.shape)} does not divide it",
                hint="let constraints of the search space rule such meshes out",
            ) from None
        return leaf.update(sharding=sharding, dtype=leaf.dtype if dtype is None else dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, state, specs))


def _batch(asked: _Asked, whole: Mesh) -> Any:
    """Returns the rows of one call, with the sharding of Tunix's trainer."""
    tunix = _tunix()
    axes = asked.hyper.config[_TRAINING].get("data_sharding_axis", ("fsdp",))
    unknown = [name for name in axes if name is not None and name not in whole.axis_names]
    if unknown:
        raise UsageError(
            f"`training_config.data_sharding_axis` names `{unknown[0]}`, which is no axis of the "
            f"mesh; its axes are {', '.join(whole.axis_names)}",
            hint="name axes of `model_config.mesh.axis_names`",
        )
    spec = PartitionSpec(*axes)
    shape = (asked.rows, asked.length)

    def rows(dtype: Any) -> jax.ShapeDtypeStruct:
        # Tunix needs an array; this one uses no memory.
        array = np.broadcast_to(np.zeros((), dtype), shape)
        sharding = tunix.sharding.get_sharding(array, mesh=whole, pspec=spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return tunix.trainer.TrainingInput(input_tokens=rows(np.int32), input_mask=rows(np.bool_))


def _model_inputs(batch: Any) -> dict[str, Any]:
    """Returns the model's inputs for a batch as in Tunix's training command; 0 is padding."""
    inputs = _tunix().inputs
    is_token = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": inputs.build_positions_from_mask(is_token),
        "attention_mask": inputs.make_causal_attn_mask(is_token),
    }
