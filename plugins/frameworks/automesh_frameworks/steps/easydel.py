"""EasyDeL's own training step, unmodified, on the mesh of a plan (jax).

The arguments are those of its training command, `python -m easydel.scripts.elarge --config FILE`: a
YAML file of eLarge with a model, its sharding and a trainer. The model is made from its
`config.json`, with abstract arrays: no weights are read. The jitted step, its static arguments and
its donated arguments come from the trainer's `configure_functions`, the shardings of the state from
`EasyDeLState.shard_state`. Each plan sets the sizes of the mesh and the knobs below.

The batch is the one that the file names: rows of one update = `total_batch_size` x
`gradient_accumulation_steps`. A plan with another accumulation has smaller or larger microbatches.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, did_you_mean
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import first_lines, import_used, kept_environment
from automesh_frameworks.steps.meshes import spans_granules, whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_SELF = FRAMEWORKS["easydel"]
_WHOSE = "EasyDeL's mesh"
_REMAT, _NO_REMAT = "gradient_checkpointing", "none"
_ACCUMULATION, _BATCH = "gradient_accumulation_steps", "total_batch_size"
_CONFIG = "config.json"
# Trainers with the step of `Trainer.configure_functions`, whose arguments are a state and a batch.
_TRAINERS = ("sft", "base")
# A schedule needs the number of steps, which depends on the data set; the data set is not read.
_STEPS = 10_000
# Sizes in the model's configuration that a search may divide by; the number of experts under the
# first name that exists.
_FACTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The parts of eLarge's file that affect a step, and the types that define their keys.
_PARTS = {
    "model": "ModelCfg",
    "loader": "LoaderCfg",
    "sharding": "ShardingCfg",
    "platform": "PlatformCfg",
    "base_config": "BaseCfg",
}
# The keys that its loader passes to a model's configuration.
_PLACED = (
    "sharding_axis_dims",
    "sharding_dcn_axis_dims",
    "sharding_axis_names",
    "backend",
    "platform",
)
# Variables that stop two side effects of the import of EasyDeL: it sets compiler flags, which end
# the process if a newer XLA does not know them, and it starts a cluster where it detects one, in a
# process that already has its devices.
_SWITCHED_OFF = ("EASYDEL_AUTO", "ENABLE_DISTRIBUTED_INIT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _EasyDeL:
    """The functions and classes of EasyDeL that the step is made from."""

    model: Any
    model_kwargs: Any
    resolve_task: Any
    types: Any
    training: Any
    auto: Any
    causal_lm: Any
    policies: Any
    nnx: Any


# The names that are used of each module.
_USED = {
    "easydel": (),
    "easydel.infra.elarge.model": ("eLargeModel",),
    "easydel.infra.elarge.builders": ("to_from_pretrained_kwargs",),
    "easydel.infra.elarge.processing": ("resolve_task",),
    "easydel.infra.elarge.types": ("eLMConfig", *_PARTS.values()),
    "easydel.infra.elarge.types.training": ("get_trainer_class", "get_training_arguments_class"),
    "easydel.modules.auto.auto_configuration": ("AutoEasyDeLConfig", "get_modules_by_type"),
    "easydel.infra.factory": ("TaskType",),
    "easydel.infra.etils": ("EasyDeLGradientCheckPointers",),
    # Modules that change jax's cache when they are imported are imported here, and not during a
    # build.
    "easydel.trainers": ("SFTTrainer", "Trainer"),
    "flax.nnx": ("Module", "Rngs"),
}
# The function that finds files of the hub, for a configuration that names a model of the hub
# instead of a folder.
_OF_THE_HUB = {"huggingface_hub": ("try_to_load_from_cache",)}


@cache
def _easydel() -> _EasyDeL:
    """Looks up everything that is used of EasyDeL, in one place.

    Raises:
      UsageError: EasyDeL is not completely installed, or does not work with the installed versions
        of other packages.
    """
    with _kept_settings():
        os.environ |= dict.fromkeys(_SWITCHED_OFF, "0")
        found = import_used(_SELF, _USED)
    model, builders, processing, types, training, auto, factory, etils, _, nnx = list(
        found.values()
    )[1:]
    return _EasyDeL(
        model=model.eLargeModel,
        model_kwargs=builders.to_from_pretrained_kwargs,
        resolve_task=processing.resolve_task,
        types=types,
        training=training,
        auto=auto,
        causal_lm=factory.TaskType.CAUSAL_LM,
        policies=etils.EasyDeLGradientCheckPointers,
        nnx=nnx,
    )


@contextlib.contextmanager
def _kept_settings() -> Generator[None]:
    """Restores the settings that EasyDeL changes for the whole process.

    These are variables of the environment and, with each function that it jits, the folder of jax's
    compilation cache.
    """
    directory = _cache_directory()
    try:
        with kept_environment():
            yield
    finally:
        if _cache_directory() != directory:
            # jax opens its cache once and then keeps it.
            compilation_cache.reset_cache()
            jax.config.update("jax_compilation_cache_dir", directory)


def _cache_directory() -> str | None:
    config: Any = jax.config
    return config.jax_compilation_cache_dir


def build(
    mesh: Mesh, gradient_checkpointing: str = "", gradient_accumulation_steps: int = 0
) -> Workload:
    """Builds EasyDeL's training step on `mesh`.

    Args:
      mesh: axes with the names in the file, in any order; missing ones have one device.
      gradient_checkpointing: which activations are kept, by EasyDeL's names, or `none` for all;
        empty for the value in the file.
      gradient_accumulation_steps: microbatches of one update; 0 for the number in the file.

    Raises:
      UsageError: EasyDeL is not installed, or refuses its arguments.
    """
    with _kept_settings():
        asked = _asked(_file(sys.argv[1:]))
        trainer_type, arguments = _training(asked)
        rows = arguments.total_batch_size * arguments.gradient_accumulation_steps
        names = tuple(asked["sharding"]["axis_names"])
        whole = whole_mesh(mesh, names, _WHOSE)
        plan = _plan(asked, whole, rows, gradient_checkpointing, gradient_accumulation_steps)
        _, arguments = _training(plan)
        model = _model(plan)
        with _refusals(), _calls_kept(_easydel().nnx.Module) as calls:
            module = model.abstract(whole)
        trainer = _trainer(trainer_type, arguments, module, whole)
        step = trainer.configure_functions().sharded_training_step_function
        baseline = _baseline(asked, mesh)
    if not hasattr(step, "lower"):
        raise UsageError(
            "EasyDeL keeps compiled programs on disk itself, in the place of jitted functions",
            hint="unset EASYDEL_CACHE_COMPILES: a search compiles each of its programs once",
        )

    @contextlib.contextmanager
    def context() -> Generator[None]:
        with _kept_settings(), _calls_in_place(calls), contextlib.ExitStack() as entered:
            # Its trainer enters the mesh with `with mesh`, while jax recommends `jax.set_mesh`.
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                entered.enter_context(whole)
            yield

    length = int(arguments.max_length)
    batch = {
        key: jax.ShapeDtypeStruct(
            (rows, length), jnp.int32, sharding=NamedSharding(whole, PartitionSpec())
        )
        for key in _batch_keys(trainer_type, arguments)
    }
    return Workload(
        step,
        (
            trainer.model_state,
            batch,
            *trainer._train_shared_fn_extra_args,
            *trainer._train_shared_fn_static_args,
        ),
        context=context,
        baseline=baseline,
        facts={"batch": rows, "max_length": length, **_facts(model.config)},
        tokens_per_step=rows * length,
    )


def _file(argv: Sequence[str]) -> Path:
    """Returns the file of eLarge that the arguments name, as for its training command.

    Raises:
      UsageError: the arguments name no file, or have something else.
    """
    found: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--config", "-c") and rest:
            found.append(rest.pop(0))
        elif word.startswith("--config="):
            found.append(word.partition("=")[2])
        elif not word.startswith("-"):
            found.append(word)
        else:
            raise UsageError(
                f"`{word}` is not an argument of EasyDeL's eLarge that a step depends on",
                hint=f"write `-- {_SELF.example}`",
            )
    if len(found) != 1:
        raise UsageError(
            f"EasyDeL's eLarge takes one file of settings, and {len(found)} are named",
            hint=f"write `-- {_SELF.example}`",
        )
    path = Path(found[0])
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of settings for EasyDeL",
            hint="name the YAML file that `python -m easydel.scripts.elarge --config` takes",
        )
    return path


def _asked(path: Path) -> dict[str, Any]:
    """Returns the user's settings with eLarge's defaults; the file is read again if it has changed.

    Raises:
      UsageError: EasyDeL refuses them, or does not have such keys.
    """
    return copy.deepcopy(_read(path.resolve(), path.stat().st_mtime_ns))


@cache
def _read(path: Path, changed_ns: int) -> dict[str, Any]:
    del changed_ns
    easydel = _easydel()
    with _refusals():
        elarge = easydel.model.from_yaml(path)
        elarge.validate()
        own: dict[str, Any] = elarge.to_dict()
    known = set(easydel.types.eLMConfig.__annotations__)
    for part, value in own.items():
        _check_keys("the file", [part], known | {"reward_model"})
        if part in _PARTS and isinstance(value, Mapping):
            types = getattr(easydel.types, _PARTS[part])
            _check_keys(f"`{part}`", value, set(types.__annotations__))
    own["model"]["name_or_path"] = _folder(str(own["model"]["name_or_path"]))
    if easydel.resolve_task(own) != easydel.causal_lm:
        raise UsageError(
            f"EasyDeL trains this model for {easydel.resolve_task(own)!s}, whose batches are not "
            "known here",
            hint="name a causal language model",
        )
    if own.get("quantization", {}).get("apply_quantization"):
        raise UsageError(
            "weights that EasyDeL quantizes when it loads them are not known before",
            hint="search without `quantization.apply_quantization`",
        )
    return own


def _check_keys(where: str, keys: Sequence[str] | Mapping[str, Any], known: set[str]) -> None:
    """Checks for unknown keys, which EasyDeL would silently ignore.

    Raises:
      UsageError: names the unknown key.
    """
    for key in keys:
        if key not in known:
            raise UsageError(
                f"EasyDeL has no key `{key}` in {where}{did_you_mean(key, sorted(known))}",
                hint=f"its keys there are: {', '.join(sorted(known))}",
            )


def _folder(name: str) -> str:
    """Returns the folder with the model's configuration: its own, or the one in the local cache of
    the hub.

    Raises:
      UsageError: neither exists.
    """
    if (Path(name) / _CONFIG).is_file():
        return str(Path(name).resolve())
    (hub,) = import_used(_SELF, _OF_THE_HUB).values()
    try:
        cached = hub.try_to_load_from_cache(name, _CONFIG)
    except ValueError:  # The name cannot be that of a repository.
        cached = None
    if not isinstance(cached, str):
        raise UsageError(
            f"the configuration of the model `{name}` is not here, and a search downloads nothing",
            hint=f"name a folder with its {_CONFIG}, or run `hf download {name} {_CONFIG}`",
        )
    return str(Path(cached).parent)


def _training(settings: dict[str, Any]) -> tuple[str, Any]:
    """Returns the kind of the trainer, and its arguments.

    Raises:
      UsageError: this module does not know its step, or EasyDeL refuses its arguments.
    """
    easydel = _easydel()
    with _refusals():
        elarge = easydel.model(settings)
        kind = str(elarge.get_trainer_config()["trainer_type"])
    if kind not in _TRAINERS:
        raise UsageError(
            f"the step of EasyDeL's trainer `{kind}` is not searched: it takes more than a state "
            "and a batch",
            hint=f"set `trainer_type` to one of: {', '.join(_TRAINERS)}",
        )
    with _refusals():
        known = {one.name for one in fields(easydel.training.get_training_arguments_class(kind))}
        own = dict(elarge.to_dict().get("trainer") or {})
        own.pop("trainer_type", None)
        _check_keys("`trainer`", own, known | {"max_sequence_length", "quantization_block"})
        # Otherwise it would connect the processes of a cluster, which a search has done already.
        return kind, elarge.build_training_arguments(jax_distributed_config=None)


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """Turns exceptions of EasyDeL into a sentence.

    Raises:
      UsageError: EasyDeL has raised an exception.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - its arguments are at fault
        raise UsageError(
            f"EasyDeL refuses its arguments: {first_lines(error)}",
            hint="give what `python -m easydel.scripts.elarge --config` takes",
        ) from None


