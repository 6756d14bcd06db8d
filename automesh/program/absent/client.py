"""Absent devices, as a compile-only client of jax provides them (jax).

Only this module uses such clients: `jax.experimental.topologies`, libtpu, the CUDA plugin.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.compilers import is_too_old, wanted_by_jax
from automesh.hardware.gpu_configurations import (
    configured_memory_bytes,
    known_configurations,
    read_configuration,
)
from automesh.outcomes import Failed
from automesh.package import installed_version
from automesh.platforms import platform_named
from automesh.program.lower.compiled import is_out_of_memory, out_of_memory
from automesh.program.refused import StepRefused
from automesh.program.surroundings import other_libtpu

Versions = tuple[tuple[str, str], ...]

_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Settings of jax that change the compiled program.
_SETTINGS = (
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_enable_remat_opt_pass",
    "jax_disable_most_optimizations",
    "jax_use_shardy_partitioner",
    "jax_xla_profile_version",
)
_VARIABLES = ("XLA_", "LIBTPU_")
# 128 float32 arrays of 4 GiB are 512 GiB, which no device holds. With a larger size some versions
# of libtpu fail before they state the limit; and for one array larger than a chip's memory others
# (0.0.41) state that memory, and not the part that a program may use.
_ARRAYS, _ARRAY = 128, (2**15, 2**15)
_LONGEST = 200


def devices_of(one: AbsentDevices) -> list[Any]:
    """Returns the devices of a topology, in jax's order; the same objects at every call.

    Raises:
      StepRefused: the compile-only client is not installed, does not fit this jax, or does not know
        the devices.
    """
    return list(_devices(one))


@cache
def usable_bytes(one: AbsentDevices) -> int:
    """Returns the memory of one device that a program may use.

    For TPUs this is the compiler's own limit, read from its refusal of a program that fits no
    device. For GPUs it is all memory that the target or its configuration states, since their
    compiler refuses no program.

    Raises:
      StepRefused: as `devices_of`; or the compiler does not state its limit.
    """
    if one.platform == "gpu":
        _check_configured(one)
        return one.memory_bytes or configured_memory_bytes(one.gpu)
    everywhere = NamedSharding(Mesh(np.array(devices_of(one)), ("all",)), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(_ARRAY, np.float32, sharding=everywhere)] * _ARRAYS
    said = "it accepts a program of 512 GiB"
    try:
        step = jax.jit(lambda *arrays: [x + 1 for x in arrays], out_shardings=everywhere)
        step.lower(*arrays).compile()
    except jax.errors.JaxRuntimeError as error:
        said = _first_line(error)
        if is_out_of_memory(error):
            limit = out_of_memory(error, stage="start").limit_bytes
            if limit > 0:
                return limit
    raise _refused(
        f"{_client(one.platform)} does not state the memory of a {one.device_kind}: {said}",
        f"{platform_named(one.platform).install}, which takes the version that this jax wants",
    )


def versions_for(platform: str) -> Versions:
    """Returns the versions of jax, jaxlib and the compiler of a platform."""
    plugins = platform_named(platform).plugins
    packages = [name for plugin in reversed(plugins) for name in plugin.packages]
    found = [(name, version) for name in packages if (version := installed_version(name))]
    if platform == "tpu" and (other := other_libtpu(os.environ)):
        found = [("libtpu", other)]
    return (("jax", jax.__version__), ("jaxlib", jaxlib.__version__), *found)


def settings() -> Versions:
    """Returns the environment variables and settings of jax that change the compiled program."""
    variables = [(k, v) for k, v in os.environ.items() if k.startswith(_VARIABLES)]
    known = [(name, value) for name in _SETTINGS if (value := _setting(name)) is not None]
    return tuple(sorted((*variables, *known)))


def _setting(name: str) -> str | None:
    """Returns the value of a setting; None if this jax does not have it."""
    config: Any = jax.config
    if hasattr(config, name):
        return str(getattr(config, name))
    try:
        return str(config.read(name))  # Settings without a context manager.
    except (AttributeError, KeyError):
        return None


def compiler_input(one: AbsentDevices) -> list[str]:
    """Returns all facts about the devices that the compiler gets, as plain values."""
    configuration = read_configuration(one.gpu) if one.gpu else ""
    # This text is the key of stored programs, so it keeps the first name of the class.
    return [repr(one).replace(type(one).__name__, "Elsewhere", 1), configuration]


def is_absent(device: Any) -> bool:
    """Whether a device is absent, so that programs can only be compiled for it."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def check_compiled_for(one: AbsentDevices, compiled: jax.stages.Compiled) -> None:
    """Checks that jax has not compiled for the devices of this process instead.

    Raises:
      StepRefused: jax has compiled for the devices of this process.
    """
    executable: Any = compiled.runtime_executable()
    # An executable that can run here has local devices; one for absent devices has none.
    if executable is None or hasattr(executable, "local_devices"):
        raise _refused(
            f"jax has compiled for the devices of this machine, not for {one.device_kind}",
            "let `build` put nothing on devices: arguments as `jax.ShapeDtypeStruct`, "
            "shardings on the mesh that it is given",
        )


