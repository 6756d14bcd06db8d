"""What an agent says of its host when it comes, and what must be the same on all of them."""

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
"""The variable by which `jax.distributed.initialize` takes some of a host's GPUs alone."""
# By platform, the variables that choose devices, and files of which each device has one: Linux'
# device nodes of the NVIDIA driver, and the render nodes that AMD's KFD gives work to.
_GPUS = {
    "cuda": (("CUDA_VISIBLE_DEVICES",), ("/dev", "nvidia[0-9]*")),
    "rocm": (("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ("/dev/dri", "renderD*")),
}
_PACKAGES = (
    *(("automesh", "jax-automesh"), ("jax", "jax"), ("jaxlib", "jaxlib")),
    # The compiler of TPUs, and that of GPUs: what they make must be the same wherever it is made.
    *(("libtpu", "libtpu"), ("jax-cuda12-plugin", "jax-cuda12-plugin")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host as its agent sees it.

    Attributes:
      name: for people: the name of the host, unless the agent was given another one.
      machine: of the host, to tell which agents share one.
      pid: of the agent.
      address: at which other hosts reach this one.
      versions: of python, automesh, jax and jaxlib.
      platforms: what `--target local` means there, as a value of JAX_PLATFORMS.
      cores: that the agent may use.
      memory_bytes: free when it came.
      devices: what JAX_LOCAL_DEVICE_IDS can name there: the GPUs that a process would take; none
        where that cannot be told, or the devices are others.
      order: where it stands among the hosts of its engine, which the ranks of a gang follow; -1 if
        nobody says it.
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
    """Of what has to be the same on all hosts, without an import of jax."""
    found = [("python", ".".join(platform.python_version_tuple()[:2]))]
    for name, package in _PACKAGES:
        try:
            found.append((name, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def own_facts(*, name: str, search: str) -> HostFacts:
    """This host.

    Args:
      name: that the user gave it; empty for the host's own.
      search: `address:port` of the search: what reaches it from here is where others reach us.
    """
    platforms = parse_target("local", os.environ).platforms
    return HostFacts(
        # As the engine calls it: its users know its hosts by that.
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
    """The GPUs of this host by the numbers that jax gives them, without an import of jax.

    They count those that the driver shows (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES choose among them, and it counts anew).

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
    """Devices dealt to processes in order, as many to each.

    Raises:
      ValueError: they cannot be dealt evenly.

    >>> shares_of((0, 1, 2, 3), 2)
    ((0, 1), (2, 3))
    """
    if not devices or len(devices) % count:
        raise ValueError(f"{len(devices)} devices cannot be dealt evenly to {count} processes")
    each = len(devices) // count
    return tuple(tuple(devices[at : at + each]) for at in range(0, len(devices), each))


def version_difference(search: dict[str, str], agent: dict[str, str]) -> str:
    """`jax 0.11.0, and the search 0.12.0`; empty if nothing differs."""
    for name in search:
        if search[name] != agent.get(name):
            return f"{name} {agent.get(name, 'none')}, and the search {search[name]}"
    return ""


def joined_address(host: str, port: int) -> str:
    """`10.0.0.1:8600`, or `[fd00::1]:8600`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_towards(search: str) -> str:
    host, _, port = search.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # No packet is sent: the system only says which of its addresses it would use.
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"
