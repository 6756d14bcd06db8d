"""AXLearn as its repository has it, unmodified, through the whole of a search (long).

The package index has an AXLearn of 2024. Get the repository, and what it imports:

    git clone https://github.com/apple/axlearn && git -C axlearn checkout 34aed43
    pip install absl-py attrs chex 'etils[epy]' msgpack nltk optax portpicker pyarrow toml \
        tensorstore flax prefixed grain tokamax tensorflow tensorflow-datasets seqio==0.0.20 \
        einops aqtp cloudpickle tensorboard
    PYTHONPATH=axlearn pytest -m long plugins/frameworks/tests/steps/test_real_axlearn.py
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from functools import partial
from pathlib import Path

import pytest

from plugins.frameworks.tests.support.framework_runs import run_module

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("axlearn") is None,
        reason="needs AXLearn, installed as the head of this file says",
    ),
]

MODULE = "text.gpt.c4_trainer"
FUJI, ENVY = "fuji-test-v1", "envy-test"
ROWS = 32  # Of fuji-test-v1.
# A user's module: AXLearn's own configurations, with rules for meshes that were exported.
THEIRS = """
from pathlib import Path
from axlearn.experiments.text.gpt.c4_trainer import named_trainer_configs as originals

def _with_rules(make):
    def trainer():
        found = {}
        exec(Path("mesh_rules.py").read_text(), found)
        return make().set(
            mesh_rules=found["mesh_rules"], mesh_axis_names=found["mesh_axis_names"]
        )
    return trainer

def _in_float32(make):
    return lambda: make().set(train_dtype=None)

def named_trainer_configs():
    found = {name: _with_rules(make) for name, make in originals().items()}
    return found | {f"{name}-float32": _in_float32(make) for name, make in found.items()}
"""
SPACE = """
batch_axes = ["data", "fsdp"]
[axes]
data = { min = 4 }
fsdp = {}
model = { max = 2 }
[constraints]
"data*fsdp" = { divides = "batch" }
model = { divides = "num_kv_heads" }
[knobs]
remat_policy = ["config"]
"""
run = partial(run_module, sees_cwd=True)


def trained(
    config: str, folder: Path, *words: str, module: str = "their_trainer"
) -> dict[str, object]:
    """What AXLearn's training command makes of the exported rules."""
    (folder / "their_trainer.py").write_text(THEIRS)
    (folder / "out").mkdir()
    argv = (f"--module={module}", f"--config={config}", f"--trainer_dir={folder / 'out'}")
    told = run(
        "plugins.frameworks.tests.support.axlearn_training",
        *argv,
        "--data_dir=FAKE",
        "--jax_backend=cpu",
        *words,
        cwd=folder,
    )
    return json.loads(told.splitlines()[-1])


def exported(rules: Path, *words: str) -> None:
    """Writes a rule as AXLearn's `mesh_rules`."""
    out = rules.with_name("mesh_rules.py")
    run(
        "automesh", "export", str(rules), "--to", "axlearn", *words, "--out", str(out),
        cwd=rules.parent,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (FUJI, "fsdp:8 remat_policy=nothing_saveable grad_acc_steps=1"),
        (FUJI, "data:2,fsdp:2,model:2 remat_policy=None grad_acc_steps=2"),
        (FUJI, "fsdp:4,model:2 remat_policy=dots_saveable grad_acc_steps=4"),
        (FUJI, "data:4,seq:2 remat_policy=config grad_acc_steps=1"),
        (ENVY, "data:2,expert:4 remat_policy=nothing_saveable grad_acc_steps=1"),
    ],
)
def test_a_training_with_exported_rules_runs_the_step_that_is_searched(
    config: str, plan: str, tmp_path: Path
) -> None:
    mesh, remat, accumulation = plan.split()
    sizes = ", ".join(part.replace(":", " = ") for part in mesh.split(","))
    knobs = {"remat": f'"{remat.partition("=")[2]}"'} if "config" not in remat else {}
    if not accumulation.endswith("=1"):
        knobs["microbatches"] = accumulation.partition("=")[2]
    (tmp_path / "rules.toml").write_text(
        'schema = 1\naxes = ["data", "expert", "fsdp", "seq", "model"]\n'
        'batch_axes = ["data", "expert", "fsdp"]\n[[rule]]\nmatch = "cpu-8"\n'
        f"ici = {{ {sizes} }}\n"
        f"knobs = {{ {', '.join(f'{name} = {value}' for name, value in knobs.items())} }}\n"
    )
    exported(tmp_path / "rules.toml")
    theirs = trained(config, tmp_path, "--mesh_selector=cpu-8")
    argv = (f"--module={MODULE}", f"--config={config}")
    ours = run("plugins.frameworks.tests.support.axlearn_step", plan, *argv, cwd=tmp_path)
    assert theirs["mesh"] == {
        name: int(size) for name, size in (part.split(":") for part in mesh.split(","))
    }
    assert theirs["fingerprint"] == ours.split()[-1]


def test_the_baseline_is_what_a_training_without_rules_runs(tmp_path: Path) -> None:
    theirs = trained(FUJI, tmp_path, module=MODULE)
    argv = (f"--module={MODULE}", f"--config={FUJI}")
    plan = "data:8 remat_policy=config grad_acc_steps=1"
    ours = run("plugins.frameworks.tests.support.axlearn_step", plan, *argv, cwd=tmp_path)
    assert theirs["mesh"] == {"data": 8}
    assert theirs["fingerprint"] == ours.split()[-1]
    words = ["--target", "cpu:8", "--dry-run", "--json"]
    told = json.loads(run("automesh", "search", "axlearn", *words, "--", *argv, cwd=tmp_path))
    assert told["baseline"] == plan


def test_a_small_model_is_searched_to_a_measured_rule_with_which_it_trains(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["--target", "cpu:8", "--space", "space.toml", "--budget", "40m", "--top", "2"]
    # It has 8 units: in bfloat16 the norm of its gradient on eight devices is 1 % off that on one,
    # which is more than a rule may have.
    argv = [f"--module={MODULE}", f"--config={FUJI}", "train_dtype=None"]
    run("automesh", "search", "axlearn", *words, "--rules", "rules.toml", "--", *argv, cwd=tmp_path)
    [rule] = tomllib.loads((tmp_path / "rules.toml").read_text())["rule"]
    assert rule["evidence"]["kind"] == "measured"
    exported(tmp_path / "rules.toml")
    theirs = trained(f"{FUJI}-float32", tmp_path, "--mesh_selector=cpu-8")
    assert theirs["fingerprint"] == rule["evidence"]["program"]["fingerprint"]
