"""Kauldron's own training step, unmodified, on the mesh of a plan (jax).

The trainer is the one that `python -m kauldron.main` makes from the same arguments, `--cfg=FILE`
and `--cfg.KEY=VALUE`. The step is its `trainer.trainstep.step`, which returns its losses and no
metrics. Kauldron computes both in every hundredth iteration, which it logs, and neither in the
others. A search compares plans by these losses.

Kauldron has one mesh with one axis, `devices`, over which its `ShardingStrategy` replicates or
splits arrays. A search varies the strategies of parameters and optimizer. If the user's own
strategy has a field `mesh`, the field is set to the plan's mesh, with the axes of the user's
strategy.

A batch is one update: Kauldron accumulates gradients, if at all, by `optax.MultiSteps` in the
optimizer, which does not change the rows of a step. Remat belongs to the model: it is a key of the
configuration, so a search space may use it as a knob.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import Scalar
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import import_used
from automesh_frameworks.steps.meshes import spans_granules, whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_AXIS = "devices"
_SELF = FRAMEWORKS["kauldron"]
_WHOSE = "Kauldron's mesh"
_MESH = "mesh"  # A field of the user's own strategy.
# Properties of `kd.sharding` that are cached, and computed from `jax.devices()`.
_DEVICES_MESH = "DEVICES_MESH"
_REPLICATED = "REPLICATED"
_MADE_ONCE = (_DEVICES_MESH, _REPLICATED, "FIRST_DIM")
# Modules that Kauldron's training command does not load when it imports a configuration.
_LAUNCHER_ONLY = ("kauldron.xm", "kauldron.kxm", "xmanager")
_RULE = "=" * 20  # Separates a configuration that Kauldron quotes from the error message.
_FORM = "give `--cfg=FILE` and `--cfg.KEY=VALUE`, as in `python -m kauldron.main`"

Settings = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kauldron:
    """The parts of Kauldron that the step is made from."""

    sharding: Any
    konfig: Any
    flags: Any
    set_by_path: Any
    parse: Any
    global_elem_spec: Any
    tfds: Any


# The names that are used of each module.
_USED = {
    "kauldron": (),
    "kauldron.konfig": ("DEFINE_config_file", "resolve", "set_lazy_imported_modules"),
    "kauldron.konfig.py_flag_utils": ("maybe_parse_py_flag_value",),
    "kauldron.kontext": ("set_by_path",),
    "kauldron.utils.sharding_utils": ("sharding",),
    "kauldron.data.utils": ("get_global_elem_spec",),
    # TensorFlow and TFDS as Kauldron imports them.
    "kauldron.data.py.base": ("tf",),
    "kauldron.data.py.data_sources": ("tfds",),
    "absl.flags": ("FlagValues", "Error"),
}


@cache
def _kauldron() -> _Kauldron:
    """Looks up everything that is used of Kauldron, in one place.

    Raises:
      UsageError: Kauldron is not completely installed, or is another version that lacks one of the
        names.
    """
    found = import_used(_SELF, _USED)
    konfig, py_flags, kontext, shardings, data, pipeline, sources, flags = list(found.values())[1:]
    missing = [name for name in _MADE_ONCE if name not in dir(shardings.sharding)]
    if missing:
        raise UsageError(
            f"the installed Kauldron has no `{missing[0]}` in `kd.sharding`",
            hint=f"this adapter was tried with {_SELF.seen_in}: install that version",
        )
    # As in Kauldron's training command: otherwise TensorFlow would take the memory of the GPUs.
    pipeline.tf.config.set_visible_devices([], "GPU")
    return _Kauldron(
        sharding=shardings.sharding,
        konfig=konfig,
        flags=flags,
        set_by_path=kontext.set_by_path,
        parse=py_flags.maybe_parse_py_flag_value,
        global_elem_spec=data.get_global_elem_spec,
        tfds=sources.tfds,
    )


def build(mesh: Mesh, params: str = "", opt_state: str = "", **settings: Scalar) -> Workload:
    """Builds Kauldron's training step on `mesh`.

    Args:
      mesh: a mesh with the axis `devices`, or with the axes of the user's own strategy, in any
        order.
      params: sharding of the parameters as in Kauldron's arguments: `REPLICATED` or
        `FSDPSharding()` of `kd.sharding`, or any expression that is allowed there after `py::`;
        empty for that of the arguments.
      opt_state: sharding of the optimizer's state, likewise; with `None` the compiler chooses it.
      **settings: other keys of the configuration, `model.remat` for `--cfg.model.remat`.

    Raises:
      UsageError: Kauldron is not installed, or refuses its arguments.
    """
    arguments = tuple(sys.argv[1:])
    more = tuple(sorted(settings.items()))
    with _in_place_of_all_devices(mesh):
        asked = _trainer(arguments, ())
        whole = _whole(mesh, asked.sharding)
        baseline = _baseline(asked.sharding, mesh)
    with _in_place_of_all_devices(whole):
        trainer = _trainer(arguments, more)
        own = {_MESH: whole} if _takes_mesh(trainer.sharding) else {}
        knobs = {"params": params, "opt_state": opt_state}
        named = {name: _resolved(name, text) for name, text in knobs.items() if text}
        trainer = _with_sharding(trainer, {**own, **named})
        spec = _element_spec(arguments, more, jax.process_count())
        batch = _batch(spec, trainer.sharding.batch)

        def initial() -> Any:
            # Pretrained weights, which transforms would read, do not change the program.
            return trainer.init_state(skip_transforms=True, element_spec=spec)

        state = jax.eval_shape(initial)
        # If the strategy says nothing, the compiler chooses the shardings of the results of `init`.
        state = _kauldron().sharding.with_sharding_constraint(state, trainer.sharding.state)
    errors = trainer.checkify_error_categories
    return Workload(
        # The jitted function itself: a bound method could not be lowered.
        type(trainer.trainstep).step,
        (trainer.trainstep, state, batch),
        {"return_losses": True, **({"checkify_error_categories": errors} if errors else {})},
        init=lambda _: (initial(),),
        context=lambda: _in_place_of_all_devices(whole),
        baseline=baseline,
        facts=_facts(asked, batch),
    )


@contextlib.contextmanager
def _in_place_of_all_devices(mesh: Mesh) -> Generator[None]:
    """Makes `kd.sharding.DEVICES_MESH` consist of the mesh's devices, in their order.

    Kauldron takes no mesh: its strategies use this one, which it makes from `jax.devices()`. They
    read it when a configuration is resolved and whenever the step is traced.
    """
    made: dict[str, Any] = vars(_kauldron().sharding)
    before = {name: made.pop(name) for name in _MADE_ONCE if name in made}
    made[_DEVICES_MESH] = Mesh(mesh.devices.flatten(), (_AXIS,))
    try:
        yield
    finally:
        for name in _MADE_ONCE:
            made.pop(name, None)
        made.update(before)


@cache
def _flag(arguments: tuple[str, ...]) -> Any:
    """Parses the flag `--cfg` of Kauldron's training command; the value is made anew for each read
    of it.

    Raises:
      UsageError: Kauldron refuses the arguments.
    """
    kauldron = _kauldron()
    values = kauldron.flags.FlagValues()
    flag = kauldron.konfig.DEFINE_config_file("cfg", None, flag_values=values)
    if not any(one.lstrip("-").startswith("cfg=") or one.lstrip("-") == "cfg" for one in arguments):
        raise UsageError("Kauldron's arguments name no configuration", hint=_FORM)
    try:
        with kauldron.konfig.set_lazy_imported_modules(lazy_import=list(_LAUNCHER_ONLY)):
            rest = values(["kauldron", *arguments])[1:]
    except kauldron.flags.Error as error:
        raise UsageError(
            f"Kauldron refuses its arguments: {_one_line(error)}",
            hint=f"{_FORM}; other flags are those of a training command, not of its step",
        ) from None
    except Exception as error:
        raise UsageError(
            f"Kauldron's configuration cannot be imported: {_one_line(error)}", hint=_FORM
        ) from error
    if rest:
        raise UsageError(f"`{rest[0]}` is not an argument of Kauldron", hint=_FORM)
    return flag


def _trainer(arguments: tuple[str, ...], settings: Settings) -> Any:
    """Makes the trainer from Kauldron's arguments, with other values of some keys.

    It contains shardings on the present mesh, so each mesh needs its own trainer.

    Raises:
      UsageError: Kauldron refuses them.
    """
    kauldron, flag = _kauldron(), _flag(arguments)
    try:
        config = flag.value
        for key, value in settings:
            kauldron.set_by_path(config, key, kauldron.parse(value))
        if config.workdir is None:
            config.workdir = os.devnull  # A folder that does not exist: nothing is written.
        trainer = kauldron.konfig.resolve(config)
    except Exception as error:
        raise UsageError(
            f"Kauldron's configuration cannot be resolved: {_one_line(error)}",
            hint=_key_hint(error) or f"try `python -m kauldron.main {' '.join(arguments)}`",
        ) from error
    if not hasattr(trainer, "trainstep"):
        raise UsageError(
            f"`get_config()` gives {type(trainer).__name__}, which is no `kd.train.Trainer`",
            hint="name the file of a training",
        )
    if trainer.optimizer is None:
        raise UsageError(
            "this configuration has no optimizer: it evaluates, and has no training step",
            hint="name the file of a training",
        )
    return trainer


def _one_line(error: BaseException) -> str:
    """Returns Kauldron's message, without the configuration that Kauldron quotes before it."""
    said = str(error).rpartition(_RULE)[2]
    return " ".join(said.lstrip("=").split())[:600] or type(error).__name__


