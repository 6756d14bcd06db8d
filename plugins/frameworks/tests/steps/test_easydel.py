"""EasyDeL's adapter, with a stand-in for EasyDeL; `test_real_easydel.py` has the real one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from jax.sharding import AxisType, Mesh, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.axes import parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on
from automesh.program.script.workload import Workload
from automesh_frameworks.steps import easydel as adapter
from automesh_frameworks.steps.registry import FRAMEWORKS
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"
NAMES = ("dp", "fsdp", "ep", "tp", "sp")
SMALL = {
    "model_type": "small",
    "architectures": ["SmallForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LINEAR = {"scheduler": "linear", "learning_rate_end": 0.0}
TRAINER = {"total_batch_size": 8, "gradient_accumulation_steps": 2, "max_length": 4}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget("easydel", adapter._easydel, adapter._read)  # pyright: ignore[reportPrivateUsage]


def written(folder: Path, config: dict[str, Any] | None = None, **parts: Any) -> Path:
    """A file of settings with a model beside it."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**SMALL, **(config or {})}))
    model = {"name_or_path": str(folder / "model")}
    settings = {"model": model, "trainer": TRAINER, **parts}
    (folder / "train.yaml").write_text(yaml.safe_dump({"config": settings, "actions": ["train"]}))
    return folder / "train.yaml"


def built(
    monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str | Path, **knobs: str | int
) -> Workload:
    monkeypatch.setattr(sys, "argv", ["easydel", *map(str, argv)])
    return adapter.build(on, **knobs)  # pyright: ignore[reportArgumentType]


def imported() -> None:
    """The stand-in is there to be changed, and will be looked up again."""
    adapter._easydel()  # pyright: ignore[reportPrivateUsage]
    adapter._easydel.cache_clear()  # pyright: ignore[reportPrivateUsage]


def fingerprint(monkeypatch: pytest.MonkeyPatch, path: Path, plan: str, **knobs: str | int) -> str:
    monkeypatch.setattr(sys, "argv", ["easydel", str(path)])
    made = build_on(adapter.build, parse_mesh(plan, NAMES), knobs=tuple(knobs.items()))
    return lower(made).fingerprint(())


def test_the_mesh_has_the_axes_of_the_file_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = mesh(tp=2, fsdp=4)
    workload = built(monkeypatch, given, "--config", written(tmp_path))
    state = workload.args[0]
    config = state.model.config
    assert config.sharding_axis_dims == (1, 4, 1, 2, 1)
    assert config.sharding_axis_names == NAMES
    assert config.sharding_dcn_axis_dims is None
    whole = config.mesh
    assert (whole.axis_names, whole.devices.shape) == (NAMES, (1, 4, 1, 2, 1))
    assert whole.devices[0, 3, 0, 1, 0] == given.devices[1, 3]
    for other, kind in ((config.explicit_mesh, "Explicit"), (config.manual_mesh, "Manual")):
        assert (other.devices == whole.devices).all()
        assert other.axis_types == (getattr(AxisType, kind),) * 5


def test_names_of_axes_are_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sharding = {"axis_names": ["fsdp", "dp", "tp", "sp"], "axis_dims": [1, -1, 1, 1]}
    path = written(tmp_path, sharding=sharding)
    workload = built(monkeypatch, mesh(dp=2, tp=2), path)
    assert workload.args[0].model.config.mesh.axis_names == ("fsdp", "dp", "tp", "sp")
    with pytest.raises(UsageError, match="EasyDeL's mesh has no axis `ep`; its axes are fsdp, dp"):
        built(monkeypatch, mesh(ep=2), path)


def test_the_state_is_abstract_and_placed_by_the_rules_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = {"dtype": "fp32", "param_dtype": "bf16"}
    path = written(tmp_path, loader=loader)
    workload = built(monkeypatch, mesh(fsdp=4, tp=2), path)
    state, batch = workload.args[:2]
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for _, leaf in leaves)
    specs = {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in leaves}
    up = [spec for name, spec in specs.items() if "up" in name]
    # Of two layers, with the two moments of each.
    assert up == [PartitionSpec("fsdp", "tp")] * 6
    # The scale is no bfloat16 in the model's own code: a loader makes it one.
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.graphstate)} == {"bfloat16"}
    assert {key: (leaf.shape, leaf.sharding.spec) for key, leaf in batch.items()} == {
        "input_ids": ((16, 4), PartitionSpec()),
        "attention_mask": ((16, 4), PartitionSpec()),
    }


