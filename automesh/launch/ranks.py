"""Finds which of several processes this one is, if an engine started all: `srun automesh search
...`.

`jax.distributed.initialize()` finds out by itself the number of processes, which of them it is in,
and the host of process 0. This module reads the same variables, so that the command that starts a
training can start a search as well: process 0 searches, the others are its agents. Source: the
classes of jax/_src/clusters (SlurmCluster, OmpiCluster, GkeTpuCluster, GceTpuCluster; equal in jax
0.10.1 and 0.12 but for Open MPI 5, which 0.12 asks mpi4py for); a test compares them. This module
does not import jax, since a search's own process does not.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PORTS = 2**12  # SLURM and Open MPI: a port of the last 4096, chosen by the number of the job.
_FIRST_PORT = 65535 - _PORTS + 1
_TPU_PORT = 8482
_PORT = "JAX_COORDINATOR_PORT"
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_METADATA_S = 3.0
_MOST_PROCESSES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The number of this process among those that an engine has started.

    Attributes:
      number: what `jax.process_index()` would return.
      count: what `jax.process_count()` would return.
      host: the host of process 0.
      port: where jax's coordination service would listen on that host; nothing listens there while
        a search runs, since its gangs use other ports.
      local: the number of this process among those on its host; None if the process has all devices
        of the host.
    """

    number: int
    count: int
    host: str
    port: int
    local: int | None = None


def find_rank(environ: Mapping[str, str]) -> Rank | None:
    """Finds which of several processes this is; None if it is alone or this is not known."""
    readers = (_of_jax, _of_mpi, _of_slurm, _of_tpu_in_gke, _of_tpu_vm)
    for read in readers:
        try:
            rank = read(environ)
        except (ValueError, KeyError, IndexError):
            continue  # Malformed variables count as missing: try the next engine.
        if rank is not None and rank.count > 1:
            if not 0 <= rank.number < rank.count <= _MOST_PROCESSES:
                return None
            return rank
    return None


def devices_of(rank: Rank, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which this process takes the devices that a training
    would take.

    Where several processes share a host, jax gives each one the device with its local number.
    """
    if rank.local is None or environ.get(_LOCAL_DEVICES):
        return {}
    return {_LOCAL_DEVICES: str(rank.local)}


def _number(text: str) -> int:
    """Reads a number of at most eight digits.

    Raises:
      ValueError: the text is no such number.
    """
    if not re.fullmatch(r"[0-9]{1,8}", text):
        raise ValueError(text)
    return int(text)


def _port(environ: Mapping[str, str], otherwise: int) -> int:
    return _number(environ[_PORT]) if environ.get(_PORT) else otherwise


def _of_jax(environ: Mapping[str, str]) -> Rank | None:
    """Returns the variables that people set by hand: jax's own one for the address, and two common
    ones."""
    if not all(environ.get(name) for name in _JAX):
        return None
    host, _, port = environ[_JAX[0]].rpartition(":")
    return Rank(
        number=_number(environ[_JAX[2]]),
        count=_number(environ[_JAX[1]]),
        host=host.strip("[]"),
        port=_number(port),
    )


def _of_slurm(environ: Mapping[str, str]) -> Rank | None:
    if not all(name in environ for name in _SLURM):
        return None
    job, nodes, count, number, local = (environ[name] for name in _SLURM)
    # `n7`, `n7,m1`, `n[7-9],m1`, `n[7,9]`: the first of them.
    found = re.match(r"(?P<prefix>[^,\[]+)(\[(?P<first>[^,\-\]]+))?", nodes)
    if found is None:
        return None
    return Rank(
        number=_number(number),
        count=_number(count),
        host=found["prefix"] + (found["first"] or ""),
        port=_port(environ, _FIRST_PORT + int(job[:18]) % _PORTS),
        local=_number(local),
    )


def _of_mpi(environ: Mapping[str, str]) -> Rank | None:
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if found is None or not all(name in environ for name in _MPI):
        return None
    count, number, local = (_number(environ[name]) for name in _MPI)
    job = int(uri.partition(".")[0][:18]) // 2**12  # Open MPI's job ids are multiples of 2^12.
    return Rank(
        number=number,
        count=count,
        host=found[1] or found[2],
        port=_port(environ, _FIRST_PORT + job % _PORTS),
        local=local,
    )


def _of_tpu_in_gke(environ: Mapping[str, str]) -> Rank | None:
    if "TPU_WORKER_ID" not in environ:
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    return _of_tpu(environ, hosts.split(","), _number(environ["TPU_WORKER_ID"]))


def _of_tpu_vm(environ: Mapping[str, str]) -> Rank | None:
    """Returns the rank on a TPU VM; asks the metadata server only if there are chips and libtpu."""
    if environ.get("TPU_SKIP_MDS_QUERY") is not None or not _has_chips():
        return None
    number = _metadata(environ, "agent-worker-number")
    if not number:
        return None
    own = dict(
        re.findall(r"(?m)^\s*(MEGASCALE_\w+)\s*:\s*'?([^'\n]*)", _metadata(environ, "tpu-env"))
    )
    workers = _metadata(environ, "worker-network-endpoints").split(",")
    # Each entry is the name of a host, or a name, a number and an address with colons between.
    hosts = [one.split(":")[2] if one.count(":") == 2 else one for one in workers]
    return _of_tpu({**own, **environ}, hosts, _number(number.strip()))


def _of_tpu(environ: Mapping[str, str], hosts: list[str], number: int) -> Rank | None:
    named = [host.strip() for host in hosts if host.strip()]
    if not named:
        return None
    slices = _number(environ.get("MEGASCALE_NUM_SLICES") or "1")
    which = _number(environ.get("MEGASCALE_SLICE_ID") or "0")
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or named[0]
    return Rank(
        number=number + which * len(named),
        count=len(named) * slices,
        host=first.split(":")[0],
        port=_port(environ, _TPU_PORT),
    )


def _has_chips() -> bool:
    """Whether this looks like a TPU VM: jax, too, looks for PCI devices and libtpu."""
    if find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def _metadata(environ: Mapping[str, str], key: str) -> str:
    """Reads an attribute of this machine from the metadata server; empty if it is not set."""
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    asked = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=_METADATA_S) as answer:
            return answer.read(2**20).decode(errors="replace")
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def order_of_this_host() -> int:
    """Returns the number of this host in the order of its engine; -1 if unknown."""
    rank = find_rank(os.environ)
    return rank.number if rank is not None else -1
