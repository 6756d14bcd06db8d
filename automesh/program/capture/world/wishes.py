"""Reads which devices a script asks jax for, by settings and variables in its first lines (jax).

Where the target says how many devices there are, jax has started before the script's first line.
The script's setting then comes too late and is ignored with a notice, though it would work in a run
without automesh. Where the target is this machine as it is, jax starts when the script asks for
devices, so its setting works.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from automesh.program.absent.device_queries import attached
from automesh.program.capture.world.told import tell

_COUNT, _FLAGS = "jax_num_cpu_devices", "XLA_FLAGS"
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
# Settings that choose devices: they are ignored once jax has found its devices.
_OF_DEVICES = frozenset({_COUNT, "jax_platforms", "jax_platform_name"})
# jax's message for a setting that comes too late.
_TOO_LATE = re.compile(r"before (any )?(jax )?backends? (are|is)|before JAX computations", re.I)


@dataclass(slots=True)
class _State:
    """The data of this process about the settings of the script in progress."""

    is_captured: bool = False
    is_installed: bool = False
    is_late: bool = False
    asked: int = 0


_STATE = _State()


@contextmanager
def wishes_heard(*, is_late: bool) -> Generator[None]:
    """Ignores settings of jax that come too late while the body runs.

    Args:
      is_late: whether jax has started, as it has where the target says how many devices there are.
    """
    _install()
    _STATE.is_captured, _STATE.is_late, _STATE.asked = True, is_late, 0
    flags, config = os.environ.get(_FLAGS, ""), _setting()
    try:
        yield
    finally:
        _STATE.is_captured = False
        wished = _wished(os.environ.get(_FLAGS, ""))
        if wished == _wished(flags):
            wished = 0
        if is_late:
            if wished and wished != len(attached()):
                _tell_passed_over(f"{wished} devices in XLA_FLAGS", len(attached()))
        elif wished or _setting() != config:
            here = attached()
            _STATE.asked = len(here) if here[0].platform == "cpu" else 0


def has_started() -> bool:
    """Whether jax has its devices already, so that settings for them come too late."""
    return bool(importlib.import_module("jax._src.xla_bridge").backends_are_initialized())


def devices_asked_for() -> int:
    """Returns how many virtual CPU devices the last run asked for and got; 0 if it asked for
    none."""
    return _STATE.asked


def _setting() -> Any:
    return getattr(jax.config, _COUNT, None)


def _wished(flags: str) -> int:
    found = _FLAG.findall(flags)
    return int(found[-1]) if found else 0


def _tell_passed_over(what: str, here: int) -> None:
    tell(f"the script asks for {what}; it was given the {here} that the target has")


def _install() -> None:
    if _STATE.is_installed:
        return
    _STATE.is_installed = True
    owner: Any = type(jax.config)
    original = owner.update

    @functools.wraps(original)
    def update(config: Any, name: str, val: Any) -> None:
        if not _STATE.is_captured:
            original(config, name, val)
            return
        if _STATE.is_late and name in _OF_DEVICES:
            here = len(attached())
            if name == _COUNT and val not in (here, -1, None):
                _tell_passed_over(f"{val} devices by `{_COUNT}`", here)
            return
        try:
            original(config, name, val)
        except RuntimeError as error:
            if not _TOO_LATE.search(str(error)):
                raise
            tell(f"`{name}` was set by the script after jax had started, and had no effect")

    owner.update = update
