"""What an agent says of its host when it comes, and what must be the same on all of them."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from importlib import metadata

import psutil

from automesh.hardware import parse_target
from automesh.hardware.processes import usable_cores
from automesh.launch.ranks import order_of_this_host

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
    return HostFacts(
        # As the engine calls it: its users know its hosts by that.
        name=name or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        machine=socket.gethostname(),
        pid=os.getpid(),
        address=_address_towards(search),
        versions=own_versions(),
        platforms=parse_target("local", os.environ).platforms,
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().available,
        order=order_of_this_host(),
    )


def version_difference(search: dict[str, str], agent: dict[str, str]) -> str:
    """`jax 0.11.0, and the search 0.12.0`; empty if nothing differs."""
    for name in search:
        if search[name] != agent.get(name):
            return f"{name} {agent.get(name, 'none')}, and the search {search[name]}"
    return ""


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