def _key_hint(error: BaseException) -> str:
    """Returns a hint about a key that Kauldron does not have."""
    if "Error accessing 'sharding'" in str(error):
        return (
            "this configuration says nothing of `sharding`: give it as a whole, "
            "`--cfg.sharding=py::kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding())`"
        )
    _, found, rest = str(error).partition("unexpected keyword argument '")
    if not found:
        return ""
    kauldron = import_used(_SELF, {"kauldron.train": ("Trainer",)})["kauldron.train"]
    known = [field.name for field in dataclasses.fields(kauldron.Trainer)]
    meant = did_you_mean(rest.partition("'")[0], known)
    return f"the key is unknown there{meant}"


def _takes_mesh(strategy: Any) -> bool:
    return any(field.name == _MESH and field.init for field in dataclasses.fields(strategy))


def _whole(mesh: Mesh, strategy: Any) -> Mesh:
    """Returns the mesh with the axes of the strategy, in its order.

    Raises:
      UsageError: the strategy does not have an axis of more than one device.
    """
    if not _takes_mesh(strategy):
        return whole_mesh(mesh, (_AXIS,), _WHOSE)
    own = getattr(strategy, _MESH)
    if own is None:
        return mesh
    whole = whole_mesh(mesh, own.axis_names, f"the mesh of {type(strategy).__name__}")
    return Mesh(whole.devices, whole.axis_names, axis_types=own.axis_types)