def _plan(
    asked: dict[str, Any], mesh: Mesh, rows: int, remat: str, accumulation: int
) -> dict[str, Any]:
    """Returns the settings with the mesh and the knobs of a plan.

    Raises:
      UsageError: the rows of an update cannot be divided into so many microbatches.
    """
    plan = copy.deepcopy(asked)
    # Every size is given, so that EasyDeL uses no default.
    plan["sharding"] |= {"axis_dims": tuple(mesh.devices.shape), "dcn_axis_dims": None}
    if remat:
        values = plan.setdefault("base_config", {}).setdefault("values", {})
        values[_REMAT] = "" if remat == _NO_REMAT else remat
    if accumulation:
        if rows % accumulation:
            raise UsageError(
                f"{rows} rows of an update do not divide into {accumulation} microbatches",
                hint=f"write a constraint on {_ACCUMULATION} that divides `batch`",
            )
        plan["trainer"] = {**(plan.get("trainer") or {}), _BATCH: rows // accumulation}
        plan["trainer"][_ACCUMULATION] = accumulation
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model's configuration, and the other arguments of its class."""

    config: Any
    kind: Any
    types: dict[str, Any]

    def abstract(self, mesh: Mesh) -> Any:
        """Makes the model without arrays, as its loader makes it before it reads weights."""
        # Otherwise it would make meshes of all devices of jax.
        self.config.set_model_mesh(mesh)
        explicit = whole_mesh(mesh, mesh.axis_names, _WHOSE, AxisType.Explicit)
        self.config.set_explicit_mesh(explicit)
        self.config.set_manual_mesh(whole_mesh(mesh, mesh.axis_names, _WHOSE, AxisType.Manual))
        return self.kind.lazy_init(config=self.config, rngs=_easydel().nnx.Rngs(0), **self.types)


def _model(settings: dict[str, Any]) -> _Model:
    """Makes the configuration of the model, as its loader does.

    Raises:
      UsageError: EasyDeL refuses it.
    """
    easydel = _easydel()
    with _refusals():
        given = easydel.model_kwargs(settings)
        task = easydel.resolve_task(settings)
        placed = {name: given[name] for name in _PLACED}
        config = easydel.auto.AutoEasyDeLConfig.from_pretrained(
            settings["model"]["name_or_path"],
            partition_axis=given["partition_axis"],
            model_task=task,
            **placed,
        )
        config.add_basic_configurations(
            partition_axis=config.partition_axis, **placed, **given["config_kwargs"]
        )
        kind = easydel.auto.get_modules_by_type(config.model_type, task)[1]
    known = {str(one.value) or _NO_REMAT for one in easydel.policies}
    if (policy := _policy(config)) not in known:
        raise UsageError(
            f"EasyDeL has no {_REMAT} `{policy}`{did_you_mean(policy, sorted(known))}",
            hint=f"write one of: {', '.join(sorted(known))}",
        )
    return _Model(
        config=config,
        kind=kind,
        types={
            "dtype": given["dtype"],
            "param_dtype": given["param_dtype"],
            "precision": given["precision"] or jax.lax.Precision("fastest"),
        },
    )


def _policy(config: Any) -> str:
    """Returns which activations the model keeps, as a value of the knob."""
    policy = config.gradient_checkpointing
    return str(getattr(policy, "value", policy) or _NO_REMAT)


@contextlib.contextmanager
def _calls_kept(base: type) -> Generator[dict[type, Any]]:
    """Restores the classes of modules that the body changes; yields the `__call__`s that it has
    set.

    EasyDeL rematerializes by replacing the `__call__` of a layer's class, once in a process:
    without this, every plan would have the policy of the first one.
    """
    before = _calls_of(base)
    changed: dict[type, Any] = {}
    try:
        yield changed
    finally:
        now = _calls_of(base)
        changed |= {kind: call for kind, call in now.items() if before.get(kind, call) is not call}
        _set_calls({kind: before[kind] for kind in changed})


@contextlib.contextmanager
def _calls_in_place(calls: Mapping[type, Any]) -> Generator[None]:
    """Sets the `__call__`s of one plan while the body traces or runs its step."""
    before = {kind: vars(kind).get("__call__") for kind in calls}
    _set_calls(calls)
    try:
        yield
    finally:
        _set_calls(before)


def _set_calls(calls: Mapping[type, Any]) -> None:
    for kind, call in calls.items():
        if call is not None:
            type.__setattr__(kind, "__call__", call)
        elif "__call__" in vars(kind):
            type.__delattr__(kind, "__call__")


def _calls_of(base: type) -> dict[type, Any]:
    """Returns the `__call__` of each subclass itself; None for one that inherits it."""
    found: dict[type, Any] = {}
    rest = [base]
    while rest:
        kind = rest.pop()
        if kind not in found:
            found[kind] = vars(kind).get("__call__")
            rest += type.__subclasses__(kind)
    return found


def _trainer(kind: str, arguments: Any, model: Any, mesh: Mesh) -> Any:
    """Makes EasyDeL's trainer with an abstract state, as far as `configure_functions` needs it.

    Its own constructor reads the data set and puts the state on devices.
    """
    trainer_class = _easydel().training.get_trainer_class(kind)
    trainer = trainer_class.__new__(trainer_class)
    # Its constructor would make a folder for checkpoints and an object that writes them.
    arguments.ensure_checkpoint_path = lambda: None
    arguments._im_a_hidden_checkpoint_manager = object()
    trainer.arguments = arguments
    trainer.pruning_module = arguments.pruning_module
    trainer.max_training_steps = _steps(arguments)
    trainer._train_shared_fn_extra_args_ = ()
    trainer._model = model
    # The trainer changes the model by its arguments when it gets the state, so the state comes
    # first.
    trainer.model_state = model.to_state()
    with _refusals():  # Arguments of the schedule may be missing.
        configured = trainer.configure_model()
    trainer.tx, trainer.scheduler = configured.tx, configured.scheduler
    trainer.model_state = _abstract(
        trainer.model_state, configured.tx, model._get_partition_rules(None), mesh
    )
    trainer.state_shardings = trainer.model_state.shardings
    return trainer


def _steps(arguments: Any) -> int:
    """Returns the number of training steps, which the schedule of the learning rate needs."""
    per_epoch = arguments.per_epoch_training_steps
    by_epochs = per_epoch * arguments.num_train_epochs if per_epoch else _STEPS
    return int(arguments.max_training_steps or by_epochs)


def _abstract(state: Any, tx: Any, rules: Any, mesh: Mesh) -> Any:
    """Makes the state with an optimizer, without arrays, and with EasyDeL's shardings.

    Raises:
      UsageError: this version shards its state in another way.
    """
    # All of them get one type, as when weights are loaded.
    graph = jax.tree.map(lambda leaf: _struct(leaf, state.model.param_dtype), state.graphstate)
    state = state.replace(graphstate=graph, step=jax.ShapeDtypeStruct((), jnp.int32))
    state = state.replace(tx=tx, opt_state=jax.eval_shape(tx.init, graph))
    state = jax.tree.map(_struct, state)
    # EasyDeL's own function puts arrays on devices; a trace of it shows their shardings.
    closed, placed = jax.make_jaxpr(
        lambda given: given.shard_state(partition_rules=rules, mesh=mesh), return_shape=True
    )(state)
    shardings = {
        id(variable): sharding
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "device_put"
        for variable, sharding in zip(equation.outvars, equation.params["devices"], strict=True)
    }
    leaves, structure = jax.tree.flatten(placed)
    found = [shardings.get(id(variable)) for variable in closed.jaxpr.outvars]
    if not all(isinstance(one, NamedSharding) for one in found):
        raise UsageError(
            "the installed EasyDeL places the state of a training in a way that is not known here",
            hint=f"this adapter was tried with {_SELF.seen_in}: install that version",
        )
    return jax.tree.unflatten(
        structure,
        [
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=sharding,
                weak_type=getattr(leaf, "weak_type", False),
            )
            for leaf, sharding in zip(leaves, found, strict=True)
        ],
    )


