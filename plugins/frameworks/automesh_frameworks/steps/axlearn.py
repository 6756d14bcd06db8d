"""AXLearn's own training step, unmodified, on the mesh of a plan (jax).

The step, its abstract state and its batch come from AXLearn's trainer, which is made as for
compiling ahead of time (`SpmdTrainer.compile_train_step`). The arguments are those of its training
command, `--module=text.gpt.c4_trainer --config=fuji-7B-v2 --mesh_selector=tpu-v5p-512`. Further
arguments `PATH=VALUE` set a value of the trainer's configuration, such as
`input.input_dispatcher.global_logical_batch_size=64`. Each plan sets the mesh and the knobs below.

The batch is that of the configuration: accumulation splits its rows. Its shapes come from AXLearn's
pipeline over fake data (`--data_dir=FAKE`), whatever the arguments are: no data is read.
"""

from __future__ import annotations

import ast
import contextlib
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import AutomeshError, UsageError, did_you_mean, kind_of
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import first_lines, import_used, kept_environment
from automesh_frameworks.steps.meshes import whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_SELF = FRAMEWORKS["axlearn"]
_WHOSE = "AXLearn's mesh"
_FAKE = "FAKE"
_DISPATCHER = "input_dispatcher"
# Arguments that the training command requires, but that do not change the step.
_FILLED_IN = ("--trainer_dir=automesh", f"--data_dir={_FAKE}", "--jax_backend=cpu")
# The field in which AXLearn's own rules for meshes set what is recomputed.
_LAYER = "model.decoder.transformer.layer"
_AS_CONFIGURED, _NOT_RECOMPUTED = "config", "None"
_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)
# Sizes in the model's configuration that a search may divide by. If layers differ, it is a common
# divisor.
_COUNTS = ("num_layers", "num_heads", "num_kv_heads", "num_experts", "vocab_size")
_TOKENS = "input_ids"

