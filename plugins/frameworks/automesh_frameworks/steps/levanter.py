"""Levanter's own training step, unmodified, on the mesh of a plan (jax).

The step is that of `levanter.trainer.Trainer`, with the loss of `levanter.main.train_lm`, as
Haliax' `named_jit` jits it. The arguments are those of that command, `--config_path config.yaml
--trainer.train_batch_size 256`; each plan sets the sizes of the mesh and the knobs below. The batch
has the shapes of Levanter's data loader: no data is read, and no tokenizer is downloaded.

The rows of one update are the `train_batch_size` of the arguments. A plan with another number of
microbatches has another `per_device_parallelism`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.granules import granules_of
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import import_used, kept_environment
from automesh_frameworks.steps.meshes import check_names, spans_granules, whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_SELF = FRAMEWORKS["levanter"]
_WHOSE = "Levanter's mesh"
_DCN = "_dcn"  # The suffix of an axis name for its part between slices.
_REMAT, _MICROBATCHES = "gradient_checkpointing", "microbatches"
_PASSTHROUGH = "passthrough"  # The tokenizer of data that are already tokens.
_TUNING = "LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS"
# Values of `gradient_checkpointing` that are names, as Haliax reads them.
_POLICIES = {"true": True, "false": False} | {
    name: name for name in ("offload", "recompute", "save_all", "nested")
}
# The jitted step with the extra outputs that hooks of every step read, and the one without.
_STEPS = {True: "_jit_train_step_fn", False: "_jit_train_step_fn_no_hook"}
# Sizes that a search may divide by -> their fields in Levanter's models; the first one that a model
# has counts.
_SIZES = {
    "hidden_dim": ("hidden_dim", "Embed"),
    "intermediate_dim": ("intermediate_dim", "Mlp"),
    "num_layers": ("num_layers",),
    "num_heads": ("num_heads",),
    "num_kv_heads": ("num_kv_heads", "num_heads"),
    "num_experts": ("n_routed_experts", "num_experts"),
}
_USED = {
    "levanter": (),
    "levanter.config": ("main",),
    "levanter.main.train_lm": ("TrainLmConfig",),
    "levanter.trainer": ("Trainer", "TrainerConfig"),
    "levanter.tracker": ("NoopTracker", "current_tracker"),
    "levanter.utils.mesh": ("MeshConfig", "DEFAULT_ICI_AXIS_SPEC", "DEFAULT_DCN_AXIS_SPEC"),
    "levanter.kernels.pallas.fused_cross_entropy_loss.api": ("multihost_allgather_sync",),
    "levanter.data.text.examples": ("GrugLmExample", "named_lm_example_from_grug"),
    "equinox": ("filter_eval_shape",),
    "haliax": ("Axis", "NamedArray", "ScanCheckpointPolicy"),
    "haliax.tree_util": ("tree_map",),
    "haliax.partitioning": (
        "_named_pjit_cache",
        "is_array",
        "infer_resource_partitions",
        "round_axis_for_partitioning",
        "sharding_for_axis",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levanter:
    """The modules that the step is made from."""

    config: Any
    train_lm: Any
    trainer: Any
    tracker: Any
    mesh: Any
    loss: Any
    examples: Any
    equinox: Any
    haliax: Any
    trees: Any
    partitioning: Any


@cache
def _levanter() -> _Levanter:
    """Looks up everything that is used of Levanter, in one place.

    Raises:
      UsageError: Levanter is not completely installed, or is another version that lacks one of the
        names.
    """
    modules = list(import_used(_SELF, _USED).values())[1:]
    names = [one.name for one in fields(_Levanter)]
    found = _Levanter(**dict(zip(names, modules, strict=True)))
    for name in _STEPS.values():
        if not hasattr(found.trainer.Trainer, name):
            raise UsageError(
                f"the installed Levanter has no `{name}` in `levanter.trainer.Trainer`",
                hint=f"this adapter was tried with {_SELF.seen_in}: install that version",
            )
    return found


def build(mesh: Mesh, gradient_checkpointing: str = "", microbatches: int = 0) -> Workload:
    """Builds Levanter's training step on `mesh`.

    Args:
      mesh: axes with Levanter's names, in any order; missing ones have one device.
      gradient_checkpointing: the policy of the model's layers; empty for that of the arguments.
      microbatches: number of microbatches whose gradients are summed for one update; 0 for that of
        the arguments.

    Raises:
      UsageError: Levanter is not installed, or refuses its arguments.
    """
    haliax = _levanter().haliax
    own = _arguments(sys.argv[1:])
    asked = _config(own)
    rows, (tokens, end) = _rows(asked.trainer), _tokens(asked)
    _set_jax(asked.trainer.jax_config)
    more = [
        f"--trainer.mesh.{key}={json.dumps(sizes)}"
        for key, sizes in _sizes(mesh, asked.trainer.mesh).items()
    ]
    if gradient_checkpointing:
        kind = type(asked.model).get_choice_name(type(asked.model))
        more += [f"--model.type={kind}", f"--model.{_REMAT}={gradient_checkpointing}"]
    config = _config((*own, *more))
    trainer = _trainer(config, mesh, rows, microbatches)
    positions = _positions(config)
    with _entered(trainer):
        state = _state(trainer, config.model, haliax.Axis("vocab", tokens))
        batch = _batch(trainer, config.data, positions, end)
        step, args = _taken_apart(trainer, state, batch)
    return Workload(
        step,
        args,
        advance=_advance,
        context=partial(_entered, trainer),
        baseline=_baseline(asked, mesh, rows),
        facts={"batch": rows, "seq_len": positions.size, "vocab_size": tokens}
        | _facts(config.model),
        tokens_per_step=rows * positions.size,
    )


def _set_jax(settings: Mapping[str, Any]) -> None:
    """Sets jax as Levanter's own `initialize` does, except the folder of compiled programs, which
    the search sets.

    Raises:
      UsageError: this jax has no such setting.
    """
    for name, value in settings.items():
        if "cache" in name:
            continue
        try:
            jax.config.update(name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"jax does not take `trainer.jax_config.{name}`: {' '.join(str(error).split())}",
                hint="leave it out, or install the jax that has it",
            ) from None


# The arguments.


def _arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Checks and returns the user's arguments.

    Raises:
      UsageError: they ask for help, or name a file on another machine.
    """
    for one in argv:
        if one in ("-h", "--help"):
            raise UsageError(
                f"`{one}` is no argument of a training",
                hint="ask Levanter itself: `python -m levanter.main.train_lm --help`",
            )
        if "://" in one and one.endswith((".yaml", ".yml", ".json", ".toml")):
            raise UsageError(
                f"`{one}` is not on this machine, and a search downloads nothing",
                hint="copy the configuration here, and give the path of the copy",
            )
    return tuple(argv)


