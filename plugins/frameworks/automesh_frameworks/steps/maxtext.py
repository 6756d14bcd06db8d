"""MaxText's own training step, unmodified, on the mesh of a plan (jax).

The step, its abstract state and its batch come from the functions with which MaxText compiles ahead
of time (`maxtext.trainers.pre_train.train_compile`). The arguments are those of its training
command, `model_name=llama3.1-8b max_target_length=4096`; each plan sets the sizes of the mesh and
the knobs below.

The batch is the one that the arguments name: rows of one update = `per_device_batch_size` x devices
x `gradient_accumulation_steps`. A plan with another accumulation has smaller or larger
microbatches.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, did_you_mean
from automesh.program.script.workload import Workload
from automesh_frameworks.steps.installed import first_lines, import_used, kept_environment
from automesh_frameworks.steps.meshes import check_names, spans_granules, whole_mesh
from automesh_frameworks.steps.registry import FRAMEWORKS

_STAGE, _PIPELINE = "stage", "pipeline"  # An axis, and its name in MaxText's keys.
_BATCH, _ACCUMULATION = "per_device_batch_size", "gradient_accumulation_steps"
# The same for every search, whatever the arguments are: MaxText writes nothing and waits for no
# other process.
_FIXED = {
    "run_name": "automesh",
    "enable_checkpointing": "false",
    "skip_jax_distributed_system": "true",
    "log_config": "false",
    "jax_cache_dir": "",
}
# Compiler options in MaxText's arguments belong to its training command, not to a step.
_COMPILER_OPTIONS = "compile_xla_flags"
_SELF = FRAMEWORKS["maxtext"]
_WHOSE = "MaxText's mesh"
_DATASET = "dataset_type"  # Batches are abstract: only their shapes and types matter.
# MaxText's keys that a search may divide by, under the names that search spaces use.
_FACTS = {
    "batch": "global_batch_size_to_train_on",
    "max_target_length": "max_target_length",
    "emb_dim": "emb_dim",
    "mlp_dim": "mlp_dim",
    "num_query_heads": "num_query_heads",
    "num_kv_heads": "num_kv_heads",
    "num_experts": "num_experts",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaxText:
    """The modules of MaxText that the step is made from, and its file of defaults."""

    pyconfig: Any
    train: Any
    train_compile: Any
    maxtext_utils: Any
    sharding: Any
    axis_rules: Any
    base: Path


# The names that are used of each module.
_USED = {
    "maxtext": (),
    "maxtext.configs.pyconfig": ("initialize",),
    "maxtext.trainers.pre_train.train": ("train_step",),
    "maxtext.trainers.pre_train.train_compile": ("get_shaped_inputs",),
    "maxtext.utils.maxtext_utils": ("get_functional_train_with_signature",),
    "maxtext.utils.sharding": (
        "get_input_data_sharding",
        "maybe_update_params_sharding_with_opt",
        "build_zero1_input_state_mesh_shardings",
    ),
    "flax.core.spmd": ("logical_axis_rules",),
}


@cache
def _maxtext() -> _MaxText:
    """Looks up everything that is used of MaxText, in one place.

    Raises:
      UsageError: MaxText is not completely installed, or is another version that lacks one of the
        names.
    """
    found = import_used(_SELF, _USED)
    pyconfig, train, train_compile, utils, sharding, spmd = list(found.values())[1:]
    return _MaxText(
        pyconfig=pyconfig,
        train=train,
        train_compile=train_compile,
        maxtext_utils=utils,
        sharding=sharding,
        axis_rules=spmd.logical_axis_rules,
        base=Path(found["maxtext"].__file__).parent / "configs" / "base.yml",
    )


def check_installed() -> None:
    """Imports everything that is used of MaxText.

    Raises:
      UsageError: MaxText is not completely installed, or is another version that lacks one of the
        names.
    """
    _maxtext()


def build(
    mesh: Mesh,
    remat_policy: str = "",
    gradient_accumulation_steps: int = 0,
    custom_mesh_and_rule: str = "",
) -> Workload:
    """Builds MaxText's training step on `mesh`.

    Args:
      mesh: axes with MaxText's names, in any order; missing ones have one device.
      remat_policy: the policy of the decoder's layers; empty for that of the arguments.
      gradient_accumulation_steps: microbatches of one update; 0 for the number in the arguments.
      custom_mesh_and_rule: name of one of MaxText's files of logical-axis rules; empty for that of
        the arguments.

    Raises:
      UsageError: MaxText is not installed, or refuses its arguments.
    """
    maxtext = _maxtext()
    # As in MaxText's own `initialize`: with another generator the program is another one.
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    own = _arguments(sys.argv[1:])
    asked = _config(own, {})
    more: dict[str, object] = {}
    if remat_policy:
        more["remat_policy"] = remat_policy
    if custom_mesh_and_rule:
        more["custom_mesh_and_rule"] = custom_mesh_and_rule
    if gradient_accumulation_steps:
        rows = asked.per_device_batch_size * asked.gradient_accumulation_steps
        more[_ACCUMULATION] = gradient_accumulation_steps
        more[_BATCH] = rows / gradient_accumulation_steps
    config = _config(own, {**more, **_sizes(mesh), "hardware": _hardware(mesh, own)})
    jax.config.update(
        "jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type
    )
    whole = _whole(mesh, config)
    args, kwargs, shardings, _, model = maxtext.train_compile.get_shaped_inputs(whole, config)
    params, shardings = maxtext.sharding.maybe_update_params_sharding_with_opt(config, shardings)
    taken = maxtext.sharding.build_zero1_input_state_mesh_shardings(config, shardings, params)
    step, ins, outs, static, donated = maxtext.maxtext_utils.get_functional_train_with_signature(
        maxtext.train.train_step,
        maxtext.sharding.get_input_data_sharding(config, whole),
        taken,
        model,
        config,
        params,
    )

    @contextlib.contextmanager
    def context() -> Generator[None]:
        with jax.set_mesh(whole), maxtext.axis_rules(config.logical_axis_rules):
            yield

    return Workload(
        jax.jit(
            step,
            in_shardings=ins,
            out_shardings=outs,
            static_argnums=static,
            donate_argnums=donated,
        ),
        args,
        kwargs,
        context=context,
        baseline=_baseline(asked, mesh),
        facts={name: int(getattr(config, key)) for name, key in _FACTS.items()},
        tokens_per_step=int(config.global_batch_size_to_train_on * config.max_target_length),
    )


def _arguments(argv: Sequence[str]) -> dict[str, str]:
    """Reads the user's `key=value` pairs; the file of MaxText's settings gets the key
    `base_config`.

    Raises:
      UsageError: an argument has another form.
    """
    found: dict[str, str] = {}
    for one in argv:
        key, equals, value = one.partition("=")
        if not equals and one.endswith((".yml", ".yaml")):
            key, value = "base_config", one
        elif not equals or not key.isidentifier():
            raise UsageError(
                f"`{one}` is not an argument of MaxText",
                hint=f"write `key=value`, as in `-- {_SELF.example}`",
            )
        if key == _COMPILER_OPTIONS and value:
            raise UsageError(
                f"`{key}` belongs to MaxText's training command: a search would compile without it",
                hint="give each option to the search, as `--xla NAME=VALUE`; export writes them",
            )
        found[key] = value
    return found


def _config(own: dict[str, str], more: dict[str, object]) -> Any:
    """Returns MaxText's configuration for the user's arguments and those of a plan.

    It is made once for equal arguments: MaxText takes a second to read its own defaults.

    Raises:
      UsageError: MaxText refuses them.
    """
    base = own.get("base_config") or str(_maxtext().base)
    texts = {key: value for key, value in own.items() if key != "base_config"}
    texts = {_DATASET: "synthetic", **texts, **_FIXED}
    texts |= {key: str(value) for key, value in more.items()}
    return _initialized(base, tuple(texts.items()), jax.device_count())


@cache
def _initialized(base: str, texts: tuple[tuple[str, str], ...], device_count: int) -> Any:
    """Makes the configuration; MaxText asks for the number of devices itself, which is only a key
    of the cache."""
    del device_count
    argv = ["automesh", base, *(f"{key}={value}" for key, value in texts)]
    try:
        with kept_environment():  # MaxText writes a folder for programs into XLA_FLAGS.
            return _maxtext().pyconfig.initialize(argv)
    except SystemExit as error:  # MaxText prints the reason and ends the process.
        reason = error.__context__ or error
    except Exception as error:  # noqa: BLE001 - any error here is caused by MaxText's arguments
        reason = error
    raise UsageError(
        f"MaxText refuses its arguments: {first_lines(reason)}",
        hint=_hint(reason) or "give what its training command takes, as `key=value` after `--`",
    )


def _hint(error: BaseException) -> str:
    """Suggests a known key that is similar to an unknown one."""
    text = str(error)
    if "Extra inputs are not permitted" not in text and "not a valid" not in text:
        return ""
    named = [line.strip() for line in text.splitlines() if line.strip().isidentifier()]
    return f"name a key of MaxText's{did_you_mean(named[0], _keys())}" if named else ""


@cache
def _keys() -> tuple[str, ...]:
    lines = _maxtext().base.read_text().splitlines()
    return tuple(line.partition(":")[0] for line in lines if line[:1].isalpha() and ":" in line)


def _key(axis: str) -> str:
    return _PIPELINE if axis == _STAGE else axis


def _sizes(mesh: Mesh) -> dict[str, object]:
    """Returns all sizes of the mesh, so that MaxText uses no default.

    The step does not depend on the granules of the devices, so all sizes are given as sizes inside
    one.

    Raises:
      UsageError: MaxText has no such axis.
    """
    check_names(mesh, _axes(), _WHOSE)
    return {
        f"{network}_{_key(name)}_parallelism": mesh.shape.get(name, 1) if network == "ici" else 1
        for name in _axes()
        for network in ("ici", "dcn")
    }


@cache
def _axes() -> tuple[str, ...]:
    """Returns the axes for which this MaxText has sizes."""
    found = [
        key.removeprefix("ici_").removesuffix("_parallelism")
        for key in _keys()
        if key.startswith("ici_") and key.endswith("_parallelism")
    ]
    return tuple(_STAGE if name == _PIPELINE else name for name in found)


def _hardware(mesh: Mesh, own: dict[str, str]) -> str:
    """Returns MaxText's name for the hardware: the one that the user gives, or that of the devices
    of the mesh."""
    platform = str(mesh.devices.flat[0].platform)
    return own.get("hardware") or {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def _whole(mesh: Mesh, config: Any) -> Mesh:
    """Returns the mesh with all of MaxText's axes, in its order.

    Raises:
      UsageError: MaxText does not have an axis of more than one device.
    """
    rules = _plain(config.custom_mesh_and_rule)
    return whole_mesh(
        mesh,
        tuple(config.mesh_axes),
        f"{_WHOSE} with custom_mesh_and_rule={rules}" if rules else _WHOSE,
        AxisType.Explicit if _plain(config.shard_mode) == "explicit" else AxisType.Auto,
    )


def _plain(value: Any) -> str:
    """Returns a setting as text; some are members of an enumeration."""
    return str(getattr(value, "value", value))


def _baseline(asked: Any, mesh: Mesh) -> str | None:
    """Returns mesh and knobs of the user's own arguments, as text; None if the space lacks an
    axis."""
    parts: list[str] = []
    is_open: list[str] = []
    for prefix, network in (("dcn.", "dcn"), ("", "ici")):
        for name in _axes():
            size = getattr(asked, f"{network}_{_key(name)}_parallelism", 1)
            if network == "dcn" and size == -1:
                # `dcn_data_parallelism` is open by default; its size is 1 if there is one granule.
                if name in mesh.axis_names:
                    is_open.append(f"{prefix}{name}:-1")
                elif spans_granules():
                    return None
                continue
            if size == 1:
                continue
            if name not in mesh.axis_names:
                return None
            parts.append(f"{prefix}{name}:{size}")
    if not parts:
        return None
    knobs = {"remat_policy": asked.remat_policy, _ACCUMULATION: asked.gradient_accumulation_steps}
    if rules := _plain(asked.custom_mesh_and_rule):
        knobs["custom_mesh_and_rule"] = rules
    return " ".join(
        [",".join(is_open + parts), *(f"{name}={value}" for name, value in knobs.items())]
    )