@pytest.mark.parametrize(("accumulation", "microbatch"), [(0, 8), (1, 16), (4, 4)])
def test_an_update_has_the_same_rows_at_every_accumulation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulation: int, microbatch: int
) -> None:
    asked: list[Any] = []
    original = adapter._batch_keys  # pyright: ignore[reportPrivateUsage]

    def watched(kind: str, arguments: Any) -> tuple[str, ...]:
        asked.append(arguments)
        return original(kind, arguments)

    monkeypatch.setattr(adapter, "_batch_keys", watched)
    path = written(tmp_path)
    workload = built(monkeypatch, mesh(fsdp=8), path, gradient_accumulation_steps=accumulation)
    assert asked[-1].total_batch_size == microbatch
    assert workload.args[-1] == asked[-1].gradient_accumulation_steps == 16 // microbatch
    assert workload.args[1]["input_ids"].shape == (16, 4)
    assert (workload.facts["batch"], workload.tokens_per_step) == (16, 64)
    with pytest.raises(UsageError, match="16 rows of an update do not divide into 3 microbatches"):
        built(monkeypatch, mesh(fsdp=8), path, gradient_accumulation_steps=3)


def test_what_a_search_may_divide_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {"num_local_experts": 8}
    workload = built(monkeypatch, mesh(fsdp=2), written(tmp_path, config=config))
    wanted = {name: value for name, value in SMALL.items() if isinstance(value, int)}
    assert workload.facts == {**wanted, "batch": 16, "max_length": 4, "num_experts": 8}
    assert built(monkeypatch, mesh(fsdp=2), written(tmp_path)).facts["num_experts"] == 1


def test_every_plan_has_its_own_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """EasyDeL changes a layer's class: every plan after the first had the policy of the first."""
    path = written(tmp_path)
    policies = ("checkpoint_dots", "nothing_saveable", "none", "checkpoint_dots", "none")
    found = [
        fingerprint(monkeypatch, path, "fsdp:4,tp:2", gradient_checkpointing=policy)
        for policy in policies
    ]
    assert len(set(found[:3])) == 3
    assert found[3:] == [found[0], found[2]]
    small = sys.modules["easydel.modules.small"]
    assert not hasattr(small.Layer.__call__, "is_rematerialized")


def test_plans_that_are_made_before_others_are_traced_keep_their_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path)
    alone = fingerprint(monkeypatch, path, "fsdp:8", gradient_checkpointing="nothing_saveable")
    made = build_on(
        adapter.build,
        parse_mesh("fsdp:8", NAMES),
        knobs=(("gradient_checkpointing", "nothing_saveable"),),
    )
    built(monkeypatch, mesh(fsdp=8), path, gradient_checkpointing="none")
    assert lower(made).fingerprint(()) == alone


def test_the_policy_of_the_file_counts_where_a_plan_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_file = written(
        tmp_path, base_config={"values": {"gradient_checkpointing": "checkpoint_dots"}}
    )
    found = fingerprint(monkeypatch, of_file, "dp:8")
    path = written(tmp_path)
    assert found != fingerprint(monkeypatch, path, "dp:8")
    knob = {"gradient_checkpointing": "checkpoint_dots"}
    assert found == fingerprint(monkeypatch, path, "dp:8", **knob)


def test_nothing_of_the_process_stays_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    path = written(tmp_path, trainer={**TRAINER, "save_directory": "checkpoints"})
    fingerprint(monkeypatch, path, "fsdp:8")
    assert dict(os.environ) == before
    assert jax.config.jax_compilation_cache_dir == directory  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "train.yaml"]


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"packing": True}, {"input_ids", "attention_mask", "segment_ids"}),
        ({"packing": True, "packing_strategy": "wrapped"}, {"input_ids", "segment_ids"}),
        (
            {"assistant_only_loss": True},
            {"input_ids", "attention_mask", "completion_mask", "labels"},
        ),
        ({"trainer_type": "base"}, {"input_ids", "attention_mask"}),
    ],
)
def test_a_batch_is_what_the_trainer_makes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, Any], keys: set[str]
) -> None:
    path = written(tmp_path, trainer={**TRAINER, **more})
    assert set(built(monkeypatch, mesh(dp=2), path).args[1]) == keys


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, 10_000),
        ({"max_training_steps": 50}, 50),
        ({"per_epoch_training_steps": 7, "num_train_epochs": 3}, 21),
    ],
)
def test_a_schedule_is_made_for_the_steps_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, int], steps: int
) -> None:
    path = written(tmp_path, trainer={**TRAINER, **LINEAR, **more})
    schedule = built(monkeypatch, mesh(dp=2), path).args[2]
    assert schedule(steps) == 0 < schedule(steps - 1)


