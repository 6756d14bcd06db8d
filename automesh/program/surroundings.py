"""Describes what a program depends on: devices, versions, environment and source files (jax)."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib

from automesh.program.nouns import Device, Entry
from automesh.program.script.sources import Sources, hash_of_file, is_users

_PACKAGES = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_", "LIBTPU_", "NCCL_")
# Attributes of devices by which kernels are chosen; equal for all devices of a kind.
_SAID = (
    "compute_capability",
    "core_count",
    "device_vendor",
    "num_cores",
    "shared_memory_per_block_optin",
)
# The order of sets of strings, which programs may depend on: `automesh.worker.environment` sets it.
_HASH_SEED = "PYTHONHASHSEED"
# jax's variables that change programs or their compiles (jax/_src/config.py). Settings in the
# script are part of its source.
_JAX_VARIABLES = frozenset(
    f"JAX_{name}"
    for name in (
        "DEFAULT_DTYPE_BITS",
        "DEFAULT_MATMUL_PRECISION",
        "DEFAULT_PRNG_IMPL",
        "DISABLE_MOST_OPTIMIZATIONS",
        "ENABLE_REMAT_OPT_PASS",
        "ENABLE_X64",
        "EXEC_TIME_OPTIMIZATION_EFFORT",
        "MEMORY_FITTING_EFFORT",
        "MEMORY_FITTING_LEVEL",
        "NUMPY_DTYPE_PROMOTION",
        "OPTIMIZATION_LEVEL",
        "THREEFRY_PARTITIONABLE",
        "USE_SHARDY_PARTITIONER",
        "XLA_PROFILE_VERSION",
    )
)


def devices() -> tuple[Device, ...]:
    """Returns all devices, in jax's order."""
    return described(jax.devices())


def described(found: Sequence[Any]) -> tuple[Device, ...]:
    """Describes devices by jax's attributes, in their order."""
    return tuple(_device(device) for device in found)


def _device(device: Any) -> Device:
    return Device(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process_index=device.process_index,
        slice_index=int(getattr(device, "slice_index", 0) or 0),
        coords=tuple(int(one) for one in getattr(device, "coords", None) or ()),
        says=tuple(
            (name, said)
            for name in _SAID
            if isinstance(said := getattr(device, name, None), (int, str))
        ),
    )


def device_memory_bytes() -> int:
    """Returns the memory of the first local device; 0 if the backend does not state it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def versions() -> tuple[tuple[str, str], ...]:
    """Returns the versions of python, automesh, jax, jaxlib, and of libtpu or the CUDA plugin if
    installed."""
    found = [
        ("python", platform.python_version()),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    ]
    for name, package in (("automesh", "jax-automesh"), *((one, one) for one in _PACKAGES)):
        try:
            found.append((name, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    if other := other_libtpu(os.environ):
        found = [*(one for one in found if one[0] != "libtpu"), ("libtpu", other)]
    return tuple(sorted(found))


def other_libtpu(environ: Mapping[str, str]) -> str:
    """Identifies a libtpu that the user names instead of the package's; empty if there is none."""
    named = environ.get("TPU_LIBRARY_PATH", "")
    if not named:
        return ""
    path = Path(named)
    # The package sets this variable to its own file when it is imported.
    spec = importlib.util.find_spec("libtpu")
    own = list(spec.submodule_search_locations or ()) if spec is not None else []
    if any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in own):
        return ""
    try:
        status = path.stat()
    except OSError:
        return path.name
    changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
    return f"{path.name} of {status.st_size} bytes, {changed}"


def environment() -> tuple[tuple[str, str], ...]:
    """Returns the environment variables that change traces, compiles or communication, sorted by
    name."""
    return tuple(
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(_VARIABLES) or name in _JAX_VARIABLES or name == _HASH_SEED
        )
    )


def sources(entry: Entry) -> Sources:
    """Hashes the user's own code: the script, and all modules that are imported now. Installed
    packages are left out, since their versions identify them."""
    roots, files = roots_of(entry), set[Path]()
    if entry.kind != "module":
        files.add(Path(entry.location).resolve())
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        path = Path(name).resolve() if isinstance(name, str) else None
        if path is not None and is_users(path, roots) and path.is_file():
            files.add(path)
    ordered = sorted(files, key=lambda file: (file.name, str(file)))
    return tuple((str(path), hash_of_file(path)) for path in ordered)


def roots_of(entry: Entry) -> tuple[Path, ...]:
    """Returns the folders that contain the user's own code."""
    cwd = Path.cwd().resolve()
    return (Path(entry.location).resolve().parent, cwd) if entry.kind == "script" else (cwd,)
