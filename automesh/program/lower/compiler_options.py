"""The compiler options that automesh sets by itself, as far as the installed compiler knows them
(jax).

Options come and go with releases of XLA, and a compiler refuses a program for the sake of one that
it does not know. So each is tried first, on a program that does nothing.
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
from automesh.program.notes import in_one_line, note

# What jax and XLA say of options that they do not have, and of values that none of theirs has.
_UNKNOWN = ("No such compile option", "is not a valid CompilerEffortLevel")


def quick_options(platform: str) -> Options:
    """Compiler options for a program that is never run."""
    return next((one.quick_options for one in PLATFORMS if one.name == platform), ())


def known(options: Options, device: Any) -> Options:
    """Those of our own options that the compiler of `device` knows; the log names the others.

    Args:
      device: a device that the options are going to be used for, here or not.
    """
    return tuple(
        (name, value) for name, value in options if _is_known(name, value, _OfDevice(device))
    )


def compile_quickly(lowered: jax.stages.Lowered, device: Any) -> jax.stages.Compiled:
    """A program that is compiled to be looked at, and never run.

    Args:
      device: one of those that it is compiled for.
    """
    options: Any = dict(known(quick_options(device.platform), device))
    return lowered.compile(compiler_options=options)


class _OfDevice:
    """A device as a key: one compiler serves all of its kind."""

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
            return True  # Something else is wrong, which the user's program is going to meet, too.
        note(f"the compiler option `{name}={value}` is left out: {in_one_line(error)}")
        return False
    return True