def _config(argv: Sequence[str]) -> Any:
    """Returns Levanter's configuration for the user's arguments, followed by those of a plan.

    It is made once for equal arguments, and never changed.

    Raises:
      UsageError: Levanter refuses them.
    """
    # Settings cache values that they have computed from the number of devices.
    return _read(tuple(argv), jax.device_count())


@cache
def _read(argv: tuple[str, ...], device_count: int) -> Any:
    del device_count
    levanter = _levanter()

    def taken(config: Any) -> Any:
        return config

    # Levanter inspects the parameters of the function that it will call.
    taken.__annotations__ = {"config": levanter.train_lm.TrainLmConfig}
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            return levanter.config.main(taken, args=list(argv))()
    except SystemExit:  # Its parser prints the reason and ends the process.
        _, _, reason = told.getvalue().strip().rpartition(" error: ")
        known = re.findall(r"\[(--[\w.]+)", told.getvalue())
    except FileNotFoundError as error:
        raise UsageError(
            f"Levanter finds no configuration `{error.filename}`",
            hint="give the path of a YAML file after `--config_path`",
        ) from None
    except Exception as error:  # noqa: BLE001 - any error here is caused by Levanter's arguments
        cause = error.__cause__
        reason = " ".join(f"{error}{f': {cause}' if cause else ''}".split())[:600]
        known = []
    strange = re.match(r"unrecognized arguments: (--[\w.]+)", reason)
    raise UsageError(
        f"Levanter refuses its arguments: {reason}"
        + (did_you_mean(strange[1], known) if strange else ""),
        hint="give what `python -m levanter.main.train_lm` takes after `--`, "
        f"as in `-- {_SELF.example}`",
    )


