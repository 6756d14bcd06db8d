"""The environment variables of a new worker."""

from __future__ import annotations

import re
from collections.abc import Mapping

from automesh.hardware.absent import AbsentDevices
from automesh.platforms import platform_named
from automesh.texts.storage_url import OWN_VARIABLES
from automesh.worker.messages import Surroundings
from automesh.worker.place import PLACE

# Without it the order of a set of strings differs between processes, and so does the program of a
# step that iterates over one: the compiled program of a plan could not be compared with the
# measured one.
_HASH_SEED = "0"
TOKEN = "AUTOMESH_TOKEN"
"""The environment variable with the token of a search and its agents."""
TOKEN_FILE = "AUTOMESH_TOKEN_FILE"
"""The environment variable that names a file of mode 0600 with the token."""
TOKEN_VARIABLES = (TOKEN, TOKEN_FILE)
CPU_DEVICES = "AUTOMESH_CPU_DEVICES"
"""The environment variable with the number of a worker's virtual devices; not set if jax chooses
it."""
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count(=\S*)?")


def surroundings_for(one: AbsentDevices, *, cpu_devices: int = 1) -> Surroundings:
    """Returns the surroundings of workers that compile for absent devices.

    Args:
      cpu_devices: number of virtual devices that replace them in jobs that compile nothing.
    """
    return Surroundings(
        platforms="cpu",
        cpu_devices=cpu_devices,
        variables=platform_named(one.platform).worker_variables,
    )


def hash_seed(environ: Mapping[str, str]) -> str:
    """Returns the PYTHONHASHSEED of all workers: the user's own, else a fixed one."""
    # Python treats an empty value as unset; `random` is the user's own choice.
    return environ.get("PYTHONHASHSEED") or _HASH_SEED


def environment(base: Mapping[str, str], surroundings: Surroundings) -> dict[str, str]:
    """Returns the variables of a worker: the parent's, overridden by the surroundings, then by
    automesh's own.

    Args:
      base: the parent's own environment.
      surroundings: surroundings of the worker.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **base, **dict(surroundings.variables)}
    # Secrets that user code must not see: the password of the storage and the token of the search.
    for name in (*OWN_VARIABLES, *TOKEN_VARIABLES):
        variables.pop(name, None)
    if PLACE not in dict(surroundings.variables):
        variables.pop(PLACE, None)
    variables["PYTHONHASHSEED"] = hash_seed(variables)
    variables["PYTHONUNBUFFERED"] = "1"  # Output before a crash must be in the log.
    variables["JAX_PLATFORMS"] = surroundings.platforms
    variables.pop(CPU_DEVICES, None)
    if surroundings.cpu_devices > 0:
        variables["JAX_NUM_CPU_DEVICES"] = str(surroundings.cpu_devices)
        variables[CPU_DEVICES] = str(surroundings.cpu_devices)
        # jax refuses to start when the number is given in both ways.
        if flags := without_device_count(variables.pop("XLA_FLAGS", "")):
            variables["XLA_FLAGS"] = flags
    return variables


def without_device_count(flags: str) -> str:
    """Returns XLA's flags without the one for the number of virtual CPU devices."""
    return " ".join(_DEVICE_COUNT_FLAG.sub("", flags).split())
