"""EasyDeL as the package index has it, unmodified, through the whole of a search (long).

    pip install easydel==0.3.0 pillow torch
    pip install jax==0.10.2    # ejkernel 0.0.78 asks for 0.9, with which automesh does not work
    pytest -m long plugins/frameworks/tests/steps/test_real_easydel.py

EasyDeL's own flags for compilers (`EASYDEL_AUTO`) are those of an older XLA: a newer one ends the
process. Its training is started without them here.
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugins.frameworks.tests.support.framework_runs import run_module

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(one) is None for one in ("easydel", "torch")),
        reason="needs EasyDeL, installed as the head of this file says",
    ),
]

NAMES = ("dp", "fsdp", "ep", "tp", "sp")
ROWS = 32
TRAINER = {
    "trainer_type": "sft",
    "max_length": 64,
    "total_batch_size": ROWS,
    "max_training_steps": 4,
    "num_train_epochs": 1,
    "scheduler": "linear",
    "learning_rate_end": 1e-6,
    "warmup_steps": 1,
    "use_wandb": False,
    "resume_if_possible": False,
    "do_last_save": False,
    "save_directory": "checkpoints",
}
# Its other packer, `bfd`, makes rows of one token more than `max_length` of texts, which are padded
# to it, with a mask of one less: its own step does not take them.
PACKED = {**TRAINER, "packing": True, "packing_strategy": "wrapped"}
PLANS = (
    "fsdp:8 gradient_checkpointing=none gradient_accumulation_steps=1",
    "fsdp:4,tp:2 gradient_checkpointing=nothing_saveable gradient_accumulation_steps=1",
    "dp:2,fsdp:4 gradient_checkpointing=checkpoint_dots gradient_accumulation_steps=2",
    "fsdp:2,tp:2,sp:2 gradient_checkpointing=nothing_saveable gradient_accumulation_steps=2",
)
SPACE = """
batch_axes = ["dp", "fsdp"]
[axes]
dp = {}
fsdp = {}
tp = { max = 2 }
[constraints]
"dp*fsdp" = { divides = "batch" }
tp = { divides = "num_key_value_heads" }
[knobs]
gradient_checkpointing = ["none"]
"""
run = partial(run_module, variables={"EASYDEL_AUTO": "0", "HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("easydel")
    run("plugins.frameworks.tests.support.easydel_model", str(made), cwd=made)
    return made


def settings(folder: Path, name: str, trainer: dict[str, Any], plan: str = "") -> Path:
    """A file of settings as its training command takes it, with the mesh and knobs of a plan."""
    parts: dict[str, Any] = {
        "model": {"name_or_path": "model", "tokenizer": "model", "task": "causal-language-model"},
        "loader": {"dtype": "fp32", "param_dtype": "fp32", "from_torch": False},
        "sharding": {"axis_dims": [1, -1, 1, 1, 1]},
        "mixture": {
            "informs": [{"type": "json", "data_files": "train.jsonl", "content_field": "text"}]
        },
        "trainer": trainer,
    }
    if plan:
        mesh, remat, accumulation = plan.split()
        sizes = dict(part.split(":") for part in mesh.split(","))
        steps = int(accumulation.partition("=")[2])
        policy = remat.partition("=")[2].replace("none", "")
        parts["sharding"] = {"axis_dims": [int(sizes.get(one, 1)) for one in NAMES]}
        parts["base_config"] = {"values": {"gradient_checkpointing": policy}}
        parts["trainer"] = {
            **trainer,
            "total_batch_size": ROWS // steps,
            "gradient_accumulation_steps": steps,
        }
    path = folder / name
    path.write_text(yaml.safe_dump({"config": parts, "actions": ["validate", "train"]}))
    return path


def trained(path: Path) -> dict[str, Any]:
    """What EasyDeL's training command makes of a file of settings."""
    words = ["plugins.frameworks.tests.support.easydel_training", "--config", str(path)]
    return json.loads(run(*words, cwd=path.parent).splitlines()[-1])


def searched(path: Path, *plans: str) -> list[str]:
    """What a search compiles, for all plans in one process."""
    return run(
        "plugins.frameworks.tests.support.easydel_step", str(path), *plans, cwd=path.parent
    ).split()[-len(plans) :]


def test_a_training_runs_the_steps_that_are_searched(folder: Path) -> None:
    ours = searched(settings(folder, "asked.yaml", TRAINER), *PLANS, PLANS[0])
    assert ours[0] == ours[-1]
    assert len(set(ours)) == len(PLANS)
    for plan, found in zip(PLANS, ours[:-1], strict=True):
        theirs = trained(settings(folder, "theirs.yaml", TRAINER, plan))
        mesh = dict(part.split(":") for part in plan.split()[0].split(","))
        assert theirs["mesh"] == {name: int(size) for name, size in mesh.items()}
        assert theirs["fingerprint"] == found, plan


def test_packed_batches_are_those_of_the_training(folder: Path) -> None:
    [ours] = searched(settings(folder, "packed.yaml", PACKED), PLANS[2])
    assert trained(settings(folder, "theirs.yaml", PACKED, PLANS[2]))["fingerprint"] == ours


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(folder: Path) -> None:
    (folder / "space.toml").write_text(SPACE)
    path = settings(folder, "asked.yaml", TRAINER)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "15m", "--top", "2"]
    words += ["--rules", "rules.toml", "--", "--config", str(path)]
    run("automesh", "search", "easydel", *words, cwd=folder)
    [rule] = tomllib.loads((folder / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    mesh = ",".join(f"{name}:{size}" for name, size in rule["ici"].items())
    knobs = {"gradient_checkpointing": "none", "gradient_accumulation_steps": 1, **rule["knobs"]}
    plan = " ".join([mesh, *(f"{name}={value}" for name, value in knobs.items())])
    theirs = trained(settings(folder, "theirs.yaml", TRAINER, plan))
    assert theirs["fingerprint"] == rule["evidence"]["program"]["fingerprint"]