def _resolved(knob: str, text: str) -> Any:
    """Returns the sharding that a knob names.

    Raises:
      UsageError: Kauldron does not have it.
    """
    kauldron = _kauldron()
    name = text.partition("(")[0]
    is_short = name != "None" and "." not in name and ":" not in name
    written = f"kd.sharding.{text}" if is_short else text
    try:
        value = kauldron.parse(f"py::{written}")
        return None if value is None else kauldron.konfig.resolve(value)
    except Exception as error:
        raise UsageError(
            f"the knob `{knob}` names no sharding: `{text}` ({_one_line(error)})",
            hint="write `REPLICATED`, `FSDPSharding()`, or what `--cfg.sharding.params=py::` takes",
        ) from error


def _with_sharding(trainer: Any, changes: Mapping[str, Any]) -> Any:
    """Returns the trainer with other fields of its sharding strategy.

    Raises:
      UsageError: its step has a strategy of its own, which would not change.
    """
    if changes:
        sharding = dataclasses.replace(trainer.sharding, **changes)
        trainer = dataclasses.replace(trainer, sharding=sharding)
    if trainer.trainstep.sharding is not trainer.sharding:
        raise UsageError(
            "`cfg.trainstep.sharding` is another strategy than `cfg.sharding`",
            hint="leave it out: the step takes that of the configuration",
        )
    return trainer


