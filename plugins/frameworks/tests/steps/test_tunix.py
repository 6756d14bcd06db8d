"""Tunix's adapter, with a stand-in for Tunix; `test_real_tunix.py` has the real one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import pytest
from jax.sharding import Mesh, PartitionSpec

from automesh.errors import UsageError
from automesh.program.script.workload import Workload
from automesh_frameworks.steps import tunix as adapter
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"
SETTINGS = """
model_config:
  model_name: llama3_tiny
  model_id: meta/llama3_tiny
  model_source: huggingface
  lora_config: {}
  mesh:
    shape: "(4,4)"
    axis_names: "('fsdp','tp')"
tokenizer_config: {tokenizer_type: huggingface}
batch_size: 8
max_target_length: 16
optimizer_config: {learning_rate: 0.001}
training_config:
  eval_every_n_steps: 2
  checkpoint_root_directory: /never
  profiler_options: {log_dir: /never}
"""
LORA = ("model_config.lora_config.module_path=up|down", "model_config.lora_config.rank=2")
_ALWAYS = "flax_always_shard_variable"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(SETTINGS)
    settings: Any = flax.config
    before = settings.flax_always_shard_variable
    _forget()
    yield
    _forget()
    settings.update(_ALWAYS, before)


def _forget() -> None:
    forget("tunix", adapter._tunix, adapter._asked)  # pyright: ignore[reportPrivateUsage]


def built(monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str, **knobs: int) -> Workload:
    monkeypatch.setattr(sys, "argv", ["tunix", "config.yaml", *argv])
    return adapter.build(on, **knobs)


def text_of(workload: Workload) -> str:
    context: Any = workload.context
    step: Any = workload.step
    with context():
        return step.trace(*workload.args).jaxpr.pretty_print()


def specs_of(tree: Any) -> dict[str, PartitionSpec]:
    return {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_the_mesh_has_tunixs_axes_in_its_order_and_the_models_own_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = mesh(tp=2, fsdp=4)
    model, optimizer, batch = built(monkeypatch, given).args
    whole = batch.input_tokens.sharding.mesh
    assert whole.axis_names == ("fsdp", "tp")
    assert whole.devices[3, 1] == given.devices[1, 3]
    assert batch.input_tokens.shape == batch.input_mask.shape == (8, 16)
    assert batch.input_tokens.sharding.spec == PartitionSpec("fsdp")
    specs = specs_of(model)
    assert specs["['up'].value"] == PartitionSpec("fsdp", "tp")
    assert specs["['down'].value"] == PartitionSpec("tp", "fsdp")
    moments = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.shape == (16, 32)]
    assert {leaf.sharding.spec for leaf in moments} == {PartitionSpec("fsdp", "tp")}
    assert all(leaf.dtype == jax.numpy.bfloat16 for leaf in jax.tree.leaves(model))


def test_a_mesh_of_one_axis_gets_the_other_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = built(monkeypatch, mesh(fsdp=8)).args[-1]
    assert dict(batch.input_tokens.sharding.mesh.shape) == {"fsdp": 8, "tp": 1}


@pytest.mark.parametrize("argv", [(), LORA])
def test_the_state_has_the_types_that_it_has_from_the_second_step_on(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    """First moments begin in the type of the weights, and an update whose rates are arrays makes
    them float32: the first step of a training is another program than all others."""
    workload = built(monkeypatch, mesh(fsdp=4, tp=2), *argv)
    step: Any = workload.step
    model, optimizer, told = step.eval_shape(*workload.args)

    def types(*trees: Any) -> list[Any]:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trees)]

    assert types(model, optimizer) == types(*workload.args[:2])
    assert told[0].shape == ()
    shape = (2, 32) if argv else (16, 32)
    moments = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.shape == shape]
    assert {str(leaf.dtype) for leaf in moments} == {"float32", "bfloat16"}


def test_only_the_optimizer_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built(monkeypatch, mesh(fsdp=4))
    step: Any = workload.step
    info = step.lower(*workload.args).args_info[0]
    given = [{leaf.donated for leaf in jax.tree.leaves(part)} for part in info]
    assert given == [{False}, {True}, {False}]


def test_lora_trains_its_matrices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = built(monkeypatch, mesh(fsdp=4, tp=2))
    model, optimizer, _ = built(monkeypatch, mesh(fsdp=4, tp=2), *LORA).args
    specs = specs_of(model)
    assert specs["['up_lora_a'].value"] == PartitionSpec("fsdp", None)
    assert specs["['up_lora_b'].value"] == PartitionSpec(None, "tp")
    weights = {leaf.shape for leaf in jax.tree.leaves(whole.args[1]) if leaf.ndim == 2}
    assert {leaf.shape for leaf in jax.tree.leaves(optimizer) if leaf.ndim == 2}.isdisjoint(weights)
    assert built(monkeypatch, mesh(fsdp=2), *LORA).facts["lora_rank"] == 2
    assert "lora_rank" not in whole.facts


def test_remat_is_a_knob_and_by_default_that_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = mesh(fsdp=4)
    texts = [text_of(built(monkeypatch, on, remat_config=value)) for value in (0, 1, 3)]
    assert texts[0] == texts[1] != texts[2]
    assert text_of(built(monkeypatch, on, "model_config.remat_config=3")) == texts[2]
    assert (
        text_of(built(monkeypatch, on, "model_config.remat_config=3", remat_config=1)) == texts[1]
    )


def test_a_model_that_tunix_converts_gets_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunix 0.1.7 hands none to Gemma 1 and 2, whatever the arguments say."""
    argv = ("model_config.model_id=gemma_2b", "model_config.model_source=kaggle")
    texts = [text_of(built(monkeypatch, mesh(fsdp=2), *argv, remat_config=one)) for one in (1, 3)]
    assert texts[0] == texts[1]


