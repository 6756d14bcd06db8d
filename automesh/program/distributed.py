"""Joins several processes to one jax program, and exchanges values between them (jax).

A worker of a gang joins before any user code runs. If a script itself calls
`jax.distributed.initialize()`, as training under a launcher does, the call does nothing.
"""

from __future__ import annotations

import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from automesh.program.notes import note

# The search watches the processes from outside and ends all of them if one is lost. jax's own
# limits are much longer and only a fallback.
_JOIN_S = 100
_HEARTBEAT_S = 100
_SOCKET = "jax_cross_host_transfer_socket_address"
_TRANSPORTS = "jax_cross_host_transport_addresses"
_NUM_TRANSPORTS = 4  # jax's default; each one sends a part of an array.


def join(coordinator: str, *, rank: int, count: int, host: str = "") -> None:
    """Makes this process number `rank` of the `count` processes of one jax program.

    Args:
      coordinator: `address:port` of the process of rank 0.
      host: address at which the other processes reach this one; empty if unknown: then stages of a
        pipeline cannot send from CPU to CPU.

    Raises:
      RuntimeError: the others did not join, or jax had already started.
    """
    if host and jax.config.values.get("jax_platforms") == "cpu":
        # Must be set before jax makes its devices, so for all plans. Other devices need no sockets.
        jax.config.update(_SOCKET, _free_address(host))
        # jax's default address is 0.0.0.0, which it sends to the other side; on another host this
        # address means that host itself.
        own = f"[{host}]:0" if ":" in host else f"{host}:0"
        jax.config.update(_TRANSPORTS, ",".join([own] * _NUM_TRANSPORTS))
    distributed: Any = jax.distributed
    distributed.initialize(
        coordinator_address=coordinator,
        num_processes=count,
        process_id=rank,
        # Under SLURM and Open MPI jax would choose one device by itself. JAX_LOCAL_DEVICE_IDS,
        # which an agent sets if needed, still works.
        cluster_detection_method="deactivate",
        initialization_timeout=_JOIN_S,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )
    distributed.initialize = _joined_already
    distributed.shutdown = _stays_joined


def _free_address(host: str) -> str:
    """Returns the host with a port that is free now; jax binds it when it makes its devices.

    With port 0 the receiver would wait for ever (jax 0.10.2).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((host, 0))
        port = one.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_joined() -> bool:
    """Whether `join` was called."""
    return jax.distributed.initialize is _joined_already


def _joined_already(*_: Any, **__: Any) -> None:
    note("jax.distributed.initialize() was called by the script: automesh has done it already")


def _stays_joined() -> None:
    note("jax.distributed.shutdown() was called by the script: the processes stay together")


def count_processes() -> int:
    """Returns the number of processes of this jax program; does not start jax, which the script may
    still configure."""
    return jax.process_count() if is_joined() else 1


def meet() -> None:
    """Waits on the devices until all processes have arrived; they continue within microseconds.

    The processes must arrive at about the same time: gloo, which does jax's collectives on CPUs,
    gives up after 30 s.
    """
    multihost_utils.sync_global_devices("automesh")


def gathered(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the arrays of all processes: [processes, ...own]; all must call it with equal shapes.

    float64 is sent as bytes, since 64-bit types may be disabled in jax.
    """
    as_bytes = np.frombuffer(own.tobytes(), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(as_bytes))
    count = jax.process_count()
    return np.frombuffer(rows.tobytes(), np.float64).reshape(count, *own.shape)
