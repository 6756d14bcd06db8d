"""The step of a run on one mesh, left for the processes that look at that mesh later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.carried import carried_scripts

# The settings of the script decide which program it is; `data` depends on the mesh.
SCRIPT = """# data:2,model:4 | data:8,model:1
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_threefry_partitionable", False)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
data = mesh.shape["data"]
w = jax.device_put(np.full((16, 32), 0.1), NamedSharding(mesh, P("data" if data > 2 else None)))


@jax.jit
def train_step(w, x):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) / data)(w)
    return w - 0.1 * slope, loss


for step in range(6):
    x = jax.device_put(np.ones((48, 16)), NamedSharding(mesh, P("data")))
    w, loss = train_step(w, x)
"""


def job(what: str, folder: Path) -> dict[str, Any]:
    return carried_scripts(what, folder)["wide"]


def test_a_later_process_has_the_settings_of_the_run(tmp_path: Path) -> None:
    """Without them the stored step was lowered in another way than the script lowers it."""
    (tmp_path / "wide.py").write_text(SCRIPT)
    job("store", tmp_path)
    first = job("check", tmp_path)
    assert first["difference"]
    assert first["starts"] == ["data:2,model:4", "data:8,model:1"]
    later = job("build", tmp_path)
    assert later["starts"] == first["starts"]
    assert later["program"] == first["program"]
    assert "f64" in later["program"]