def test_a_step_is_one_call_and_its_rows_are_those_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = "training_config.gradient_accumulation_steps=2"
    keys = ("training_config.eval_every_n_steps=1", steps)
    for on in (mesh(fsdp=8), mesh(tp=2)):
        workload = built(monkeypatch, on, *keys)
        assert (workload.facts["batch"], workload.tokens_per_step) == (8, 8 * 16)
    assert "mini_step" in text_names(workload)
    assert "mini_step" not in text_names(built(monkeypatch, mesh(tp=2)))


def text_names(workload: Workload) -> str:
    return " ".join(specs_of(workload.args[1]))


def test_facts_are_the_models_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(monkeypatch, mesh(fsdp=2), "batch_size=4").facts == {
        "batch": 4,
        "max_target_length": 16,
        "embed_dim": 16,
        "hidden_dim": 32,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 64,
        "num_experts": 1,
    }


@pytest.mark.parametrize(
    ("argv", "axes", "baseline"),
    [
        ((), ("fsdp", "tp"), "fsdp:4,tp:4 remat_config=1"),
        (("model_config.mesh.shape=(16,1)",), ("fsdp",), "fsdp:16 remat_config=1"),
        (("model_config.remat_config=3",), ("tp", "fsdp"), "fsdp:4,tp:4 remat_config=3"),
        ((), ("fsdp",), None),
        (("model_config.mesh.shape=(2,2)",), ("fsdp", "tp"), None),  # Of 4 devices of 16.
    ],
)
def test_the_baseline_is_the_mesh_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    axes: tuple[str, ...],
    baseline: str | None,
) -> None:
    on = mesh(**dict.fromkeys(axes, 2))
    assert built(monkeypatch, on, *argv).baseline == baseline


def test_a_mesh_that_does_not_divide_the_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"Tunix splits \['heads'\]") as caught:
        built(monkeypatch, mesh(tp=4))
    assert "search space" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (("--steps",), "`--steps` is not an argument of Tunix", "key=value"),
        (("batchsize=3",), "Key batchsize was passed", "`batch_size`"),
        (("batch_size=0",), "`batch_size` is 0, and must be a number of 1 or more", "batch_size="),
        (("model_config.model_id=bert",), "Could not determine model family", "peft_main"),
        (("model_config.model_id=llama3_huge",), "'llama3_huge' not found", "peft_main"),
        (("model_config.model_source=maxtext",), "not Tunix's own", "automesh search maxtext"),
        (("model_config.model_source=internal",), "not Tunix's own", "huggingface"),
        ((*LORA, "model_config.lora_config.weight_qtype=nf4"), "quantized", "leave"),
        (("training_config.max_steps=3",), "eval_every_n_steps", "peft_main"),
        (
            ("model_config.mesh.axis_names=('dp','tp')",),
            "Tunix's mesh has no axis `fsdp`; its axes are dp, tp",
            "",
        ),
        (
            ("model_config.mesh.axis_names=('fsdp',)", "model_config.mesh.shape=(16,)"),
            "Tunix's model is split over `tp`, which is no axis of the mesh; its axes are fsdp",
            "axis_names",
        ),
        (
            ("training_config.eval_every_n_steps=1", "training_config.data_sharding_axis=[dp]"),
            "names `dp`, which is no axis of the mesh",
            "axis_names",
        ),
    ],
)
def test_arguments_that_are_refused_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        built(monkeypatch, mesh(fsdp=2), *argv)
    assert said in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        ([], "do not begin with Tunix's file of settings", "config.yaml"),
        (["batch_size=3"], "do not begin with Tunix's file of settings", "config.yaml"),
        (["none.yaml"], "Config none.yaml not found", "a file that is there"),
        (["base_config.yaml"], "base_config.yaml", "the package has no base_config.yaml"),
    ],
)
def test_the_file_of_settings_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str, hint: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["tunix", *argv])
    with pytest.raises(UsageError) as caught:
        adapter.build(mesh(fsdp=2))
    assert said in caught.value.message
    assert hint in str(caught.value.hint)


def test_a_version_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("tunix.sft.sharding_utils")
    monkeypatch.delattr(module, "get_sharding")
    with pytest.raises(UsageError, match="has no `get_sharding`") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert "0.1.7" in str(caught.value.hint)


def test_without_tunix_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="tunix")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="Tunix is not installed") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert caught.value.hint == "`pip install google-tunix`"


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automesh", "search", "tunix", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--"]
    command += [str(tmp_path / "config.yaml"), "model_config.mesh.shape=(2,2)"]
    variables = {**os.environ, "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run(
        command, cwd=STAND_INS, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == "fsdp:2,tp:2 remat_config=1"
    assert {row["plan"].split()[0] for row in told["candidates"]} >= {"fsdp:4", "fsdp:2,tp:2"}