def _rows(trainer: Any) -> int:
    """Returns the rows of one update.

    Raises:
      UsageError: they change during the training, or depend on a mesh that does not fit.
    """
    rows, of_device = trainer.train_batch_size, trainer.per_device_parallelism
    if not isinstance(rows, int):
        raise UsageError(
            "Levanter's `trainer.train_batch_size` is a schedule, and a search has one batch",
            hint="give one of its sizes after `--`: `--trainer.train_batch_size 512`",
        )
    if rows > 0:
        return rows
    ways = _ways(trainer)
    if of_device < 1 or not ways:
        raise UsageError(
            "Levanter's arguments do not say the rows of an update for these devices",
            hint="give them after `--`: `--trainer.train_batch_size 512`",
        )
    return of_device * ways


def _ways(trainer: Any) -> int:
    """Returns the number of parts into which a mesh splits a batch; 0 if it does not fit."""
    try:
        return trainer.data_axis_size
    except ValueError:
        return 0


def _positions(config: Any) -> Any:
    """Returns the axis along a sequence.

    Raises:
      UsageError: it is longer than the model allows.
    """
    most = config.model.max_seq_len
    length = most if config.train_seq_len is None else config.train_seq_len
    if not 0 < length <= most:
        raise UsageError(
            f"Levanter's `train_seq_len` is {length}, and the model takes 1 to {most} tokens",
            hint="change it, or `model.max_seq_len`",
        )
    return config.model.max_Pos.resize(length)


def _tokens(config: Any) -> tuple[int, int | None]:
    """Returns the size of the vocabulary, and a token that ends a document, if there is one.

    Raises:
      UsageError: they are not known, or another part of the step is not supported.
    """
    data = config.data
    if config.use_hf_model_config and config.initialize_from_hf:
        raise UsageError(
            "`use_hf_model_config` takes the model from the hub, and a search downloads nothing",
            hint="write the model's sizes into the configuration, under `model`",
        )
    if type(config.adapter).get_choice_name(type(config.adapter)) != "none":
        raise UsageError(
            "an adapter is trained (`adapter`), and this search is for the training of all weights",
            hint="give `--adapter.type none`",
        )
    if Path(data.tokenizer).is_dir() and not config.pad_tokenizer_to_match_model:
        try:
            return len(data.the_tokenizer), data.the_tokenizer.eos_token_id
        except Exception as error:  # noqa: BLE001 - for any error: the file is no tokenizer
            reason = f"cannot be read as a tokenizer ({' '.join(str(error).split())[:300]})"
    elif data.vocab_size:
        # Levanter uses it for data that are already tokens, in which no token ends a document.
        return data.vocab_size, None if data.tokenizer == _PASSTHROUGH else 0
    else:
        reason = "is not on this machine, and a search downloads nothing"
    raise UsageError(
        f"the tokenizer `{data.tokenizer}` {reason}",
        hint="say how many tokens it has with `--data.vocab_size 128256`, or give a folder with "
        "its files as `--data.tokenizer`",
    )