@cache
def _devices(one: AbsentDevices) -> tuple[Any, ...]:
    _check_installed(one.platform)
    if one.platform == "gpu":
        _check_configured(one)
    try:
        topology = _tpu_topology(one) if one.platform == "tpu" else _gpu_topology(one)
    # Plugins may raise any exception.
    except Exception as error:
        raise _not_given(one, error) from error
    devices = tuple(topology.devices)
    if len(devices) != one.num_devices:
        raise _refused(
            f"{_client(one.platform)} makes {len(devices)} devices of `{one.topology}`, "
            f"but the target has {one.num_devices}",
            platform_named(one.platform).install,
        )
    return devices


def _tpu_topology(one: AbsentDevices) -> Any:
    bounds: dict[str, Any] = {"chips_per_host_bounds": one.host} if one.host else {}
    config = {"chip_config_name": one.chip_config} if one.chip_config else {}
    wraps = {"wrap": (*one.wraps, False, False)[:3]} if one.wraps else {}
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=one.topology,
        num_slices=one.num_granules,
        **bounds,
        **config,
        **wraps,
    )


def _gpu_topology(one: AbsentDevices) -> Any:
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=one.gpu,
        target_config=read_configuration(one.gpu),
        topology=one.topology,
    )


def _check_installed(platform: str) -> None:
    if platform == "tpu":
        # jax looks at this variable first.
        if os.environ.get("TPU_LIBRARY_PATH"):
            return
        is_there = _is_there("libtpu")
    else:
        is_there = any(map(_is_there, _CUDA_PLUGINS))
    if not is_there:
        raise _refused(
            f"compiling for {platform_named(platform).devices} that are not here needs "
            f"{platform_named(platform).compiler}, "
            "which is not installed",
            platform_named(platform).install,
        )
    wanted, found = wanted_by_jax(platform), _installed(platform)
    if found is not None and is_too_old(found[1], wanted):
        raise _refused(
            f"{' '.join(found)} is too old for jax {jax.__version__}, which wants {wanted}",
            platform_named(platform).install,
        )


def _check_configured(one: AbsentDevices) -> None:
    if one.gpu not in known_configurations():
        raise _refused(
            f"there is no target configuration for {one.device_kind or 'these GPUs'}; "
            f"there are {', '.join(known_configurations())}",
            "name another target, or rank the meshes by estimate with `--dry-run`",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Even its parent package is missing.
        return False


def _not_given(one: AbsentDevices, error: Exception) -> StepRefused:
    """Turns an exception of a plugin that gave no devices into one sentence."""
    text = str(error)
    client = _client(one.platform)
    if "lockfile" in text:
        return _refused(
            "another process uses libtpu, and its lock file keeps this one out",
            "set ALLOW_MULTIPLE_LIBTPU_LOAD=1 where no TPU is attached, else wait for that process",
        )
    if re.search(r"PJRT API|api version|undefined symbol|cannot open|file too short", text, re.I):
        return _refused(
            f"{client} does not fit jaxlib {jaxlib.__version__}: {_first_line(error)}",
            f"{platform_named(one.platform).install}, which takes the version that this jax wants",
        )
    return _refused(
        f"{client} does not know `{one.topology}` of {one.device_kind}: {_first_line(error)}",
        "name a target that `automesh targets` lists, or rank its meshes by estimate "
        "with `--dry-run`",
    )


def _client(platform: str) -> str:
    found = _installed(platform)
    return " ".join(found) if found else platform_named(platform).compiler


def _installed(platform: str) -> tuple[str, str] | None:
    """Returns the package that compiles for a platform, and its version; None if none is
    installed."""
    packages = reversed(platform_named(platform).packages)
    return next(((name, found) for name in packages if (found := installed_version(name))), None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].strip().rstrip(".") if lines else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _refused(reason: str, hint: str) -> StepRefused:
    return StepRefused(Failed(stage="start", reason=reason, hint=hint))
