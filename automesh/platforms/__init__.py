"""The kinds of devices: all facts in which CPUs, GPUs and TPUs differ."""

from __future__ import annotations

from automesh.platforms.cpu import CPU
from automesh.platforms.gpu import GPU
from automesh.platforms.platform import Platform, Scheduling
from automesh.platforms.tpu import TPU

PLATFORMS = (CPU, GPU, TPU)
NAMES = tuple(platform.name for platform in PLATFORMS)
_BY_NAME: dict[str, Platform] = {platform.name: platform for platform in PLATFORMS}
COMPILED_ABSENT = tuple(platform for platform in PLATFORMS if platform.plugins)
"""Platforms whose compilers need no device."""


_UNSCHEDULED = Scheduling(source="the module as partitioned: nothing is scheduled yet")


def scheduling_of(name: str) -> Scheduling:
    """Returns how the compiler of a platform schedules collectives; for `none`, not at all.

    Raises:
      KeyError: there is no such platform.
    """
    return _UNSCHEDULED if name == "none" else platform_named(name).scheduling


def platform_named(name: str) -> Platform:
    """Returns the platform with this name in jax.

    Raises:
      KeyError: there is none.

    >>> platform_named("tpu").devices
    'TPUs'
    """
    return _BY_NAME[name]