def _facts(model: Any) -> dict[str, int]:
    """Returns sizes of the model that a search space may divide by."""
    found = {"num_experts": 1}
    for name, places in _SIZES.items():
        value: Any = next(filter(None, (getattr(model, one, None) for one in places)), None)
        if value is not None:
            found[name] = int(getattr(value, "size", value))
    return found


# The mesh.


def _sizes(mesh: Mesh, asked: Any) -> dict[str, dict[str, int]]:
    """Returns all sizes of the mesh, `axes` and `dcn_axes`, so that Levanter uses no default.

    Args:
      asked: Levanter's settings of the mesh in the arguments.

    Raises:
      UsageError: Levanter has no such axis.
    """
    levanter = _levanter().mesh
    dcn = dict.fromkeys({**levanter.DEFAULT_DCN_AXIS_SPEC, **asked.dcn_axes}, 1)
    mapped = [asked.resolved_compute_mapping, asked.resolved_param_mapping]
    named = [
        name
        for mapping in mapped
        for axes in mapping.values()
        for name in ([axes] if isinstance(axes, str) else axes)
    ]
    ici = dict.fromkeys([*levanter.DEFAULT_ICI_AXIS_SPEC, *asked.axes, *named], 1)
    ici = {name: 1 for name in ici if name not in dcn}
    check_names(mesh, (*ici, *dcn), _WHOSE)
    for name, size in _in_parts(mesh, dcn).shape.items():
        if name in dcn:
            dcn[name] = size
        elif name in ici:
            ici[name] = size
    return {"axes": ici, "dcn_axes": dcn}


def _in_parts(mesh: Mesh, dcn: Mapping[str, int]) -> Mesh:
    """Splits an axis `replica` into `replica_dcn`, between slices or nodes, and the rest, if
    Levanter has an axis of that name."""
    shape: dict[str, int] = {}
    for place, (name, size) in enumerate(mesh.shape.items()):
        outer = f"{name}{_DCN}"
        if outer in dcn and outer not in mesh.shape:
            line = np.moveaxis(mesh.devices, place, 0).reshape(size, -1)[:, 0]
            shape[outer] = len(granules_of(list(line)))
            size //= shape[outer]
        shape[name] = size
    return Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape))


def _trainer(config: Any, mesh: Mesh, rows: int, microbatches: int) -> Any:
    """Makes Levanter's trainer on a mesh.

    Raises:
      UsageError: the batch cannot be split over the mesh.
    """
    levanter = _levanter()
    asked = config.trainer
    ici, dcn = asked.mesh.axis_shapes(mesh.size, math.prod(asked.mesh.dcn_axes.values()))
    whole = whole_mesh(
        _in_parts(mesh, dcn),
        (*ici, *dcn),
        _WHOSE,
        AxisType.Explicit if asked.use_explicit_mesh_axes else AxisType.Auto,
    )
    # Levanter computes sizes for `jax.devices()`, and lays its mesh out on them; here both are
    # given.
    sized = _derived(asked.mesh, levanter.mesh.MeshConfig, {}, axis_shapes=lambda *_: (ici, dcn))
    settings = _derived(
        asked,
        levanter.trainer.TrainerConfig,
        {
            "mesh": sized,
            "train_batch_size": rows,
            "id": "automesh",
            "wandb": None,
            "load_checkpoint": False,
            "initialize_from": None,
        },
        device_mesh=whole,
    )
    ways = settings.data_axis_size
    if microbatches or settings.per_device_parallelism < 1:
        settings.per_device_parallelism = rows // (ways * (microbatches or 1))
    of_all = settings.per_device_parallelism * ways
    if not of_all or rows % of_all or (microbatches and rows != of_all * microbatches):
        raise UsageError(
            f"an update of {rows} rows cannot be split into {microbatches or 'such'} microbatches "
            f"over {ways} devices",
            hint=f"let data*replica*{_MICROBATCHES} divide the batch in the search space",
        )
    with levanter.tracker.current_tracker(levanter.tracker.NoopTracker()):
        weight = config.z_loss_weight

        def loss(model: Any, example: Any, *, key: Any = None) -> Any:
            return model.compute_next_token_loss(example, key=key, logsumexp_weight=weight)

        trainer = levanter.trainer.Trainer(
            settings,
            config.optimizer.build(asked.num_train_steps),
            loss,
            add_default_hooks=False,
        )
    # Most steps are those without the outputs that are only read from time to time.
    if asked.watch.is_enabled and asked.watch.interval == 1:
        trainer.add_hook(asked.watch.build(), every=1)
    return trainer


