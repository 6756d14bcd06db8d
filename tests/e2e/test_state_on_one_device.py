"""State that a script makes on one device is named in a script that runs as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
state = {"count": COUNT, "w": put(np.ones((64, 64), np.float32), "fsdp")}
def train_step(state, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"count": state["count"] + 1, "w": state["w"] - 0.1 * g}, loss
train_step = jax.jit(train_step, donate_argnums=0)
for _ in range(4):
    state, loss = train_step(state, put(np.ones((32, 64), np.float32), "fsdp"))
"""
COUNTS = {"jnp.zeros((), jnp.int32)": True, "put(np.zeros((), np.int32))": False}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_counter_on_one_device_costs_a_second_compile(count: str, tmp_path: Path) -> None:
    """It was named for `build` alone, and the argument was called `args[0]`."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("COUNT", count))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "lint", "train.py", "--target", "cpu:8"],
        cwd=tmp_path,
        env=environment | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = "train.py:7: second-compile: state['count']"
    assert (said in done.stdout) is COUNTS[count], done.stdout + done.stderr
