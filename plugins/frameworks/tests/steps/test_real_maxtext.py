"""MaxText as the package index has it, unmodified, through the whole of a search (long).

    pip install --no-deps maxtext==0.2.5
    pip install pathwaysutils jinja2 qwix aqtp tokamax huggingface_hub transformers grain drjax \
        pillow tiktoken sentencepiece sympy omegaconf orbax-checkpoint flax optax absl-py \
        ml_collections datasets tensorflow-datasets array_record
    pytest -m long plugins/frameworks/tests/steps/test_real_maxtext.py
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
        importlib.util.find_spec("maxtext") is None,
        reason="needs MaxText, installed as the head of this file says",
    ),
]

SMALL = (
    "base_emb_dim=256",
    "base_mlp_dim=512",
    "base_num_decoder_layers=2",
    "base_num_query_heads=8",
    "base_num_kv_heads=8",
    "head_dim=32",
    "vocab_size=512",
    "max_target_length=128",
    "per_device_batch_size=2",
)
LLAMA = "model_name=llama3.1-8b max_target_length=4096 per_device_batch_size=2 attention=flash"
# What a training has to be told besides the mesh, where nothing is saved and no data is read.
TRAINING = (
    "run_name=x",
    "enable_checkpointing=false",
    "dataset_type=synthetic",
    "hardware=cpu",
    "skip_jax_distributed_system=true",
)
PLANS = (
    "fsdp:8 remat_policy=full gradient_accumulation_steps=1",
    "fsdp:4,tensor:2 remat_policy=minimal gradient_accumulation_steps=1",
    "data:2,fsdp:4 remat_policy=full gradient_accumulation_steps=2",
    "data:4,context:2 remat_policy=save_qkv_proj gradient_accumulation_steps=1",
)
SPACE = """
batch_axes = ["data", "fsdp"]
[axes]
data = {}
fsdp = {}
tensor = { max = 2 }
[constraints]
"data*fsdp" = { divides = "batch" }
tensor = { divides = "num_kv_heads" }
[knobs]
remat_policy = ["full"]
"""
BATCH = 2 * 8


def trained(settings: Path, folder: Path) -> dict[str, object]:
    """What MaxText's training makes of exported keys."""
    settings.write_text(settings.read_text() + "base_config: base.yml\n")
    more = [*SMALL[:-1], *TRAINING, f"base_output_directory={folder}"]
    told = run(
        "plugins.frameworks.tests.support.maxtext_training", str(settings), *more, cwd=folder
    )
    return json.loads(told.splitlines()[-1])


def exported(rules: Path, folder: Path) -> Path:
    out = folder / "mesh.yml"
    words = ["--to", "maxtext", "--select", "cpu-8", "--batch", str(BATCH), "--out", str(out)]
    run("automesh", "export", str(rules), *words, cwd=folder)
    return out


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_with_exported_keys_runs_the_step_that_is_searched(
    plan: str, tmp_path: Path
) -> None:
    mesh, remat, accumulation = plan.split()
    sizes = ", ".join(part.replace(":", " = ") for part in mesh.split(","))
    (tmp_path / "rules.toml").write_text(
        'schema = 1\naxes = ["data", "fsdp", "expert", "context", "tensor"]\n'
        'batch_axes = ["data", "fsdp", "expert"]\n[[rule]]\nmatch = "cpu-8"\n'
        f"ici = {{ {sizes} }}\n"
        f'knobs = {{ remat_policy = "{remat.partition("=")[2]}", '
        f"gradient_accumulation_steps = {accumulation.partition('=')[2]} }}\n"
    )
    theirs = trained(exported(tmp_path / "rules.toml", tmp_path), tmp_path)
    ours = run("plugins.frameworks.tests.support.maxtext_step", plan, *SMALL, cwd=tmp_path)
    assert theirs["mesh"] == {
        name: int(size) for name, size in (part.split(":") for part in mesh.split(","))
    }
    assert theirs["fingerprint"] == ours.split()[-1]


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "8m", "--top", "3"]
    run(
        "automesh", "search", "maxtext", *words, "--rules", "rules.toml", "--", *SMALL, cwd=tmp_path
    )
    [rule] = tomllib.loads((tmp_path / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    theirs = trained(exported(tmp_path / "rules.toml", tmp_path), tmp_path)
    assert theirs["fingerprint"] == rule["evidence"]["program"]["fingerprint"]


@pytest.mark.tpu
def test_a_large_model_with_its_kernels_is_compiled_for_a_slice_that_is_not_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["--target", "tpu-v5p-64", "--space", "space.toml", "--budget", "13m", "--top", "2"]
    words += ["--rules", "rules.toml", "--", *LLAMA.split()]
    run("automesh", "search", "maxtext", *words, cwd=tmp_path)
    assert 'kind = "compiled"' in (tmp_path / "rules.toml").read_text()
