"""The environment that a worker is born with."""

from __future__ import annotations

import re
from collections.abc import Mapping

from automesh.worker.messages import Surroundings

_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count(=\S*)?")


def environment(base: Mapping[str, str], surroundings: Surroundings) -> dict[str, str]:
    """The variables of a worker: those of the parent, the surroundings over them, ours last.

    Args:
      base: the parent's own environment.
      surroundings: what the worker shall find.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **base, **dict(surroundings.variables)}
    variables["PYTHONUNBUFFERED"] = "1"  # What was printed before a crash must be in the log.
    variables["JAX_PLATFORMS"] = surroundings.platforms
    if surroundings.cpu_devices > 0:
        variables["JAX_NUM_CPU_DEVICES"] = str(surroundings.cpu_devices)
        # jax refuses to start when the number is given in both ways.
        flags = _DEVICE_COUNT_FLAG.sub("", variables.pop("XLA_FLAGS", "")).split()
        if flags:
            variables["XLA_FLAGS"] = " ".join(flags)
    return variables