def test_the_model_takes_what_the_trainer_says_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path, trainer={**TRAINER, "lmhead_chunksize": 2})
    assert built(monkeypatch, mesh(dp=2), path).args[0].model.config.lmhead_chunksize == 2


@pytest.mark.parametrize(
    ("dims", "policy", "baseline"),
    [
        ((1, -1, 1, 1, 1), "", "fsdp:-1 gradient_checkpointing=none"),
        (
            (1, 4, 1, 2, 1),
            "nothing_saveable",
            "fsdp:4,tp:2 gradient_checkpointing=nothing_saveable",
        ),
        ((1, 1, 1, 1, 1), "", None),
        ((1, 4, 1, 1, 2), "", None),
    ],
)
def test_the_baseline_is_the_mesh_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dims: tuple[int, ...],
    policy: str,
    baseline: str | None,
) -> None:
    values = {"gradient_checkpointing": policy}
    path = written(tmp_path, sharding={"axis_dims": list(dims)}, base_config={"values": values})
    knobs = {"gradient_checkpointing": "checkpoint_dots", "gradient_accumulation_steps": 1}
    workload = built(monkeypatch, mesh(dp=2, fsdp=2, tp=2), path, **knobs)
    assert workload.baseline == (baseline and f"{baseline} gradient_accumulation_steps=2")


def test_between_granules_lies_the_axis_that_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapter, "spans_granules", lambda: True)
    path = written(tmp_path, sharding={"axis_dims": [1, -1, 1, 1, 1]})
    baseline = built(monkeypatch, mesh(fsdp=2, tp=2), path).baseline
    assert str(baseline).split()[0] == "dcn.fsdp:-1,fsdp:-1"
    path = written(tmp_path, sharding={"axis_dims": [1, -1, 1, 2, 1]})
    assert built(monkeypatch, mesh(fsdp=2, tp=2), path).baseline is None


def test_settings_are_read_again_where_the_file_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path)
    assert built(monkeypatch, mesh(dp=2), path).facts["max_length"] == 4
    written(tmp_path, trainer={**TRAINER, "max_length": 8})
    os.utime(path, ns=(1, 1))
    assert built(monkeypatch, mesh(dp=2), path).facts["max_length"] == 8


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"trainer": {"gradient_acumulation_steps": 2}}, "no key `gradient_acumulation_steps` in"),
        ({"sharding": {"axis_dim": [1, 1, 1, 1, 1]}}, "no key `axis_dim` in `sharding`"),
        ({"shardings": {}}, "no key `shardings` in the file"),
        ({"sharding": {"axis_dims": [1, 1]}}, r"refuses .*axis_dims \(2\) must match"),
        ({"trainer": {"gradient_accumulation_steps": -1}}, "can't be lower than 1"),
        ({"trainer": {"scheduler": "linear"}}, "refuses .* scheduler requires learning_rate_end"),
        ({"trainer": {"trainer_type": "dpo"}}, "step of EasyDeL's trainer `dpo` is not searched"),
        ({"model": {"name_or_path": "x", "size": 1}}, "no key `size` in `model`"),
        ({"quantization": {"apply_quantization": True}}, "weights that EasyDeL quantizes"),
        (
            {"base_config": {"values": {"gradient_checkpointing": "nothing_savable"}}},
            "no gradient_checkpointing `nothing_savable`.*`nothing_saveable`",
        ),
        (
            {"base_config": {"values": {"gradient_checkpointing": "save_only_these_names"}}},
            "refuses .* save_names must be provided",
        ),
        ({"model": {}}, "Config must include model.name_or_path"),
    ],
)
def test_settings_that_easydel_refuses_or_would_leave_unread_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(dp=2), written(tmp_path, **parts))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "takes one file of settings, and 0 are named"),
        (("a.yaml", "--config", "b.yaml"), "and 2 are named"),
        (("--config=absent.yaml",), "there is no file `absent.yaml`"),
        (("--total_batch_size", "8"), "`--total_batch_size` is not an argument"),
        (("-c",), "`-c` is not an argument"),
    ],
)
def test_arguments_that_are_no_file_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(dp=2), *argv)
    assert caught.value.hint