_USED = {
    "axlearn": (),
    "axlearn.common.launch": ("FLAGS",),
    "axlearn.common.launch_trainer": ("FLAGS",),
    "axlearn.common.measurement": ("define_flags",),
    "axlearn.common.config": ("get_named_trainer_config", "config_for_function"),
    "axlearn.common.trainer": ("SpmdTrainer", "select_mesh_config"),
    "axlearn.common.trainer_config_modifier": ("GradientAccumulationModifier", "RematSpecModifier"),
    "axlearn.common.gradient_accumulation": ("with_minibatch_steps",),
    "axlearn.common.base_layer": ("RematSpec",),
    "axlearn.common.attention": ("RematRegexSavePatterns",),
    "axlearn.common.summary_writer": ("NoOpWriter",),
    "axlearn.common.utils": (
        "host_to_global_specs",
        "save_and_offload_only_these_names_regex",
        "set_data_dir",
    ),
}
_OF_THE_TRAINER = (
    "default_config",
    "mesh",
    "init",
    "trainer_state",
    "trainer_state_specs",
    "_pjit_train_step",
    "_train_step_input_partition_specs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AXLearn:
    """The modules of AXLearn that the step is made from."""

    flags: Any
    config: Any
    trainer: Any
    modifiers: Any
    accumulation: Any
    base_layer: Any
    attention: Any
    writers: Any
    utils: Any


@cache
def _axlearn() -> _AXLearn:
    """Looks up everything that is used of AXLearn, in one place.

    Raises:
      UsageError: AXLearn is not completely installed, or is another version that lacks one of the
        names.
    """
    with kept_environment():  # `axlearn.common.launch` sets options of the compiler for TPUs.
        found = import_used(_SELF, _USED)
    _, _, launch, measurement, *others = found.values()
    config, trainer, modifiers, accumulation, base_layer, attention, writers, utils = others
    for name in _OF_THE_TRAINER:
        if not hasattr(trainer.SpmdTrainer, name):
            raise UsageError(
                f"the installed {_SELF.title} has no `{name}` in its `SpmdTrainer`",
                hint=f"this adapter was tried with {_SELF.seen_in}: install that version",
            )
    if "recorder_type" not in launch.FLAGS:
        measurement.define_flags()  # As in its training command.
    return _AXLearn(
        flags=launch.FLAGS,
        config=config,
        trainer=trainer,
        modifiers=modifiers,
        accumulation=accumulation,
        base_layer=base_layer,
        attention=attention,
        writers=writers,
        utils=utils,
    )


def build(mesh: Mesh, remat_policy: str = _AS_CONFIGURED, grad_acc_steps: int = 0) -> Workload:
    """Builds AXLearn's training step on `mesh`.

    Args:
      mesh: axes with AXLearn's names, in any order; missing ones have one device.
      remat_policy: the policy of the decoder's layers: `config` for that of the configuration,
        `None` to recompute nothing, one of `jax.checkpoint_policies`, or one of AXLearn's
        `RematRegexSavePatterns`, which select the saved values.
      grad_acc_steps: number of parts of a batch whose gradients are summed before an update; 0 for
        that of the configuration.

    Raises:
      UsageError: AXLearn is not installed, refuses its arguments, or has no such step.
    """
    axlearn = _axlearn()
    # As in AXLearn's own set-up: the key in a trainer's state uses this generator.
    jax.config.update("jax_default_prng_impl", "rbg")
    with axlearn.utils.set_data_dir(_FAKE):
        asked = _asked(tuple(sys.argv[1:]))
        config = asked.clone()
        _set_remat(config, remat_policy)
        _set_accumulation(config, grad_acc_steps)
        whole = whole_mesh(mesh, tuple(config.mesh_axis_names), _WHOSE)
        config.mesh_shape = whole.devices.shape
        trainer, state, batch = _made(config, whole)

    @contextlib.contextmanager
    def context() -> Generator[None]:
        with _inside(trainer):
            yield

    def init(mesh: Mesh) -> tuple[Any]:
        """Makes the state with which a training begins, because made-up values have larger rounding
        errors in bfloat16."""
        del mesh
        with context():
            trainer.init(jax.random.PRNGKey(0))
        # Otherwise the trainer would keep a second state in memory.
        state, trainer._trainer_state = trainer.trainer_state, None
        return (state,)

    with context():
        step = trainer._pjit_train_step()
    rows, length = _rows(config, batch), _length(batch)
    return Workload(
        step,
        (state, batch),
        init=init,
        context=context,
        baseline=_baseline(asked, mesh.axis_names, jax.devices()),
        facts=_facts(config, rows, length),
        tokens_per_step=rows * length,
    )


@contextlib.contextmanager
def _inside(trainer: Any) -> Generator[None]:
    """Enters the contexts that AXLearn's trainer enters around its step."""
    with trainer.mesh(), trainer._context_manager():
        yield


def _made(config: Any, whole: Mesh) -> tuple[Any, Any, Any]:
    """Makes the trainer on the devices of a mesh, and its abstract state and batch.

    Raises:
      UsageError: AXLearn refuses to make them.
    """
    # Parts that only read or write files outside of the step.
    config.set(
        dir="automesh",
        summary_writer=_axlearn().writers.NoOpWriter.default_config(),
        checkpointer=_axlearn().trainer.SpmdTrainer.default_config().checkpointer,
        evalers={},
        init_state_builder=None,
    )
    try:
        trainer = config.instantiate(parent=None, devices=whole.devices)
        with _inside(trainer):
            state = jax.tree.map(
                lambda spec: jax.ShapeDtypeStruct(
                    tuple(spec.shape), spec.dtype, sharding=spec.sharding
                ),
                trainer.trainer_state_specs,
            )
            of_a_host = trainer.input.element_spec()
            if _DISPATCHER in trainer.input.children:
                dispatcher = trainer.input.input_dispatcher
                of_a_host = dispatcher.logical_to_physical_shapes(of_a_host)
            batch = _axlearn().utils.host_to_global_specs(
                of_a_host, partition=trainer._train_step_input_partition_specs()
            )
    except AutomeshError:
        raise
    except Exception as error:
        raise UsageError(
            f"AXLearn makes no step of this configuration on {dict(whole.shape)}: "
            f"{first_lines(error)}",
            hint="it would not train so either; see what the configuration and its data ask for",
        ) from error
    return trainer, state, batch


@cache
def _asked(argv: tuple[str, ...]) -> Any:
    """Returns the trainer's configuration for the user's arguments.

    Raises:
      UsageError: there is no such configuration, or AXLearn refuses the arguments.
    """
    axlearn = _axlearn()
    try:
        _, *settings = axlearn.flags(["automesh", *_FILLED_IN, *argv])
    except Exception as error:  # noqa: BLE001 - any error here is caused by the arguments
        raise UsageError(
            f"AXLearn refuses its arguments: {first_lines(error)}",
            hint=f"give those of its training command, as in `-- {_SELF.example}`",
        ) from None
    config = _named(axlearn.flags.module, axlearn.flags.config)
    selector = axlearn.flags.mesh_selector
    if selector is not None:
        try:
            axlearn.trainer.select_mesh_config(config, mesh_selector=selector)
        except Exception as error:
            raise UsageError(
                f"AXLearn cannot apply its rule for `{selector}`: {first_lines(error)}",
                hint="leave `--mesh_selector` out, or name other devices",
            ) from error
    config.mesh_axis_names = config.mesh_axis_names or ("data", "model")
    for setting in settings:
        _override(config, setting)
    return config


def _named(module: str, name: str) -> Any:
    """Returns a configuration of the user's own module, or of AXLearn's experiments.

    Raises:
      UsageError: there is none of that name.
    """
    places = (module, f"axlearn.experiments.{module}")
    for place in places:
        try:
            return _axlearn().config.get_named_trainer_config(name, config_module=place)()
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if place == absent or place.startswith(f"{absent}."):
                continue
            raise UsageError(
                f"`{place}` needs the module `{absent}`, which is not installed",
                hint=f"`pip install {absent.partition('.')[0]}`",
            ) from None
        except KeyError as error:
            raise UsageError(
                f"AXLearn: {error.args[0]}", hint="give one of the module's names with `--config`"
            ) from None
        except Exception as error:
            raise UsageError(
                f"AXLearn cannot make the configuration `{name}` of `{place}`: "
                f"{first_lines(error)}",
                hint=f"give what its training command takes, as in `-- {_SELF.example}`",
            ) from error
    raise UsageError(
        f"there is no module `{places[0]}`, and no `{places[1]}`",
        hint=f"name one with `named_trainer_configs` that Python finds, as in `-- {_SELF.example}`",
    )


def _override(config: Any, setting: str) -> None:
    """Sets a value of the configuration, `model.decoder.transformer.num_layers=2`.

    Raises:
      UsageError: the text is no setting, names no existing value, or has a value of another type.
    """
    path, equals, text = setting.partition("=")
    keys = path.split(".")
    if not equals or not all(key.isidentifier() for key in keys):
        raise UsageError(
            f"`{setting}` is neither a flag of AXLearn's training command nor a setting",
            hint="write `--flag=value`, or `PATH=VALUE` for a value of the configuration, as in "
            f"`input.{_DISPATCHER}.global_logical_batch_size=64`",
        )
    old = config
    for at, key in enumerate(keys):
        known = list(old.keys()) if hasattr(old, "set_recursively") else []
        if key not in known:
            raise UsageError(
                f"the configuration has no `{'.'.join(keys[: at + 1])}`{did_you_mean(key, known)}",
                hint=f"known there: {', '.join(known) or 'nothing'}",
            )
        old = getattr(old, key)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(old, (bool, int, float, str, tuple, list)) and not _is_like(value, old):
        raise UsageError(
            f"`{setting}`: the configuration has {kind_of(old)} there, not {kind_of(value)}",
            hint=f"its own value is {old!r}",
        )
    config.set_recursively(keys, value=value)


def _is_like(value: object, old: object) -> bool:
    """Whether a value has the type of the one that it replaces; a float may be replaced by a whole
    number."""
    if isinstance(old, (tuple, list)):
        return isinstance(value, (tuple, list))
    return type(value) is type(old) or (isinstance(old, float) and type(value) is int)


def _set_remat(config: Any, policy: str) -> None:
    """Sets the policy of the layers.

    Raises:
      UsageError: there is no such policy, or no such layer.
    """
    if policy == _AS_CONFIGURED:
        return
    axlearn = _axlearn()
    try:
        own = config.get_recursively([*_LAYER.split("."), "remat_spec"])
    except AttributeError:
        raise UsageError(
            f"the knob `remat_policy={policy}` needs a layer at `{_LAYER}`, which the model lacks",
            hint=f"leave the knob at `{_AS_CONFIGURED}`: list no other value in the search space",
        ) from None
    spec = None
    if policy != _NOT_RECOMPUTED:
        # A scan needs no barrier against common subexpressions, and exported rules set none for it;
        # other layers need it.
        if own is not None and own.prevent_cse:
            raise UsageError(
                f"the layers at `{_LAYER}` are no body of a scan (`remat_spec.prevent_cse`), and a "
                f"rule with remat_policy={policy} could not say that they are to be recomputed",
                hint=f"leave the knob at `{_AS_CONFIGURED}`: list no other value in the search "
                "space; or repeat the layers (`RepeatedTransformerLayer`)",
            )
        spec = axlearn.base_layer.RematSpec(prevent_cse=False, policy=_policy(policy))
    modifier = axlearn.modifiers.RematSpecModifier.default_config()
    modifier.set(remat_policies={_LAYER: spec}).instantiate()(config)


def _policy(name: str) -> Any:
    patterns: Mapping[str, Any] = _axlearn().attention.RematRegexSavePatterns.__members__
    if name in _POLICIES:
        return getattr(jax.checkpoint_policies, name)
    if name not in patterns:
        known = (_AS_CONFIGURED, _NOT_RECOMPUTED, *_POLICIES, *patterns)
        raise UsageError(
            f"there is no remat_policy `{name}`{did_you_mean(name, known)}",
            hint=f"known: {', '.join(known)}",
        )
    keep = _axlearn().utils.save_and_offload_only_these_names_regex
    return (
        _axlearn()
        .config.config_for_function(keep)
        .set(
            names_which_can_be_saved=patterns[name].value,
            names_which_can_be_offloaded=None,
            offload_src="device",
            offload_dst="pinned_host",
        )
    )


def _set_accumulation(config: Any, steps: int) -> None:
    """Sets the number of parts whose gradients are summed.

    Raises:
      UsageError: the learner transforms its forward pass in another way.
    """
    if not steps:
        return
    own = getattr(config.learner, "forward_fn_transformation", None)
    is_own = own is not None and not _accumulates(own)
    if is_own and steps > 1:
        raise UsageError(
            f"the learner has a `forward_fn_transformation` of its own: grad_acc_steps={steps} "
            "would replace it",
            hint="list no other value than 1 in the search space",
        )
    if is_own or (own is not None and own.steps == steps):
        return
    if steps == 1:
        if own is not None:
            config.learner.forward_fn_transformation = None
        return
    # As in an exported rule.
    modifier = _axlearn().modifiers.GradientAccumulationModifier.default_config()
    modifier.set(grad_acc_steps=steps).instantiate()(config)


def _accumulates(transformation: Any) -> bool:
    return getattr(transformation, "fn", None) is _axlearn().accumulation.with_minibatch_steps


def _rows(config: Any, batch: Any) -> int:
    """Returns the rows of one update."""
    dispatcher = getattr(config.input, _DISPATCHER, None)
    if dispatcher is not None:
        return int(dispatcher.global_logical_batch_size)
    return int(jax.tree.leaves(batch)[0].shape[0])


def _length(batch: Any) -> int:
    """Returns the tokens of one row; 0 if a batch contains something else."""
    tokens = batch.get(_TOKENS) if isinstance(batch, dict) else None
    return int(tokens.shape[1]) if tokens is not None and tokens.ndim == 2 else 0


def _facts(config: Any, rows: int, length: int) -> dict[str, int]:
    """Returns sizes that a search may divide by."""
    found: dict[str, int] = {}

    def note(path: str, value: Any) -> None:
        name = path.rpartition(".")[2]
        if name in _COUNTS and type(value) is int:
            found[name] = math.gcd(found.get(name, 0), value)

    config.model.visit(note)
    heads = found.get("num_heads", 1)
    decoder = getattr(config.model, "decoder", None)
    dim = getattr(decoder, "dim", None)
    return {
        "batch": rows,
        "max_sequence_length": length or 1,
        "dim": dim if type(dim) is int else 1,
        "num_layers": found.get("num_layers", 1),
        "num_heads": heads,
        "num_kv_heads": found.get("num_kv_heads", heads),
        "num_experts": found.get("num_experts", 1),
        "vocab_size": found.get("vocab_size", 1),
    }


def _baseline(asked: Any, varied: Sequence[str], devices: Sequence[Any]) -> str | None:
    """Returns mesh and knobs of the user's own arguments, as text; None if the space lacks an axis,
    or if that mesh does not fit the devices.

    Args:
      varied: the axes of the space.
      devices: all devices of the target: a step is first built on a mesh of a single one.
    """
    names = tuple(asked.mesh_axis_names)
    count, granules = len(devices), _granules(devices)
    shape: Any = asked.mesh_shape or (count, *(1 for _ in names[1:]))
    if hasattr(shape, "ici_mesh_shape"):
        ici = _inferred(shape.ici_mesh_shape, count // granules)
        dcn = _inferred(shape.dcn_mesh_shape, granules)
    else:
        ici, dcn = _split(_inferred(shape, count), granules)
    if len(ici) != len(names) or len(dcn) != len(names):
        return None
    used = [
        (name, f"{prefix}{name}:{size}")
        for prefix, sizes in (("dcn.", dcn), ("", ici))
        for name, size in zip(names, sizes, strict=True)
        if size != 1
    ]
    if not used or any(name not in varied for name, _ in used):
        return None
    own = getattr(asked.learner, "forward_fn_transformation", None)
    steps = own.steps if own is not None and _accumulates(own) else 1
    sizes = ",".join(text for _, text in used)
    return f"{sizes} remat_policy={_AS_CONFIGURED} grad_acc_steps={steps}"


def _granules(devices: Sequence[Any]) -> int:
    """Returns the number of slices or nodes, as AXLearn counts them."""
    by = "slice_index" if devices[0].platform == "tpu" else "process_index"
    return len({getattr(device, by, 0) for device in devices})


def _inferred(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the sizes with a value for the open one; empty if their product is not `count`."""
    known = math.prod(size for size in shape if size != -1)
    sizes = tuple(count // known if size == -1 else size for size in shape)
    return sizes if list(shape).count(-1) <= 1 and math.prod(sizes) == count else ()


def _split(sizes: tuple[int, ...], granules: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits sizes into those inside granules and those between them: AXLearn divides the first
    axis that is used.

    >>> _split((1, 4, 8), 2)
    ((1, 2, 8), (1, 2, 1))
    >>> _split((1, 3, 8), 2)
    ((), ())
    """
    first = next((at for at, size in enumerate(sizes) if size != 1), 0)
    if not sizes or sizes[first] % granules:
        return (), ()
    dcn = tuple(granules if at == first else 1 for at in range(len(sizes)))
    return tuple(size // between for size, between in zip(sizes, dcn)), dcn