def _struct(leaf: Any, floats: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the description of an array; `floats` replaces the type of floats."""
    dtype = leaf.dtype
    if floats is not None and jnp.issubdtype(dtype, jnp.inexact):
        dtype = floats
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False))


def _batch_keys(kind: str, arguments: Any) -> tuple[str, ...]:
    """Returns the keys of a batch, all of which are rows of token positions.

    The base trainer takes the keys of the data set; here they are token ids and a mask.
    """
    if kind == "sft" and arguments.packing:
        # EasyDeL has two packers; the one for `wrapped` returns no mask.
        masks = ("attention_mask",) if arguments.packing_strategy == "bfd" else ()
        return ("input_ids", *masks, "segment_ids")
    masked = ("completion_mask", "labels") if getattr(arguments, "assistant_only_loss", 0) else ()
    return ("input_ids", "attention_mask", *masked)


def _facts(config: Any) -> dict[str, int]:
    """Returns sizes of the model that a search may divide by; a dense model has one expert."""
    text = getattr(config, "text_config", config)
    found = {name: getattr(text, name, None) for name in _FACTS}
    experts = [getattr(text, name, None) for name in _EXPERTS]
    found["num_experts"] = next((count for count in experts if isinstance(count, int)), 1)
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _baseline(asked: dict[str, Any], mesh: Mesh) -> str | None:
    """Returns mesh and knobs of the user's own file, as text; None if the space lacks an axis.

    EasyDeL puts the first axis that is a multiple of the number of granules between the granules,
    whatever `dcn_axis_dims` says. Which axis this is, is certain if only one is used.
    """
    sharding = asked["sharding"]
    used = [
        (name, int(size))
        for name, size in zip(sharding["axis_names"], sharding["axis_dims"], strict=True)
        if size != 1
    ]
    if not used or any(name not in mesh.axis_names for name, _ in used):
        return None
    parts = [f"{name}:{size}" for name, size in used]
    if spans_granules():
        if len(used) > 1:
            return None
        parts = [f"dcn.{used[0][0]}:-1", f"{used[0][0]}:-1"]
    _, arguments = _training(asked)
    knobs = {
        _REMAT: _policy(_model(asked).config),
        _ACCUMULATION: arguments.gradient_accumulation_steps,
    }
    return " ".join([",".join(parts), *(f"{name}={value}" for name, value in knobs.items())])
