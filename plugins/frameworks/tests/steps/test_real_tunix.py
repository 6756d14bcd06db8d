"""Tunix as the package index has it, unmodified, through the whole of a search (long).

pip install google-tunix==0.1.7
pytest -m long plugins/frameworks/tests/steps/test_real_tunix.py
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

from plugins.frameworks.tests.support.framework_runs import run_module as run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("tunix") is None,
        reason="needs Tunix, installed as the head of this file says",
    ),
]

# As much of Tunix's own `base_config.yaml`, which its package lacks, as its command reads.
SETTINGS = """
model_config:
  model_name: "llama3p2_1b"
  model_id: "llama3p2_1b"
  model_source: "huggingface"
  model_download_path: "models"
  intermediate_ckpt_dir: "converted"
  rng_seed: 0
  model_display: false
  lora_config: {}
  mesh:
    shape: "(8,1)"
    axis_names: "('fsdp','tp')"
tokenizer_config:
  tokenizer_path: "none"
  tokenizer_type: "sentencepiece"
  add_bos: true
  add_eos: true
dataset_name: "none"
batch_size: 8
max_target_length: 32
num_train_epochs: 1
tfds_download: false
optimizer_config:
  opt_type: "adamw"
  learning_rate: 1.0e-5
  schedule_type: "warmup_cosine_decay_schedule"
  init_value: 0.0
  peak_value: 3.0e-5
  end_value: 0.0
  warmup_steps: 5
  decay_steps: 10
  b1: 0.9
  b2: 0.99
  weight_decay: 0.1
training_config:
  eval_every_n_steps: 100
  max_steps: 100
  data_sharding_axis: ["fsdp"]
"""
LORA = (
    "model_config.lora_config.module_path=.*q_proj|.*gate_proj|.*down_proj|.*up_proj",
    "model_config.lora_config.rank=4",
    "model_config.lora_config.alpha=2.0",
)
# A section that is named at all loses the rest of its keys.
ACCUMULATED = (
    "training_config.eval_every_n_steps=100",
    "training_config.gradient_accumulation_steps=2",
)
# Mesh, remat_config, and arguments beside.
PLANS = (
    ("fsdp:8", 3, ()),
    ("fsdp:4,tp:2", 1, ()),
    ("fsdp:2,tp:4", 2, ACCUMULATED),
    ("fsdp:4,tp:2", 3, LORA),
)
# The adapter with a small model under a name that Tunix knows: the smallest of its own has 268 M
# weights.
SMALL = """
from plugins.frameworks.tests.support.tunix_small import use_small_model

use_small_model()
from automesh_frameworks.steps.tunix import build
"""
SPACE = """
batch_axes = ["fsdp"]
[axes]
fsdp = {}
tp = { max = 2 }
[constraints]
fsdp = { divides = "batch" }
[knobs]
remat_config = [1]
"""


@pytest.mark.parametrize(("mesh", "remat", "more"), PLANS)
def test_a_training_runs_the_step_that_is_searched(
    mesh: str, remat: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    """From its second step on: in the first one the moments may have another type, and weights may
    come back split otherwise."""
    (tmp_path / "config.yaml").write_text(SETTINGS)
    sizes = {name: int(size) for name, size in (part.split(":") for part in mesh.split(","))}
    settings = (
        f"model_config.mesh.shape=({sizes['fsdp']},{sizes.get('tp', 1)})",
        f"model_config.remat_config={remat}",
    )
    told = run(
        "plugins.frameworks.tests.support.tunix_training",
        "config.yaml",
        *settings,
        *more,
        cwd=tmp_path,
    )
    theirs = json.loads(told.splitlines()[-1])
    plan = f"{mesh} remat_config={remat}"
    # The arguments say another mesh and no remat: those of the plan count.
    told = run(
        "plugins.frameworks.tests.support.tunix_step", plan, "config.yaml", *more, cwd=tmp_path
    )
    ours = json.loads(told.splitlines()[-1])
    assert theirs["mesh"] == sizes
    assert set(theirs["fingerprints"][1:]) == {ours["compiled"]}


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SETTINGS)
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "10m", "--top", "2"]
    words += ["--rules", "rules.toml", "--", "config.yaml"]
    run("automesh", "search", "small.py", *words, cwd=tmp_path)
    [rule] = tomllib.loads((tmp_path / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    sizes = {name: int(size) for name, size in rule["ici"].items()}
    mesh = f"model_config.mesh.shape=({sizes.get('fsdp', 1)},{sizes.get('tp', 1)})"
    told = run("plugins.frameworks.tests.support.tunix_training", "config.yaml", mesh, cwd=tmp_path)
    theirs = json.loads(told.splitlines()[-1])
    plan = ",".join(f"{name}:{size}" for name, size in sizes.items())
    told = run(
        "plugins.frameworks.tests.support.tunix_step",
        f"{plan} remat_config=1",
        "config.yaml",
        cwd=tmp_path,
    )
    ours = json.loads(told.splitlines()[-1])
    # A rule names the program as the plan states it; what is measured is the one that it leads to.
    assert rule["evidence"]["program"]["fingerprint"] == ours["first"]
    assert set(theirs["fingerprints"][1:]) == {ours["compiled"]}
