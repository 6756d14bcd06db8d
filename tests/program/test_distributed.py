"""Several processes as one jax program, seen by a process that is alone."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import jax
from automesh.program.distributed import count_processes
assert count_processes() == 1
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
"""


def test_counting_processes_does_not_start_jax() -> None:
    """A script that sets its devices when it is imported comes after the count."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environ.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
