"""Facts about this process: the cores that it may use, and whether it is one of several."""

from __future__ import annotations

import os
from collections.abc import Mapping

# (variable with the number of processes, variable with the number of this one)
_LAUNCHERS = (
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("JAX_NUM_PROCESSES", ""),
)


def usable_cores() -> int:
    """Counts the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Not on macOS and Windows.
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def running_under_several_processes(environ: Mapping[str, str]) -> str:
    """Says why this process seems to be one of several, e.g. `SLURM_NTASKS=8`; empty if alone."""
    for count, index in _LAUNCHERS:
        number = environ.get(count, "")
        # As text: it may have thousands of digits, of which Python makes no integer.
        if (
            number.isdecimal()
            and number.lstrip("0") not in ("", "1")
            and (not index or index in environ)
        ):
            return f"{count}={number}"
    if environ.get("JAX_COORDINATOR_ADDRESS"):
        return f"JAX_COORDINATOR_ADDRESS={environ['JAX_COORDINATOR_ADDRESS']}"
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
    if len(hosts) > 1:
        return f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts"
    return ""
