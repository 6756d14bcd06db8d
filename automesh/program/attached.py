"""Names the devices of this machine as searches do (jax)."""

from __future__ import annotations

from automesh.hardware import selector_of
from automesh.mesh.layout.create import devices_of
from automesh.program.surroundings import described


def attached_selector() -> str:
    """Returns the selector of all devices of the default backend, with those of other processes.

    Raises:
      UsageError: jax has no devices, or knows none of their platform.

    Example:
      >>> attached_selector()
      'cpu-8'
    """
    return selector_of(described(devices_of(None)))
