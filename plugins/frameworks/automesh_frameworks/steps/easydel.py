"""EasyDeL's own training step, unmodified, on the mesh of a plan (jax).

The arguments are those of its training command, `python -m easydel.scripts.elarge --config FILE`: a
YAML file of eLarge with a model, its sharding and a trainer. The model is made from its
`config.json`, abstract: no weights are read. The jitted step, its static arguments and what it
donates come from the trainer's `configure_functions`, the shardings of the state from
`EasyDeLState.shard_state`; the sizes of the mesh and the knobs below are put in for each plan.

The batch stays the one that the file names: rows of one update = `total_batch_size` x
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
# Trainers whose step is `Trainer.configure_functions`, of a state and a batch alone.
_TRAINERS = ("sft", "base")
# A schedule is made for a number of steps. That of a data set is not known here.
_STEPS = 10_000
# What a search may divide by, of the model's own configuration; experts under their first name.
_FACTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The parts of eLarge's file that a step depends on, and the types that list their keys.
_PARTS = {
    "model": "ModelCfg",
    "loader": "LoaderCfg",
    "sharding": "ShardingCfg",
    "platform": "PlatformCfg",
    "base_config": "BaseCfg",
}
# What its loader hands on to a model's configuration.
_PLACED = (
    "sharding_axis_dims",
    "sharding_dcn_axis_dims",
    "sharding_axis_names",
    "backend",
    "platform",
)
# Importing EasyDeL sets flags of compilers, of which a newer XLA that does not know one ends the
# process, and starts a cluster where it sees one: in a process that has its devices already.
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


# What is used of each of the modules.
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
    # What is imported here changes jax's cache here, and not in the midst of a build.
    "easydel.trainers": ("SFTTrainer", "Trainer"),
    "flax.nnx": ("Module", "Rngs"),
}
# Where a file names a model of the hub, in the place of a folder.
_OF_THE_HUB = {"huggingface_hub": ("try_to_load_from_cache",)}


@cache
def _easydel() -> _EasyDeL:
    """Looks up all that is used of EasyDeL, in one place.

    Raises:
      UsageError: it is not installed whole, or with versions that it does not work with.
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
    """Puts back what EasyDeL sets for the whole process.

    These are variables of the environment and, with each function that it jits, the folder of jax's
    compilation cache.
    """
    directory = _cache_directory()
    try:
        with kept_environment():
            yield
    finally:
        if _cache_directory() != directory:
            # jax opens its cache once and keeps to it.
            compilation_cache.reset_cache()
            jax.config.update("jax_compilation_cache_dir", directory)


def _cache_directory() -> str | None:
    config: Any = jax.config
    return config.jax_compilation_cache_dir


def build(
    mesh: Mesh, gradient_checkpointing: str = "", gradient_accumulation_steps: int = 0
) -> Workload:
    """EasyDeL's training step on `mesh`.

    Args:
      mesh: axes as the file names them, in any order; those that are not in it have one device.
      gradient_checkpointing: which activations are kept, in EasyDeL's words, or `none` for all;
        empty for that of the file.
      gradient_accumulation_steps: microbatches of one update; 0 for those of the file.

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
            # Its trainer enters the mesh itself, of which jax would have `jax.set_mesh` instead.
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
    """The file of eLarge that the arguments name, as its training command takes it.

    Raises:
      UsageError: they name none, or something else besides.
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
    """The user's settings with eLarge's defaults, read again where the file has changed.

    Raises:
      UsageError: EasyDeL refuses them, or has no such keys.
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
    """Refuses a key that EasyDeL would leave unread without a word.

    Raises:
      UsageError: names it.
    """
    for key in keys:
        if key not in known:
            raise UsageError(
                f"EasyDeL has no key `{key}` in {where}{did_you_mean(key, sorted(known))}",
                hint=f"its keys there are: {', '.join(sorted(known))}",
            )


def _folder(name: str) -> str:
    """The folder with the model's configuration: its own, or that of the hub's local cache.

    Raises:
      UsageError: it is in none of them.
    """
    if (Path(name) / _CONFIG).is_file():
        return str(Path(name).resolve())
    (hub,) = import_used(_SELF, _OF_THE_HUB).values()
    try:
        cached = hub.try_to_load_from_cache(name, _CONFIG)
    except ValueError:  # It cannot be the name of a repository.
        cached = None
    if not isinstance(cached, str):
        raise UsageError(
            f"the configuration of the model `{name}` is not here, and a search downloads nothing",
            hint=f"name a folder with its {_CONFIG}, or run `hf download {name} {_CONFIG}`",
        )
    return str(Path(cached).parent)


def _training(settings: dict[str, Any]) -> tuple[str, Any]:
    """The kind of the trainer, and its arguments.

    Raises:
      UsageError: its step is not known here, or EasyDeL refuses its arguments.
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
        # It would connect the processes of a cluster, and a search has done so.
        return kind, elarge.build_training_arguments(jax_distributed_config=None)


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """Says in a sentence what EasyDeL does not like.

    Raises:
      UsageError: an exception of EasyDeL's.
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
    """The settings with the mesh and the knobs of a plan.

    Raises:
      UsageError: the rows of an update do not divide into so many microbatches.
    """
    plan = copy.deepcopy(asked)
    # Every size, so that no default fills one in.
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
    """A model's configuration, and what its class is called with besides."""

    config: Any
    kind: Any
    types: dict[str, Any]

    def abstract(self, mesh: Mesh) -> Any:
        """The model without arrays, as its loader makes it before it reads weights."""
        # In the place of meshes that it would make of all devices of jax.
        self.config.set_model_mesh(mesh)
        explicit = whole_mesh(mesh, mesh.axis_names, _WHOSE, AxisType.Explicit)
        self.config.set_explicit_mesh(explicit)
        self.config.set_manual_mesh(whole_mesh(mesh, mesh.axis_names, _WHOSE, AxisType.Manual))
        return self.kind.lazy_init(config=self.config, rngs=_easydel().nnx.Rngs(0), **self.types)


