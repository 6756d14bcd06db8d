"""Keeps the number of a worker's virtual CPU devices at that of its target (jax).

A script may contain a line like `jax.config.update("jax_num_cpu_devices", 8)` for its own runs. A
search for `cpu:4` must not get meshes of eight devices from it, nor a rule for `cpu-4`.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from automesh.errors import UsageError
from automesh.program.absent.device_queries import own
from automesh.program.notes import note
from automesh.worker.environment import CPU_DEVICES, without_device_count

_OPTION = "jax_num_cpu_devices"
# Read before any user code runs; empty if jax finds the devices itself.
_WANTED = os.environ.get(CPU_DEVICES, "")


def wanted_devices() -> int:
    """Returns the number of virtual CPU devices of this worker's target; 0 if jax chooses it."""
    return int(_WANTED) if _WANTED.isdecimal() else 0


def hold_device_count() -> tuple[str, ...]:
    """Resets the number that the script has set, unless jax has started with it.

    Returns:
      Notices for the user; empty if the script has set nothing.
    """
    wanted = wanted_devices()
    if not wanted:
        return ()
    said: list[str] = []
    flags = os.environ.get("XLA_FLAGS", "")
    if (others := without_device_count(flags)) != " ".join(flags.split()):
        os.environ["XLA_FLAGS"] = others
        said.append("--xla_force_host_platform_device_count in XLA_FLAGS")
    config: Any = jax.config
    asked = config.jax_num_cpu_devices
    if asked != wanted:
        try:
            config.update(_OPTION, wanted)
        except RuntimeError:  # jax has started: `check_device_count` checks the number.
            return ()
        said.append(f"`{_OPTION}` to {asked}")
    if not said:
        return ()
    notice = f"the script sets {' and '.join(said)}; the target's {wanted} devices are searched"
    note(notice)
    return (notice,)


def check_device_count() -> None:
    """Checks that jax has started with the devices of the target.

    Raises:
      UsageError: the script has started it with another number.
    """
    wanted, found = wanted_devices(), len(own())
    if wanted and found != wanted:
        raise UsageError(
            f"the script has started jax with {found} devices, but the target has {wanted}",
            hint=f"remove what sets `{_OPTION}` or the platform from the script, or search what it "
            f"asks for: `--target cpu:{found}`",
        )
