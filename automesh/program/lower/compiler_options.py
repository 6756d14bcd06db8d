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
from automesh.program.notes import in_one_line, note

Options = tuple[tuple[str, Scalar], ...]

# jax's EffortLevel O0 (jax/_src/config.py); XLA takes the number. On TPU it leaves out what costs
# time and changes the schedule: a compile takes a fifth, its verdict on memory still rejects.
_LOW_EFFORT: dict[str, Options] = {"tpu": (("optimization_level", 9),), "gpu": ()}
# Without a GPU there is nothing to time kernels on, and Triton's untimed tiles are arbitrary:
# matrix products go to cuBLAS.
_NEEDED: dict[str, Options] = {
    "tpu": (),
    "gpu": (("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False)),
}
# For programs of which only the shardings are wanted: no time goes into good machine code.
_QUICK: dict[str, Options] = {
    "cpu": (
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
    ),
    "tpu": _LOW_EFFORT["tpu"],
    "gpu": _NEEDED["gpu"],
}
# What jax and XLA say of options that they do not have, and of values that none of theirs has.
_UNKNOWN = ("No such compile option", "is not a valid CompilerEffortLevel")


def low_effort(platform: str) -> Options:
    """Compiler options that give a verdict on memory and the collectives in a fraction of the time.

    Empty where the compiler is quick at its default effort.
    """
    return _LOW_EFFORT[platform]


def needed_options(platform: str) -> Options:
    """Compiler options without which programs cannot be compiled, or not well, without devices."""
    return _NEEDED[platform]


def quick_options(platform: str) -> Options:
    """Compiler options for a program that is never run."""
    return _QUICK.get(platform, ())


def known(options: Options, device: Any) -> Options:
    """Those of our own options that the compiler of `device` knows; the log names the others.

    Args:
      device: a device that the options are going to be used for, here or not.
    """
    return tuple(
        (name, value) for name, value in options if _is_known(name, value, _OfDevice(device))
    )


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
