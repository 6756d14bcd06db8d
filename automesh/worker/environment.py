"""The environment that a worker is born with."""

from __future__ import annotations

import re
from collections.abc import Mapping

from automesh.hardware.absent import AbsentDevices
from automesh.platforms import platform_named
from automesh.texts.storage_url import OWN_VARIABLES
from automesh.worker.messages import Surroundings
from automesh.worker.place import PLACE

# Without it the order of a set of strings changes from process to process, and with it the program
# of a step that goes through one: what a plan compiles to could not be compared with what runs.
_HASH_SEED = "0"
TOKEN = "AUTOMESH_TOKEN"
"""The environment variable with what a search and its agents know each other by."""
TOKEN_FILE = "AUTOMESH_TOKEN_FILE"
"""The environment variable that names a file of mode 0600 with the token."""
TOKEN_VARIABLES = (TOKEN, TOKEN_FILE)
CPU_DEVICES = "AUTOMESH_CPU_DEVICES"
"""Variable of a worker: how many virtual devices its target has; absent if jax is to say it."""
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count(=\S*)?")


def surroundings_for(one: AbsentDevices, *, cpu_devices: int = 1) -> Surroundings:
    """The environment in which workers compile for devices that are not here.

    Args:
      cpu_devices: virtual devices that stand in for them where nothing is compiled.
    """
    return Surroundings(
        platforms="cpu",
        cpu_devices=cpu_devices,
        variables=platform_named(one.platform).worker_variables,
    )


def hash_seed(environ: Mapping[str, str]) -> str:
    """PYTHONHASHSEED of all workers: the user's own, if there is one."""
    # An empty value means to Python that there is none; `random` is the user's own wish.
    return environ.get("PYTHONHASHSEED") or _HASH_SEED


def environment(base: Mapping[str, str], surroundings: Surroundings) -> dict[str, str]:
    """The variables of a worker: those of the parent, the surroundings over them, ours last.

    Args:
      base: the parent's own environment.
      surroundings: what the worker shall find.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **base, **dict(surroundings.variables)}
    # The password of the storage and the token of a gang's search: user code has no use for them.
    for name in (*OWN_VARIABLES, *TOKEN_VARIABLES):
        variables.pop(name, None)
    if PLACE not in dict(surroundings.variables):
        variables.pop(PLACE, None)
    variables["PYTHONHASHSEED"] = hash_seed(variables)
    variables["PYTHONUNBUFFERED"] = "1"  # What was printed before a crash must be in the log.
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
    """Flags of XLA without the one that says how many virtual CPU devices there are."""
    return " ".join(_DEVICE_COUNT_FLAG.sub("", flags).split())