def _derived(settings: Any, kind: Any, changed: Mapping[str, Any], **attributes: Any) -> Any:
    """Makes settings of a subclass with other attributes, and changes some values."""
    values = {one.name: getattr(settings, one.name) for one in fields(settings) if one.init}
    return type(kind.__name__, (kind,), attributes)(**{**values, **changed})


# The step and its arguments.


@contextlib.contextmanager
def _entered(trainer: Any) -> Generator[None]:
    """Enters the trainer's context, without waiting for other processes and without trial compiles.

    When Levanter's loss is traced, its processes agree on block sizes, and compile some of them.
    This process has the devices of all, and without this agreement Levanter uses the first size
    that compiles.
    """
    loss = _levanter().loss
    with kept_environment():
        os.environ[_TUNING] = "0"
        with _replaced(loss, multihost_allgather_sync=lambda value, **_: [value]), trainer:
            yield


@contextlib.contextmanager
def _replaced(module: Any, **names: Any) -> Generator[None]:
    """Replaces some values of a module while the body runs."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def _state(trainer: Any, model: Any, vocabulary: Any) -> Any:
    """Makes the abstract state with which a training begins. Call it inside `_entered`."""
    levanter = _levanter()
    mapping = trainer.parameter_axis_mapping
    vocabulary = levanter.partitioning.round_axis_for_partitioning(vocabulary, mapping)
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))

    def initial(model_key: Any, training_key: Any) -> Any:
        return trainer.initial_state(
            training_key, model_init=lambda: model.build(vocabulary, key=model_key)
        )

    shapes = levanter.equinox.filter_eval_shape(initial, key, key)
    shardings = levanter.partitioning.infer_resource_partitions(shapes, mapping)

    def placed(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, levanter.haliax.NamedArray):
            return levanter.haliax.NamedArray(placed(leaf.array, sharding), leaf.axes)
        is_described = isinstance(leaf, jax.ShapeDtypeStruct)
        return leaf.update(sharding=sharding) if is_described else leaf

    return levanter.trees.tree_map(placed, shapes, shardings)


def _batch(trainer: Any, data: Any, positions: Any, end: int | None) -> Any:
    """Makes an abstract batch as Levanter's data loader returns it. Call it inside `_entered`.

    Args:
      end: a token that ends a document; None if there is none.
    """
    levanter = _levanter()
    rows = levanter.haliax.Axis(
        trainer.config.batch_axis_name or "batch", trainer.config.train_batch_size
    )
    is_packed = any(_is_packed(one) for one in data.components.values())

    def example(tokens: Any) -> Any:
        made = levanter.examples.GrugLmExample.causal(
            tokens=tokens,
            eos_id=0 if is_packed else end,
            block_cross_document_attention=data.block_cross_document_attention,
        )
        return levanter.examples.named_lm_example_from_grug(made, positions)

    def batched(leaf: Any) -> Any:
        axes = (rows, *leaf.axes)
        sharding = levanter.partitioning.sharding_for_axis(
            axes, trainer.compute_axis_mapping, trainer.device_mesh
        )
        shape = tuple(axis.size for axis in axes)
        return levanter.haliax.NamedArray(
            jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding), axes
        )

    one = jax.ShapeDtypeStruct((positions.size,), jnp.int32)
    return levanter.trees.tree_map(batched, levanter.equinox.filter_eval_shape(example, one))


def _is_packed(component: Any) -> bool:
    """Whether a row contains several numbered documents, as rows of chats do."""
    children = getattr(component, "children", {}).values()
    kind = getattr(component, "format", None)
    is_chat = kind is not None and type(kind).get_choice_name(type(kind)) == "chat"
    return is_chat or bool(getattr(component, "pack", None)) or any(map(_is_packed, children))


def _taken_apart(trainer: Any, state: Any, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function that `named_jit` passes to `jax.jit`, and its arguments.

    Call it inside `_entered`.
    """
    partitioning = _levanter().partitioning
    is_array, cached = partitioning.is_array, partitioning._named_pjit_cache
    taken: list[tuple[Any, tuple[Any, ...]]] = []

    def watched(function: Any, **settings: Any) -> Any:
        made = cached(function, **settings)
        return SimpleNamespace(lower=lambda *args: taken.append((made, args)))

    # Haliax would treat descriptions of arrays as static settings; here it traces them. It does not
    # return the jitted function, so this intercepts it.
    names = {
        "is_array": lambda leaf: is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct),
        "_named_pjit_cache": watched,
    }
    with _replaced(partitioning, **names):
        getattr(trainer, _STEPS[bool(trainer.hooks.jit_hooks)]).lower(state, (batch,), {})
    [found] = taken
    return found


