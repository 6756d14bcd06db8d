"""The shipped scripts, searched and then trained on the winner; device counts unlike 2^n."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automesh import api
from automesh.mesh.axes import DEFAULT_AXES
from automesh.outcomes import Measured
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.slow

_LOSS = re.compile(r"step +\d+  loss (\d+\.\d+)")


def train(script: Path, *arguments: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return [float(match[1]) for match in _LOSS.finditer(done.stdout)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "axis"),
    [("moe_lm", "ep"), ("long_context", "sp")],
)
def test_an_example_is_searched_and_then_trained_on_the_winner(
    name: str, axis: str, tmp_path: Path
) -> None:
    space = tmp_path / "space.toml"
    # Three meshes of 8 devices, all of which use the axis in question.
    sizes = {"dp": "{}", axis: "{ min = 2, max = 8 }"}
    lines = [f"{name} = {sizes.get(name, '{ size = 1 }')}\n" for name in DEFAULT_AXES]
    space.write_text(f"[axes]\n{''.join(lines)}")
    rules = tmp_path / "mesh_rules.toml"
    script = EXAMPLES / f"{name}.py"
    result = api.search(
        script,
        target="cpu:8",
        space=space,
        budget="45s",
        top=3,
        rules=rules,
        results=tmp_path / "results",
    )
    measured = [one for one in result.found.candidates if isinstance(one.outcome, Measured)]
    assert len(measured) == 3
    assert all(one.plan.sizes[axis] > 1 for one in measured)
    assert all(one.outcome.numerics == "agree" for one in measured)
    assert all(one.outcome.values == "user" for one in measured)

    losses = train(script, "--devices", "8", "--steps", "30", "--rules", str(rules))
    alone = train(script, "--devices", "1", "--steps", "30")
    assert len(losses) == len(alone) == 30
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(alone, abs=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("devices", [24, 96, 384])
def test_any_number_of_devices_is_searched_to_the_end(devices: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("ROWS", str(devices)))
    space = tmp_path / "space.toml"
    space.write_text("[axes]\ndp = { min = 3 }\ntp = { max = 8 }\n")
    result = api.search(
        script,
        target=f"cpu:{devices}",
        space=space,
        budget="15s",
        top=1,
        rules=tmp_path / "mesh_rules.toml",
        results=tmp_path / "results",
    )
    assert result.found.verifications
    shape = result.best.mesh_shape
    assert f'match = "cpu-{devices}"' in (tmp_path / "mesh_rules.toml").read_text()
    assert sum(shape.ici_mesh_shape) > 3


_SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def build(mesh):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss
    w = jax.ShapeDtypeStruct((8, 24), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct((ROWS, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return jax.jit(step, donate_argnums=0), (w, x)
"""
