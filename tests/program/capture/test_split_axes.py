"""The script's name of an axis that is split means its parts, also on a mesh used before."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

# In a process of its own: `meaning` changes jax for as long as a process lives.
READ_BEFORE = """
import jax
from automesh.program.capture.nouns import AxisSplit
from automesh.program.capture.split_axes import meaning
made = lambda: jax.make_mesh((2, 2), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
before = made()
assert dict(before.shape) == {"dp": 2, "fsdp": 2} and dict(before.abstract_mesh.shape)
with meaning((AxisSplit(axis="data", into=("dp", "fsdp")),)):
    assert made() is before  # jax gives equal meshes one object
    print(before.shape["data"], before.abstract_mesh.shape["data"], dict(made().shape))
try:
    before.shape["data"]
except KeyError as error:
    print(error)
"""


def test_a_mesh_whose_sizes_were_read_before_has_the_scripts_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_BEFORE],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.stdout, done.returncode) == ("4 4 {'dp': 2, 'fsdp': 2}\n'data'\n", 0), done.stderr
