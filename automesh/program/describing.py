"""What surrounds a program: devices, versions, environment, the source that it came from (jax)."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib

from automesh.program.nouns import Device, Entry

_PACKAGES = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_", "LIBTPU_", "NCCL_")
_INSTALLED = ("site-packages", "dist-packages")


def devices() -> tuple[Device, ...]:
    """All devices, in jax's order."""
    return described(jax.devices())


def described(found: Sequence[Any]) -> tuple[Device, ...]:
    """What jax says of devices, in their order."""
    return tuple(_device(device) for device in found)


def _device(device: Any) -> Device:
    return Device(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process_index=device.process_index,
        slice_index=int(getattr(device, "slice_index", 0) or 0),
        coords=tuple(int(one) for one in getattr(device, "coords", None) or ()),
    )


def device_memory_bytes() -> int:
    """What the first local device can hold, 0 where the backend does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def versions() -> tuple[tuple[str, str], ...]:
    """Of python, automesh, jax, jaxlib, and of libtpu or the CUDA plugin where installed."""
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
    return tuple(sorted(found))


def environment() -> tuple[tuple[str, str], ...]:
    """The variables that change what gets compiled or how devices talk, sorted by name."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    )


def source_hash(entry: Entry) -> str:
    """Hash of the user's own code: the script, and the modules beside it or in the working
    directory that are imported now. Installed packages are left out: their versions stand for
    them."""
    roots = {Path.cwd().resolve()}
    files: set[Path] = set()
    if entry.kind != "module":
        location = Path(entry.location).resolve()
        files.add(location)
        if entry.kind == "script":
            roots.add(location.parent)
    own = Path(__file__).resolve().parents[1]
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        path = Path(name).resolve() if isinstance(name, str) else None
        if (
            path is None
            or path.is_relative_to(own)
            or any(part in _INSTALLED for part in path.parts)
        ):
            continue
        inside = [root for root in roots if path.is_relative_to(root)]
        # A virtual environment inside the project is no part of it; a project inside the prefix is.
        foreign = any(
            path.is_relative_to(p) and not r.is_relative_to(p) for p in prefixes for r in inside
        )
        if inside and not foreign and path.is_file():
            files.add(path)
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda file: (file.name, str(file))):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]
