"""Filters automesh's own compiler options to those that the installed compiler knows (jax).

Options change with releases of XLA, and a compiler refuses a program if it does not know an option.
So each option is first tried on an empty program.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from automesh.mesh.axes import Scalar
from automesh.platforms import PLATFORMS
from automesh.platforms.platform import Options
from automesh.program.notes import note
from automesh.texts.exceptions import in_one_line

# Errors of jax and XLA about unknown options and unknown values.
_UNKNOWN = ("No such compile option", "is not a valid CompilerEffortLevel")


def quick_options(platform: str) -> Options:
    """Returns compiler options for a program that is never run."""
    return next((one.quick_options for one in PLATFORMS if one.name == platform), ())


def known(options: Options, device: Any) -> Options:
    """Returns the given options that the compiler of `device` knows; notes the others in the log.

    Args:
      device: a device that the options will be used for, attached or absent.
    """
    return tuple(
        (name, value) for name, value in options if _is_known(name, value, _OfDevice(device))
    )


def compile_quickly(lowered: jax.stages.Lowered, device: Any) -> jax.stages.Compiled:
    """Compiles a program that is only examined and never run.

    Args:
      device: one of the devices that it is compiled for.
    """
    return lowered.compile(compiler_options=options_to_examine(device))


def options_to_examine(device: Any) -> Any:
    """Returns the options with which programs are compiled that are never run."""
    return dict(known(quick_options(device.platform), device))


class _OfDevice:
    """A device as a key that is equal for all devices with the same compiler."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def _key(self) -> tuple[str, str, str]:
        return (self.device.platform, self.device.device_kind, type(self.device.client).__name__)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OfDevice) and self._key() == other._key()


@cache
def _is_known(name: str, value: Scalar, on: _OfDevice) -> bool:
    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(on.device))
    options: Any = {name: value}
    try:
        jax.jit(lambda x: x).lower(scalar).compile(compiler_options=options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _UNKNOWN):
            return True  # Another error, which the user's program will also meet.
        note(f"the compiler option `{name}={value}` is left out: {in_one_line(error)}")
        return False
    return True