def test_a_file_that_is_no_mapping_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path)
    path.write_text("- train\n")
    with pytest.raises(UsageError, match="YAML root must be a mapping/dict, got list"):
        built(monkeypatch, mesh(dp=2), path)


def test_a_model_of_another_kind_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path, config={"architectures": ["SmallForConditionalGeneration"]})
    with pytest.raises(UsageError, match="for image-text-to-text, whose batches are not known"):
        built(monkeypatch, mesh(dp=2), path)
    path = written(tmp_path, config={"model_type": "huge"})
    os.utime(path, ns=(1, 1))
    with pytest.raises(UsageError, match="model type huge is not registered"):
        built(monkeypatch, mesh(dp=2), path)


def test_a_model_of_the_hub_is_read_from_its_cache_and_never_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path, model={"name_or_path": "org/small"})
    found: dict[str, str | None] = {"org/small": None}
    hub = SimpleNamespace(try_to_load_from_cache=lambda name, _: found[name])
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(
        UsageError, match="`org/small` is not here, and a search downloads"
    ) as caught:
        built(monkeypatch, mesh(dp=2), path)
    assert "hf download org/small config.json" in str(caught.value.hint)
    found["org/small"] = str(tmp_path / "model" / "config.json")
    assert built(monkeypatch, mesh(dp=2), path).facts["hidden_size"] == 16


def test_a_version_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path)
    imported()
    module = importlib.import_module("easydel.infra.elarge.builders")
    monkeypatch.delattr(module, "to_from_pretrained_kwargs")
    with pytest.raises(UsageError, match="has no `to_from_pretrained_kwargs` in") as caught:
        built(monkeypatch, mesh(fsdp=2), path)
    assert FRAMEWORKS["easydel"].seen_in in str(caught.value.hint)


def test_a_version_that_cannot_be_imported_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = importlib.import_module

    def other(name: str) -> object:
        if name == "easydel":
            raise AssertionError("only compatible with eformer 0.0.99.12, but found eformer 0.1")
        return original(name)

    monkeypatch.setattr(importlib, "import_module", other)
    with pytest.raises(UsageError, match=r"can be imported \(only compatible with eformer 0\.0"):
        built(monkeypatch, mesh(fsdp=2), written(tmp_path))


def test_a_version_that_places_its_state_in_another_way_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported()
    states = importlib.import_module("easydel.infra.base_state")
    monkeypatch.setattr(states.EasyDeLState, "shard_state", lambda self, **_: self)
    with pytest.raises(UsageError, match="places the state of a training in a way that is not"):
        built(monkeypatch, mesh(fsdp=2), written(tmp_path))


def test_programs_that_easydel_keeps_itself_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported()
    trainers = importlib.import_module("easydel.trainers")
    monkeypatch.setattr(trainers, "ejit", lambda function, **_: function)
    with pytest.raises(UsageError, match="keeps compiled programs on disk itself") as caught:
        built(monkeypatch, mesh(fsdp=2), written(tmp_path))
    assert "EASYDEL_CACHE_COMPILES" in str(caught.value.hint)


def test_without_easydel_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="easydel")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="EasyDeL is not installed") as caught:
        built(monkeypatch, mesh(fsdp=2), written(tmp_path))
    assert caught.value.hint == FRAMEWORKS["easydel"].install


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, sharding={"axis_dims": [1, -1, 1, 1, 1]})
    command = [sys.executable, "-m", "automesh", "search", "easydel", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--", "--config", str(path)]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == ("fsdp:4 gradient_checkpointing=none gradient_accumulation_steps=2")
    assert {row["plan"].split()[0] for row in told["candidates"]} >= {"fsdp:4", "fsdp:2,tp:2"}
