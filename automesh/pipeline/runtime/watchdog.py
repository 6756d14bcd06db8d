"""Steps that have to end in time: a stage that fails or hangs is told in a sentence (jax)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax

from automesh.errors import AutomeshError

T = TypeVar("T")


def run_in_time(call: Callable[[], T], *, timeout_s: float) -> T:
    """What a call returns, once it is there.

    If it is not in time, the process ends with a sentence and exit code 1: nothing else ends what
    hangs on a device. With several processes, jax's coordination service then ends the others.

    Raises:
      AutomeshError: a program of the call failed on its device.
    """
    timer = threading.Timer(timeout_s, _end, [timeout_s])
    timer.daemon = True
    timer.start()
    try:
        return jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise AutomeshError(
            f"a stage of the pipeline failed on its devices: {lines[-1].strip()}"
        ) from error
    finally:
        timer.cancel()


def _end(timeout_s: float) -> NoReturn:
    sys.stderr.write(
        f"error: a step of the pipeline did not end in {timeout_s:g} s: a stage hangs, or another "
        "process is gone\n"
    )
    sys.stderr.flush()
    # An orderly exit would wait for the devices.
    os._exit(1)
