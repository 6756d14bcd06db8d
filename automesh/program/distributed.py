"""Several processes as one jax program: joining them, and what they agree on (jax).

A worker of a gang joins before any code of the user's runs. A script that calls
`jax.distributed.initialize()` itself, as training under a launcher does, finds that done.
"""

from __future__ import annotations

import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from automesh.program.notes import note

# The search watches the processes from outside, and ends all of them when one is lost: jax's own
# limits are the second line, far above it.
_JOIN_S = 100
_HEARTBEAT_S = 100
_SOCKET = "jax_cross_host_transfer_socket_address"
_TRANSPORTS = "jax_cross_host_transport_addresses"
_NUM_TRANSPORTS = 4  # As jax has by itself, of which each carries a part of an array.


def join(coordinator: str, *, rank: int, count: int, host: str = "") -> None:
    """Makes this process number `rank` of `count` that run one jax program.

    Args:
      coordinator: `address:port` of the process of rank 0.
      host: address at which the others reach this one; empty if nobody says it: then stages of a
        pipeline cannot send from CPU to CPU.

    Raises:
      RuntimeError: the others did not come, or jax had started already.
    """
    if host and jax.config.values.get("jax_platforms") == "cpu":
        # Before jax makes its devices, of whatever plans these are for. Other devices have wires.
        jax.config.update(_SOCKET, _free_address(host))
        # Those of jax are at 0.0.0.0, and each tells its sender so: for another host that is the
        # sender itself.
        own = f"[{host}]:0" if ":" in host else f"{host}:0"
        jax.config.update(_TRANSPORTS, ",".join([own] * _NUM_TRANSPORTS))
    distributed: Any = jax.distributed
    distributed.initialize(
        coordinator_address=coordinator,
        num_processes=count,
        process_id=rank,
        # Under SLURM and Open MPI jax would take one device by itself; JAX_LOCAL_DEVICE_IDS still
        # counts, which an agent sets where that is wanted.
        cluster_detection_method="deactivate",
        initialization_timeout=_JOIN_S,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )
    distributed.initialize = _joined_already
    distributed.shutdown = _stays_joined


def _free_address(host: str) -> str:
    """With a port that nobody has now; jax binds it when it makes its devices.

    Port 0 leaves the receiver waiting for ever (jax 0.10.2).
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
    """Processes of this jax program; does not start jax, which the script may yet configure."""
    return jax.process_count() if is_joined() else 1


def meet() -> None:
    """Waits on the devices until all processes are here, within microseconds of each other.

    Only for processes that come at about the same time: gloo, the library of jax's collectives on
    CPUs, gives up after 30 s.
    """
    multihost_utils.sync_global_devices("automesh")


def gathered(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """What all processes have: [processes, ...own]; all of them must call it with equal shapes.

    float64 goes as bytes, since jax may be told to know no 64 bits.
    """
    as_bytes = np.frombuffer(own.tobytes(), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(as_bytes))
    count = jax.process_count()
    return np.frombuffer(rows.tobytes(), np.float64).reshape(count, *own.shape)
