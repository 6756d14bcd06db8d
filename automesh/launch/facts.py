"""The facts that an agent reports of its host when it connects, and which must agree on all
hosts."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from automesh.hardware import parse_target
from automesh.hardware.processes import usable_cores
from automesh.launch.ranks import order_of_this_host

LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""The variable that makes `jax.distributed.initialize` take only some of a host's GPUs."""
# For each platform, the variables that choose devices, and a pattern of files that each device has
# one of: the device nodes of the NVIDIA driver, and the render nodes of AMD's KFD.
_GPUS = {
    "cuda": (("CUDA_VISIBLE_DEVICES",), ("/dev", "nvidia[0-9]*")),
    "rocm": (("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ("/dev/dri", "renderD*")),
}
_PACKAGES = (
    *(("automesh", "jax-automesh"), ("jax", "jax"), ("jaxlib", "jaxlib")),
    # The compilers of TPUs and GPUs: they must produce the same programs on every host.
    *(("libtpu", "libtpu"), ("jax-cuda12-plugin", "jax-cuda12-plugin")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts of a host, found by its agent.

    Attributes:
      name: shown to people: the name of the host, or the name that was given to the agent.
      machine: id of the machine, to find agents that share one.
      pid: process id of the agent.
      address: at which other hosts reach this one.
      versions: versions of python, automesh, jax and jaxlib.
      platforms: the platforms of `--target local` on this host, as a value of JAX_PLATFORMS.
      cores: cores that the agent may use.
      memory_bytes: free memory when the agent connected.
      devices: the GPUs that JAX_LOCAL_DEVICE_IDS can name on this host; empty if they are not known
        or the devices are no GPUs.
      order: number of the host in the order of its engine, which the ranks of a gang follow; -1 if
        unknown.
    """

    name: str
    machine: str
    pid: int
    address: str
    versions: tuple[tuple[str, str], ...]
    platforms: str
    cores: int
    memory_bytes: int
    devices: tuple[int, ...] = ()
    order: int = -1


def own_versions() -> tuple[tuple[str, str], ...]:
    """Returns the versions of the packages that must be equal on all hosts, read without importing
    jax."""
    found = [("python", ".".join(platform.python_version_tuple()[:2]))]
    for name, package in _PACKAGES:
        try:
            found.append((name, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def own_facts(*, name: str, search: str) -> HostFacts:
    """Collects the facts of this host.

    Args:
      name: the name that the user gave; empty for the host's own name.
      search: `address:port` of the search; other hosts reach this one at the address from which it
        reaches the search.
    """
    platforms = parse_target("local", os.environ).platforms
    return HostFacts(
        # The engine's own name for the host, which its users know.
        name=name or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        machine=socket.gethostname(),
        pid=os.getpid(),
        address=_address_towards(search),
        versions=own_versions(),
        platforms=platforms,
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().available,
        devices=local_devices(platforms, os.environ),
        order=order_of_this_host(),
    )


def local_devices(platforms: str, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the numbers that jax gives to the GPUs of this host, found without importing jax.

    jax counts the GPUs that the driver shows, from 0 (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES
    and HIP_VISIBLE_DEVICES choose among them).

    Args:
      platforms: value of JAX_PLATFORMS.
    """
    first = platforms.partition(",")[0].strip()
    if first not in _GPUS:
        return ()
    if named := environ.get(LOCAL_DEVICES, "").strip():
        ids = named.split(",")
        return tuple(map(int, ids)) if all(re.fullmatch(r"[0-9]{1,4}", one) for one in ids) else ()
    chosen, devices = _GPUS[first]
    for variable in chosen:
        if variable in environ:
            named = environ[variable].strip()
            return tuple(range(len(named.split(",")))) if named else ()
    folder, pattern = devices
    return tuple(range(len(list(Path(folder).glob(pattern)))))


def shares_of(devices: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Splits devices evenly among processes, in order.

    Raises:
      ValueError: they cannot be split evenly.

    >>> shares_of((0, 1, 2, 3), 2)
    ((0, 1), (2, 3))
    """
    if not devices or len(devices) % count:
        raise ValueError(f"{len(devices)} devices cannot be split evenly among {count} processes")
    each = len(devices) // count
    return tuple(tuple(devices[at : at + each]) for at in range(0, len(devices), each))


def version_difference(search: dict[str, str], agent: dict[str, str]) -> str:
    """Returns words such as `jax 0.11.0, and the search 0.12.0`; empty if no version differs."""
    for name in search:
        if search[name] != agent.get(name):
            return f"{name} {agent.get(name, 'none')}, and the search {search[name]}"
    return ""


def joined_address(host: str, port: int) -> str:
    """Joins host and port: `10.0.0.1:8600`, or `[fd00::1]:8600`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_towards(search: str) -> str:
    host, _, port = search.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # This sends no packet: the system only chooses the address that it would use.
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"