@cache
def _element_spec(arguments: tuple[str, ...], settings: Settings, process_count: int) -> Any:
    """Returns shapes and types of the batches of one process, which data sets of TFDS have without
    data.

    It is cached for equal arguments, because it takes seconds. Kauldron asks for the number of
    processes itself, which is only a key of the cache.

    Raises:
      UsageError: the data set does not have them.
    """
    del process_count
    data = _trainer(arguments, settings).train_ds
    rows = getattr(data, "batch_size", None) or 1
    try:
        # As in Kauldron's own `run eval_shape`.
        with _kauldron().tfds.testing.mock_data(num_examples=rows):
            return data.element_spec
    except Exception as error:
        raise UsageError(
            "`cfg.train_ds` gives no batch whose shapes could be taken: "
            f"{type(error).__name__} {_one_line(error)}",
            hint="let it be a `kd.data.tf.ElementSpecDataset`, which states shapes without data",
        ) from error


def _batch(spec: Any, sharding: Any) -> Any:
    """Returns the abstract batch of all processes, as the training loop passes it to the step.

    Raises:
      UsageError: a shape is open.
    """
    whole = _kauldron().global_elem_spec(spec, sharding)
    for leaf in jax.tree.leaves(whole):
        if None in leaf.shape:
            raise UsageError(
                f"`cfg.train_ds` gives batches whose shape is open: {tuple(leaf.shape)}",
                hint="let it drop the remainder, and pad what varies",
            )
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding
        ),
        whole,
    )


def _facts(trainer: Any, batch: Any) -> dict[str, int]:
    """Returns the rows of a batch, and the integers among the fields of the model and in
    `cfg.aux`."""
    model = trainer.model
    fields = dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()
    named = {field.name: getattr(model, field.name, None) for field in fields}
    if isinstance(trainer.aux, Mapping):
        named |= trainer.aux
    return {
        **{name: value for name, value in named.items() if type(value) is int},
        "batch": int(jax.tree.leaves(batch)[0].shape[0]),
    }


def _baseline(strategy: Any, mesh: Mesh) -> str | None:
    """Returns mesh and knobs of the user's own arguments, as text; None if the space lacks an
    axis."""
    if not _takes_mesh(strategy):
        if _AXIS not in mesh.axis_names:
            return None
        # The size between granules is open as well; it is 1 if there is one granule.
        text = f"dcn.{_AXIS}:-1,{_AXIS}:-1"
    else:
        own = getattr(strategy, _MESH)
        # The sizes of a user's mesh do not determine how it is laid out over granules.
        if own is None or own.size != jax.device_count() or spans_granules():
            return None
        sizes = {name: size for name, size in own.shape.items() if size > 1}
        if not sizes or any(name not in mesh.axis_names for name in sizes):
            return None
        text = ",".join(f"{name}:{size}" for name, size in sizes.items())
    knobs = {"params": _word(strategy.params), "opt_state": _word(strategy.opt_state)}
    return " ".join([text, *(f"{name}={word}" for name, word in knobs.items() if word)])


def _word(sharding: Any) -> str:
    """Returns the knob's value for one of Kauldron's strategies; empty for a user's strategy."""
    own = _kauldron().sharding
    if sharding is None:
        return "None"
    if type(sharding) is own.FSDPSharding:
        size = f"min_size_to_shard_mb={sharding.min_size_to_shard_mb}"
        return f"FSDPSharding({'' if sharding == own.FSDPSharding() else size})"
    return _REPLICATED if sharding == getattr(own, _REPLICATED) else ""