def _advance(outputs: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of the next step: the new state replaces the old one."""
    donated, *rest = args
    leaves = jax.tree.leaves(outputs[0].new_state)
    return (jax.tree.unflatten(jax.tree.structure(donated), leaves), *rest)


# The baseline.


def _baseline(asked: Any, mesh: Mesh, rows: int) -> str | None:
    """Returns mesh and knobs of the user's own arguments, as text; None if the space lacks an axis,
    or if the batch cannot be split over the mesh."""
    levanter = _levanter().mesh
    spec, parts = asked.trainer.mesh, list[str]()
    dcn = _filled(levanter.DEFAULT_DCN_AXIS_SPEC, spec.dcn_axes)
    ici = _filled(levanter.DEFAULT_ICI_AXIS_SPEC, spec.axes)
    for prefix, sizes in (("dcn.", dcn), ("", ici)):
        for axis, size in sizes.items():
            name = axis if axis in mesh.axis_names else axis.removesuffix(_DCN)
            if size == 1 or (prefix and size == -1 and not spans_granules()):
                continue
            if name not in mesh.axis_names:
                return None
            parts.append(f"{prefix}{name}:{size}")
    microbatches = 1
    if (of_device := asked.trainer.per_device_parallelism) > 0:
        ways = _ways(asked.trainer)
        if not ways or rows % (of_device * ways):
            return None
        microbatches = rows // (of_device * ways)
    if not parts:
        return None
    knobs = {_REMAT: _remat(asked.model), _MICROBATCHES: microbatches}
    return " ".join([",".join(parts), *(f"{key}={value}" for key, value in knobs.items() if value)])


def _filled(defaults: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    """Merges sizes with Levanter's defaults: if the user leaves a size open, the open one of the
    defaults becomes 1."""
    found = {**defaults, **given}
    if list(found.values()).count(-1) > 1:
        found |= {name: 1 for name, size in defaults.items() if size == -1 and name not in given}
    return found


def _remat(model: Any) -> str:
    """Returns the name of a model's policy for its layers; empty if it has none."""
    kind = _levanter().haliax.ScanCheckpointPolicy

    def policy(value: Any) -> Any:
        return value if isinstance(value, kind) else kind.from_bool_or_str(value)

    asked = getattr(model, _REMAT, None)
    names = [] if asked is None else _POLICIES
    return next((name for name in names if policy(_POLICIES[name]) == policy(asked)), "")
