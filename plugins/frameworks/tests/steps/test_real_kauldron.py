"""Kauldron as the package index has it, unmodified, through the whole of a search (long).

    pip install uv
    uv pip install kauldron==1.4.4
    pytest -m long plugins/frameworks/tests/steps/test_real_kauldron.py

pip alone may look for versions of Kauldron's many dependencies for half an hour.
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from plugins.frameworks.tests.support.framework_runs import run_module

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("kauldron") is None,
        reason="needs Kauldron, installed as the head of this file says",
    ),
]

CONFIG = """
from kauldron import konfig

with konfig.imports():
    import numpy as np
    import optax
    import strategies
    from flax import linen as nn
    from kauldron import kd


def get_config():
    cfg = kd.train.Trainer(seed=1, num_train_steps=5)
    cfg.train_ds = ROWS
    cfg.model = kd.nn.FlatAutoencoder(
        inputs="batch.image",
        encoder=nn.Dense(features=1024),
        decoder=nn.Dense(features=28 * 28),
    )
    cfg.train_losses = {"recon": kd.losses.L2(preds="preds.image", targets="batch.image")}
    cfg.optimizer = optax.adamw(learning_rate=0.003)
    cfg.aux = {"layers": 2}
    return cfg
"""
ROWS = """kd.data.py.DataSource(
        data_source=[{"image": np.zeros((28, 28, 1), "float32")}] * 64,
        shuffle=False,
        batch_size=64,
        num_workers=0,
    )"""
TFDS = """kd.data.py.Tfds(
        name="mnist",
        split="train",
        data_dir="absent",
        shuffle=True,
        batch_size=64,
        transforms=[
            kd.data.Elements(keep=["image"]),
            kd.data.ValueRange(key="image", vrange=(0, 1)),
        ],
    )"""
# A strategy of the user's own: rows over `data`, the inner dimension of the layers over `model`.
STRATEGIES = """
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kauldron import kd


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(kd.sharding.ShardingStrategy):
    mesh: Mesh
    batch: Any = dataclasses.field(init=False)
    params: Any = dataclasses.field(init=False)
    opt_state: Any = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "batch", NamedSharding(self.mesh, P("data")))
        object.__setattr__(self, "params", self.split)
        object.__setattr__(self, "opt_state", self.split)

    def split(self, tree):
        def place(path, leaf):
            layer = [getattr(key, "key", None) for key in path]
            inner = P("model") if layer[-2:] == ["decoder", "kernel"] else P()
            inner = P(None, "model") if layer[-2:] == ["encoder", "kernel"] else inner
            return NamedSharding(self.mesh, inner)

        return jax.tree_util.tree_map_with_path(place, tree)


def blocks(data=1, model=8):
    devices = np.array(jax.devices()).reshape(data, model)
    return Blocks(mesh=Mesh(devices, ("data", "model")))
"""


def fsdp(megabytes: int) -> str:
    return f"FSDPSharding(min_size_to_shard_mb={megabytes})"


# What a plan is, and the arguments with which Kauldron's training is the same.
PLANS = {
    "devices:8 params=REPLICATED opt_state=None": (),
    f"devices:8 params={fsdp(0)} opt_state=None": (
        f"--cfg.sharding=py::kd.sharding.ShardingStrategy(params=kd.sharding.{fsdp(0)})",
    ),
    f"devices:8 params=REPLICATED opt_state={fsdp(1)}": (
        f"--cfg.sharding=py::kd.sharding.ShardingStrategy(opt_state=kd.sharding.{fsdp(1)})",
    ),
    f"devices:8 params={fsdp(1)} opt_state={fsdp(0)} model.encoder.use_bias=False": (
        "--cfg.sharding=py::kd.sharding.ShardingStrategy("
        f"params=kd.sharding.{fsdp(1)},opt_state=kd.sharding.{fsdp(0)})",
        "--cfg.model.encoder.use_bias=False",
    ),
}
OWN = "--cfg.sharding=py::strategies.blocks(data={},model={})"
SPACE = """
batch_axes = ["devices"]
[axes]
devices = {}
[constraints]
devices = { divides = "batch" }
[knobs]
params = ["REPLICATED", "FSDPSharding(min_size_to_shard_mb=0)"]
"""
OWN_SPACE = """
batch_axes = ["data"]
[axes]
data = {}
model = { max = 4 }
[constraints]
data = { divides = "batch" }
"""


def written(folder: Path) -> Path:
    (folder / "config.py").write_text(CONFIG.replace("ROWS", ROWS))
    (folder / "strategies.py").write_text(STRATEGIES)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture(scope="module")
def fingerprints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all plans, in one process: none may make another's step a different one."""
    found = searched(*PLANS, cwd=written(tmp_path_factory.mktemp("plans")))
    return dict(zip(PLANS, found, strict=True))


