"""Levanter as the package index has it, unmodified, through the whole of a search (long).

    pip install marin-levanter==0.2.227.dev40316220070
    pip uninstall haliax && pip install --force-reinstall --no-deps marin-haliax
    pytest -m long plugins/frameworks/tests/steps/test_real_levanter.py

The second line only where the package `haliax`, of automesh's own tests, was there before: it and
`marin-haliax` are the same module.
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
        importlib.util.find_spec("levanter") is None,
        reason="needs Levanter, installed as the head of this file says",
    ),
]

BATCH = 16
MODEL: dict[str, Any] = {
    "type": "llama",
    "max_seq_len": 128,
    "hidden_dim": 256,
    "intermediate_dim": 512,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
}
PLANS = (
    "data:8 gradient_checkpointing=true microbatches=1",
    "data:4,model:2 gradient_checkpointing=false microbatches=1",
    "data:4,replica:2 gradient_checkpointing=true microbatches=2",
    "data:2,replica:2,model:2 gradient_checkpointing=nested microbatches=4",
)
SPACE = """
batch_axes = ["data"]
[axes]
data = {}
model = { max = 2 }
[constraints]
"data*microbatches" = { divides = "batch" }
[knobs]
gradient_checkpointing = ["true"]
microbatches = [1, 2]
"""
# Workers take most of a minute to import Levanter where others use the machine, too.
BUDGET, LIMIT_S = "14m", 1800.0
run = partial(run_module, variables={"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"})


def tokenizer(folder: Path) -> Path:
    """A tokenizer of words in a folder, with a token that ends a document, and the configuration of
    a model beside it: Levanter's training asks the hub for these."""
    words = {"<end>": 0} | {str(number): number + 1 for number in range(500)}
    end = {"id": 0, "content": "<end>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<end>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<end>",
        },
        "config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    }
    folder.mkdir()
    for name, tree in files.items():
        (folder / name).write_text(json.dumps(tree))
    return folder


def configuration(folder: Path, *, of_words: bool = False) -> dict[str, Any]:
    """What a training of a small model is told, with a file of rows to read.

    Args:
      of_words: they are texts, and not tokens already.
    """
    words = str(tokenizer(folder / "words"))
    source = folder / "rows.jsonl"
    numbers = [[(7 * k + row) % 500 for k in range(MODEL["max_seq_len"])] for row in range(64)]
    rows = [{"input_ids": one, "text": " ".join(map(str, one))} for one in numbers]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    component = {
        "source": {"type": "url", "train_urls": [str(source)]},
        "format": {"type": "text" if of_words else "prebuilt"},
    }
    known = {"tokenizer": words} if of_words else {"tokenizer": "passthrough", "vocab_size": 512}
    return {
        "data": {
            **known,
            "cache_dir": str(folder / "cache"),
            "shuffle": False,
            "components": {"rows": component},
        },
        "model": {**MODEL, "reference_checkpoint": words, "tokenizer": words},
        "trainer": {
            "train_batch_size": BATCH,
            "mp": "p=f32,c=bfloat16",
            "num_train_steps": 2,
            "tracker": {"type": "noop"},
            "require_accelerator": False,
            "log_dir": str(folder / "logs"),
            "checkpointer": {"base_path": str(folder / "checkpoints")},
        },
    }


def written(folder: Path, config: dict[str, Any], name: str) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return str(path)


def trained(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What Levanter's training makes of a configuration."""
    path = written(folder, config, "training.yaml")
    told = run(
        "plugins.frameworks.tests.support.levanter_training", "--config_path", path, cwd=folder
    )
    return json.loads(told.splitlines()[-1])


def merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {key: config[key] for key in more if isinstance(config.get(key), dict)}
    return {**config, **more, **{key: merged(one, more[key]) for key, one in both.items()}}


def of_plan(plan: str) -> dict[str, Any]:
    """A plan as a user writes it for Levanter by hand."""
    mesh, remat, microbatches = plan.split()
    sizes = {name: int(size) for name, size in (part.split(":") for part in mesh.split(","))}
    ways = sizes.get("data", 1) * sizes.get("replica", 1)
    value = yaml.safe_load(remat.partition("=")[2])
    return {
        "model": {"gradient_checkpointing": value},
        "trainer": {
            "mesh": {"axes": {"data": 1, **sizes}},
            "per_device_parallelism": BATCH // ways // int(microbatches.partition("=")[2]),
        },
    }


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_runs_the_step_that_is_searched(plan: str, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    theirs = trained(tmp_path, merged(config, of_plan(plan)))
    assert theirs["mesh"] == {
        name: int(size) for name, size in (part.split(":") for part in plan.split()[0].split(","))
    }
    path = written(tmp_path, config, "search.yaml")
    ours = run(
        "plugins.frameworks.tests.support.levanter_step", plan, "--config_path", path, cwd=tmp_path
    )
    assert theirs["fingerprint"] == ours.split()[-1]


def test_a_training_that_tells_documents_apart_runs_the_step_that_is_searched(
    tmp_path: Path,
) -> None:
    """501 words on two parts of the vocabulary: Levanter rounds them up."""
    config = configuration(tmp_path, of_words=True)
    config["trainer"]["mesh"] = {"param_mapping": {"embed": "data", "vocab": "model"}}
    plan = "data:4,model:2 gradient_checkpointing=true microbatches=2"
    theirs = trained(tmp_path, merged(config, of_plan(plan)))
    path = written(tmp_path, config, "search.yaml")
    words = ("plugins.frameworks.tests.support.levanter_step", plan, "--config_path", path)
    assert theirs["fingerprint"] == run(*words, cwd=tmp_path).split()[-1]
    # A size in words instead of the tokenizer is the same step.
    elsewhere = ("--data.tokenizer", "not/here", "--data.vocab_size", "501")
    assert theirs["fingerprint"] == run(*words, *elsewhere, cwd=tmp_path).split()[-1]
    tokens_alone = ("--data.tokenizer", "passthrough", "--data.vocab_size", "501")
    assert theirs["fingerprint"] != run(*words, *tokens_alone, cwd=tmp_path).split()[-1]


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config["model"] |= {"num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", BUDGET, "--top", "2"]
    path = written(tmp_path, config, "search.yaml")
    words += ["--rules", "rules.toml", "--", "--config_path", path]
    run("automesh", "search", "levanter", *words, cwd=tmp_path, limit_s=LIMIT_S)
    [rule] = tomllib.loads((tmp_path / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    out = tmp_path / "mesh.yaml"
    words = ["rules.toml", "--to", "levanter", "--select", "cpu-8", "--batch", str(BATCH)]
    run("automesh", "export", *words, "--out", str(out), cwd=tmp_path)
    theirs = trained(tmp_path, merged(config, yaml.safe_load(out.read_text())))
    assert theirs["fingerprint"] == rule["evidence"]["program"]["fingerprint"]