def _model(settings: dict[str, Any]) -> _Model:
    """The configuration of the model, as its loader makes it.

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
    """Which activations the model keeps, in the words of the knob."""
    policy = config.gradient_checkpointing
    return str(getattr(policy, "value", policy) or _NO_REMAT)


@contextlib.contextmanager
def _calls_kept(base: type) -> Generator[dict[type, Any]]:
    """Undoes what the body changes in the classes of modules: says which `__call__`s it has set.

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
    """The `__call__`s of one plan, while the body traces or runs its step."""
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
    """The `__call__` that each subclass itself has, None where it inherits one."""
    found: dict[type, Any] = {}
    rest = [base]
    while rest:
        kind = rest.pop()
        if kind not in found:
            found[kind] = vars(kind).get("__call__")
            rest += type.__subclasses__(kind)
    return found


def _trainer(kind: str, arguments: Any, model: Any, mesh: Mesh) -> Any:
    """EasyDeL's trainer with an abstract state: all that `configure_functions` asks for.

    Its own constructor reads the data set and puts the state on devices.
    """
    trainer_class = _easydel().training.get_trainer_class(kind)
    trainer = trainer_class.__new__(trainer_class)
    # It makes a folder for checkpoints, and something that writes them.
    arguments.ensure_checkpoint_path = lambda: None
    arguments._im_a_hidden_checkpoint_manager = object()
    trainer.arguments = arguments
    trainer.pruning_module = arguments.pruning_module
    trainer.max_training_steps = _steps(arguments)
    trainer._train_shared_fn_extra_args_ = ()
    trainer._model = model
    # The trainer sets what its arguments say of the model with the state: it comes before the rest.
    trainer.model_state = model.to_state()
    with _refusals():  # Of what a schedule needs.
        configured = trainer.configure_model()
    trainer.tx, trainer.scheduler = configured.tx, configured.scheduler
    trainer.model_state = _abstract(
        trainer.model_state, configured.tx, model._get_partition_rules(None), mesh
    )
    trainer.state_shardings = trainer.model_state.shardings
    return trainer


def _steps(arguments: Any) -> int:
    """Training steps in total: the schedule of the learning rate needs them."""
    per_epoch = arguments.per_epoch_training_steps
    by_epochs = per_epoch * arguments.num_train_epochs if per_epoch else _STEPS
    return int(arguments.max_training_steps or by_epochs)


def _abstract(state: Any, tx: Any, rules: Any, mesh: Mesh) -> Any:
    """The state with an optimizer, without arrays, and with the shardings that EasyDeL gives it.

    Raises:
      UsageError: this version places its state in another way.
    """
    # As weights are loaded: all of them have one type.
    graph = jax.tree.map(lambda leaf: _struct(leaf, state.model.param_dtype), state.graphstate)
    state = state.replace(graphstate=graph, step=jax.ShapeDtypeStruct((), jnp.int32))
    state = state.replace(tx=tx, opt_state=jax.eval_shape(tx.init, graph))
    state = jax.tree.map(_struct, state)
    # Its own function puts arrays on devices: traced, it says where to.
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
    """An array as what there is to know of it; with `floats` for the type of its numbers."""
    dtype = leaf.dtype
    if floats is not None and jnp.issubdtype(dtype, jnp.inexact):
        dtype = floats
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False))


def _batch_keys(kind: str, arguments: Any) -> tuple[str, ...]:
    """What a batch consists of, all as rows of token positions.

    The base trainer takes what the data set has; those of token ids and a mask are meant here.
    """
    if kind == "sft" and arguments.packing:
        # Of its two packers, the one for `wrapped` gives no mask.
        masks = ("attention_mask",) if arguments.packing_strategy == "bfd" else ()
        return ("input_ids", *masks, "segment_ids")
    masked = ("completion_mask", "labels") if getattr(arguments, "assistant_only_loss", 0) else ()
    return ("input_ids", "attention_mask", *masked)


def _facts(config: Any) -> dict[str, int]:
    """Numbers of the model that a search may divide by; a dense model has one expert."""
    text = getattr(config, "text_config", config)
    found = {name: getattr(text, name, None) for name in _FACTS}
    experts = [getattr(text, name, None) for name in _EXPERTS]
    found["num_experts"] = next((count for count in experts if isinstance(count, int)), 1)
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _baseline(asked: dict[str, Any], mesh: Mesh) -> str | None:
    """Mesh and knobs of the user's own file, as text; None if the space lacks an axis.

    Between granules EasyDeL lies the first axis that their number divides, whatever
    `dcn_axis_dims` says: which one that is, is plain where one axis is used.
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