run = partial(run_module, sees_cwd=True)


def trained(*arguments: str, cwd: Path) -> dict[str, object]:
    """The step that Kauldron's training command runs."""
    words = ["--cfg=config.py", f"--cfg.workdir={cwd / 'work'}", *arguments]
    return json.loads(
        run("plugins.frameworks.tests.support.kauldron_training", *words, cwd=cwd).splitlines()[-1]
    )


def searched(*plans: str, cwd: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The steps that a search takes for plans."""
    words = [*plans, "--", "--cfg=config.py", *arguments]
    return json.loads(
        run("plugins.frameworks.tests.support.kauldron_step", *words, cwd=cwd).splitlines()[-1]
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_with_the_strategies_of_a_plan_runs_the_step_that_is_searched(
    plan: str, folder: Path, fingerprints: dict[str, str]
) -> None:
    theirs = trained(*PLANS[plan], cwd=folder)
    assert theirs["devices"] == 8
    assert bool(theirs["split"]) == ("FSDP" in plan)
    assert fingerprints[plan] == theirs["fingerprint"]


def test_a_strategy_with_a_mesh_of_the_users_own_is_searched_on_its_axes(folder: Path) -> None:
    theirs = trained(OWN.format(2, 4), cwd=folder)
    assert theirs["split"]
    found = searched("data:2,model:4", cwd=folder, arguments=[OWN.format(1, 8)])
    assert found == [theirs["fingerprint"]]


def test_a_data_set_that_is_not_here_gives_the_step_of_its_shapes(
    folder: Path, fingerprints: dict[str, str]
) -> None:
    (folder / "config.py").write_text(CONFIG.replace("ROWS", TFDS))
    plan = next(iter(PLANS))
    assert searched(plan, cwd=folder) == [fingerprints[plan]]
    assert not (folder / "absent").exists()


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(folder: Path) -> None:
    (folder / "space.toml").write_text(SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "25m", "--top", "2"]
    words += ["--rules", "rules.toml", "--", "--cfg=config.py"]
    run("automesh", "search", "kauldron", *words, cwd=folder)
    [rule] = tomllib.loads((folder / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    knobs = {
        name: value if value == "None" else f"kd.sharding.{value}"
        for name, value in rule["knobs"].items()
    }
    words = [f"{name}={value}" for name, value in knobs.items()]
    strategy = f"py::kd.sharding.ShardingStrategy({','.join(words)})"
    theirs = trained(f"--cfg.sharding={strategy}", cwd=folder)
    # Not the fingerprint in the rule, which is of the first step: the compiler lays out the
    # optimizer's state otherwise from the second one on.
    plan = " ".join(["devices:8", *(f"{name}={value}" for name, value in rule["knobs"].items())])
    assert searched(plan, cwd=folder) == [theirs["fingerprint"]]


def test_axes_of_the_users_own_are_searched_to_a_measured_rule(folder: Path) -> None:
    (folder / "space.toml").write_text(OWN_SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "25m", "--top", "2"]
    words += ["--rules", "rules.toml", "--", "--cfg=config.py", OWN.format(1, 8)]
    run("automesh", "search", "kauldron", *words, cwd=folder)
    [rule] = tomllib.loads((folder / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    sizes = [rule["ici"].get(name, 1) for name in ("data", "model")]
    theirs = trained(OWN.format(*sizes), cwd=folder)
    assert theirs["fingerprint"] == rule["evidence"]["program"]["fingerprint"]


@pytest.mark.parametrize("target", ["tpu-v5p-64", "gpu-h100-16"])
def test_devices_that_are_not_here_are_estimated(target: str, folder: Path) -> None:
    words = ["--target", target, "--dry-run", "--json", "--", "--cfg=config.py"]
    told = json.loads(run("automesh", "search", "kauldron", *words, cwd=folder))
    assert told["baseline"].endswith("params=REPLICATED opt_state=None")
    assert len(told["candidates"]) > 3
