"""Levanter's adapter, with a stand-in for Levanter; `test_real_levanter.py` has the real one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.axes import format_mesh, parse_mesh
from automesh.program.lower.lowering import lower
from automesh.program.nouns import Entry
from automesh.program.script.build import build_on
from automesh.program.script.workload import Workload
from automesh.tuner.request import parse_entry
from automesh_frameworks.steps import levanter as adapter
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"
SMALL = ("--data.vocab_size", "64", "--trainer.train_batch_size", "32")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget("levanter", adapter._levanter, adapter._read)  # pyright: ignore[reportPrivateUsage]


def built(monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str, **knobs: str | int) -> Workload:
    monkeypatch.setattr(sys, "argv", ["levanter", *(argv or SMALL)])
    return adapter.build(on, **knobs)  # pyright: ignore[reportArgumentType]


def settings_of(workload: Workload) -> Any:
    """Levanter's settings that the step was made with: its trainer is the step's context."""
    return trainer_of(workload).config


def trainer_of(workload: Workload) -> Any:
    context: Any = workload.context
    return context.args[0]


def described(tree: Any) -> dict[str, Any]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in named}


def leaf_of(workload: Workload, name: str) -> Any:
    (found,) = [one for key, one in described(workload.args[:2]).items() if name in key]
    return found


def test_every_size_is_written_and_none_left_to_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built(monkeypatch, mesh(data=4, model=2))
    sizes = settings_of(workload).mesh
    assert sizes.axes == {"data": 4, "replica": 1, "model": 2}
    assert sizes.dcn_axes == {"replica_dcn": 1}
    assert settings_of(workload).load_checkpoint is False


def test_the_mesh_has_levanters_axes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = mesh(model=2, replica=2, data=2)
    whole = leaf_of(built(monkeypatch, given), ".table").sharding.mesh
    assert whole.axis_names == ("data", "replica", "model", "replica_dcn")
    assert whole.devices.shape == (2, 2, 2, 1)
    assert set(whole.axis_types) == {AxisType.Auto}
    for data, replica, model in np.ndindex(2, 2, 2):
        assert whole.devices[data, replica, model, 0] == given.devices[model, replica, data]


def test_a_mesh_of_explicit_axes_is_made_where_the_arguments_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def types(*argv: str) -> set[AxisType]:
        config = adapter._config((*SMALL, *argv))  # pyright: ignore[reportPrivateUsage]
        trainer = adapter._trainer(config, mesh(data=1), 32, 0)  # pyright: ignore[reportPrivateUsage]
        return set(trainer.device_mesh.axis_types)

    sizes = ("--trainer.mesh.axes", "{data: 1}", "--trainer.mesh.dcn_axes", "{replica_dcn: 1}")
    assert types(*sizes) == {AxisType.Auto}
    assert types(*sizes, "--trainer.use_explicit_mesh_axes", "true") == {AxisType.Explicit}


def test_replicas_between_slices_are_levanters_axis_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`granules_of` tells slices by their index: here the first four devices are one."""
    on = mesh(replica=4, data=2)

    def by_half(devices: list[jax.Device]) -> tuple[tuple[jax.Device, ...], ...]:
        halves = [tuple(one for one in devices if one.id // 4 == k) for k in (0, 1)]
        return tuple(half for half in halves if half)

    monkeypatch.setattr(adapter, "granules_of", by_half)
    workload = built(monkeypatch, on)
    assert settings_of(workload).mesh.dcn_axes == {"replica_dcn": 2}
    assert settings_of(workload).mesh.axes == {"data": 2, "replica": 2, "model": 1}
    whole = leaf_of(workload, ".table").sharding.mesh
    assert whole.devices.shape == (2, 2, 1, 2)
    assert [device.id for device in whole.devices[0, :, 0, 0]] == [0, 2]
    assert [device.id for device in whole.devices[0, 0, 0, :]] == [0, 4]
    named = "--trainer.mesh.dcn_axes", "{data_dcn: 2}"
    workload = built(monkeypatch, mesh(data=8), *SMALL, *named)
    assert settings_of(workload).mesh.dcn_axes == {"replica_dcn": 1, "data_dcn": 2}
    assert settings_of(workload).mesh.axes["data"] == 4


def test_arrays_are_described_as_the_trainer_and_the_data_loader_place_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = built(monkeypatch, mesh(replica=2, data=2, model=2), *SMALL)
    found = described(workload.args[:2])
    assert all(isinstance(one, jax.ShapeDtypeStruct) for one in found.values())
    specs = {
        "table": PartitionSpec(None, "data"),
        "up": PartitionSpec("data", "model"),
        "down": PartitionSpec("model", "data"),
        "tokens": PartitionSpec(("replica_dcn", "replica", "data"), None),
        "segment_ids": PartitionSpec(("replica_dcn", "replica", "data"), None),
    }
    for name, spec in specs.items():
        leaf = leaf_of(workload, f".{name}")
        assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, spec), 2), name
    assert leaf_of(workload, ".tokens").shape == (32, 16)
    assert leaf_of(workload, ".step").shape == ()


def test_documents_are_told_apart_where_levanter_tells_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_documents(*argv: str) -> bool:
        workload = built(monkeypatch, mesh(data=2), *SMALL, *argv)
        return any("segment_ids" in key for key in described(workload.args[:2]))

    passthrough = ("--data.tokenizer", "passthrough")
    assert has_documents()
    assert not has_documents("--data.block_cross_document_attention", "false")
    assert not has_documents(*passthrough)
    assert has_documents(*passthrough, "--data.components", "{mine: {pack: 64}}")


@pytest.mark.parametrize(("microbatches", "rows"), [(0, 4), (1, 8), (2, 4), (4, 2)])
def test_an_update_has_the_same_rows_at_every_number_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, rows: int
) -> None:
    argv = (*SMALL, "--trainer.per_device_parallelism", "4")
    workload = built(monkeypatch, mesh(data=4, model=2), *argv, microbatches=microbatches)
    settings = settings_of(workload)
    assert settings.per_device_parallelism == rows
    assert (settings.train_batch_size, settings.microbatch_size) == (32, rows * 4)
    assert workload.facts["batch"] == 32
    assert workload.tokens_per_step == 32 * 16


def test_rows_of_an_update_that_the_arguments_say_by_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ("--data.vocab_size", "64", "--trainer.train_batch_size", "-1")
    argv += ("--trainer.per_device_parallelism", "2")
    workload = built(monkeypatch, mesh(data=1), *argv)
    assert workload.facts["batch"] == 2 * len(jax.devices())


def test_knobs_are_those_of_levanters_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(value: str) -> str:
        monkeypatch.setattr(sys, "argv", ["levanter", *SMALL])
        knobs = (("gradient_checkpointing", value),)
        axes = parse_mesh("data:2", ("data", "replica", "model"))
        return lower(build_on(adapter.build, axes, knobs=knobs)).fingerprint(())

    texts = {value: text(value) for value in ("true", "false", "")}
    assert texts["true"] == texts[""]
    assert texts["true"] != texts["false"]


def test_the_step_is_levanters_with_what_it_donates(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built(monkeypatch, mesh(data=4, model=2))
    context: Any = workload.context
    with context():
        lowered: Any = workload.step.lower(*workload.args)  # pyright: ignore[reportFunctionMemberAccess]
    given = described(lowered.args_info)
    assert {key: info.donated for key, info in given.items()} == {
        key: ".model" in key or ".step" in key or ".training_key" in key for key in given
    }
    assert "_train_step" in lowered.as_text()
    following = workload.advance(lowered.out_info, tuple(workload.args))  # pyright: ignore[reportOptionalCall]
    assert jax.tree.structure(following[:2]) == jax.tree.structure(tuple(workload.args[:2]))
    assert [leaf.shape for leaf in jax.tree.leaves(following[:2])] == [
        leaf.shape for leaf in jax.tree.leaves(workload.args[:2])
    ]


def test_what_is_looked_at_in_every_step_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def hooks(*argv: str) -> list[Any]:
        return trainer_of(built(monkeypatch, mesh(data=2), *SMALL, *argv)).hooks.jit_hooks

    assert not hooks()
    assert len(hooks("--trainer.watch.interval", "1")) == 1


def test_nothing_of_haliax_stays_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("haliax.partitioning")
    before = (module.is_array, module._named_pjit_cache)
    built(monkeypatch, mesh(data=2))
    assert (module.is_array, module._named_pjit_cache) == before
    assert not module.is_array(jax.ShapeDtypeStruct((), int))


@pytest.mark.parametrize(
    ("argv", "baseline"),
    [
        ((), "data:-1 gradient_checkpointing=true microbatches=1"),
        (
            ("--trainer.mesh.axes", "{data: 4, model: 4}", "--trainer.per_device_parallelism", "4"),
            "data:4,model:4 gradient_checkpointing=true microbatches=2",
        ),
        (
            ("--trainer.mesh.axes", "{model: -1}", "--model.gradient_checkpointing", "nested"),
            "model:-1 gradient_checkpointing=nested microbatches=1",
        ),
        (("--trainer.mesh.axes", "{replica: 2}"), None),
        (("--trainer.mesh.dcn_axes", "{data_dcn: 2}"), "dcn.data:2,data:-1"),
        (("--trainer.per_device_parallelism", "3"), None),
    ],
)
def test_the_baseline_is_the_mesh_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], baseline: str | None
) -> None:
    names = ("data", "model")
    found = built(monkeypatch, mesh(data=2, model=2), *SMALL, *argv, microbatches=1).baseline
    if baseline is None:
        assert found is None
        return
    assert found is not None
    assert found.startswith(baseline)
    granules = {"num_granules": 2} if "dcn" in baseline else {}
    assert parse_mesh(found.split()[0], names, num_devices=16, **granules)


def test_the_baseline_of_the_defaults_fits_one_slice_and_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "spans_granules", lambda: True)
    text = built(monkeypatch, mesh(data=2, replica=2)).baseline
    assert text is not None
    assert text.startswith("dcn.replica:-1,data:-1 ")
    whole = parse_mesh(text.split()[0], ("data", "replica"), num_devices=64, num_granules=8)
    assert dict(part.split(":") for part in format_mesh(whole).split(",")) == {
        "dcn.replica": "8",
        "data": "8",
    }
    assert built(monkeypatch, mesh(data=2)).baseline is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--model.hiddendim", "3"), "unrecognized arguments: --model.hiddendim"),
        (("--trainer.seed", "x"), "`seed`: Couldn't parse 'x' into an int"),
        (("--help",), "`--help` is no argument of a training"),
        (("--config_path", "gs://x/y.yaml"), "`gs://x/y.yaml` is not on this machine"),
        (("--config_path", "nowhere.yaml"), "Levanter finds no configuration `nowhere.yaml`"),
        (("--train_seq_len", "17"), "`train_seq_len` is 17, and the model takes 1 to 16"),
        (("--trainer.train_batch_size", "[{start: 0, value: 8}]"), "is a schedule"),
        (("--trainer.train_batch_size", "-1"), "do not say the rows of an update"),
        (("--trainer.train_batch_size", "7"), "7 rows cannot be split into such microbatches"),
        (("--data.vocab_size", "0"), "the tokenizer `gpt2` is not on this machine"),
        (("--initialize_from_hf", "true", "--use_hf_model_config", "true"), "from the hub"),
        (("--pad_tokenizer_to_match_model", "true", "--data.vocab_size", "0"), "tokenizer `gpt2`"),
    ],
)
def test_arguments_that_cannot_be_taken_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        built(monkeypatch, mesh(data=2), *SMALL, *argv)
    assert said in caught.value.message
    assert caught.value.hint
    if argv[0] == "--model.hiddendim":
        assert "`--model.hidden_dim`" in caught.value.message


def test_a_field_of_a_file_that_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("trainer: {train_batch_size: 8, bogus: 1}\n")
    with pytest.raises(UsageError, match="fields `bogus` are not valid for TrainerConfig"):
        built(monkeypatch, mesh(data=2), *SMALL, "--config_path", str(path))
    path.write_text("trainer: {train_batch_size: 8}\ndata: {vocab_size: 32}\n")
    assert built(monkeypatch, mesh(data=2), "--config_path", str(path)).facts["batch"] == 8


def test_an_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("levanter.main.train_lm")
    monkeypatch.setattr(module.NoAdaptorConfig, "get_choice_name", lambda _: "lora")
    with pytest.raises(UsageError, match="an adapter is trained"):
        built(monkeypatch, mesh(data=2))


def test_a_tokenizer_that_is_here_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = ("--trainer.train_batch_size", "8", "--data.tokenizer", str(tmp_path))
    with pytest.raises(UsageError, match="cannot be read as a tokenizer"):
        built(monkeypatch, mesh(data=2), *argv)
    (tmp_path / "tokens").write_text("a b c d e")
    _forget()
    workload = built(monkeypatch, mesh(data=4), *argv)
    assert workload.facts["vocab_size"] == 5
    assert leaf_of(workload, ".table").shape == (5, 32)


def test_an_update_that_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="32 rows cannot be split into 5 microbatches over 2"):
        built(monkeypatch, mesh(data=2), microbatches=5)


def test_facts_are_the_sizes_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(monkeypatch, mesh(data=2)).facts == {
        "batch": 32,
        "seq_len": 16,
        "vocab_size": 64,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "num_layers": 1,
        "num_heads": 8,
        "num_kv_heads": 4,
        "num_experts": 1,
    }


def test_an_axis_that_levanter_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="Levanter's mesh has no axis `context`"):
        built(monkeypatch, mesh(context=2))
    argv = ("--trainer.mesh.compute_mapping", "{position: context}")
    workload = built(monkeypatch, mesh(context=2), *SMALL, *argv)
    tokens = leaf_of(workload, ".tokens")
    assert tokens.sharding.shard_shape(tokens.shape) == (32, 8)
    assert built(monkeypatch, mesh(dp=1, data=2))


def test_a_version_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("levanter.trainer")
    monkeypatch.delattr(module.Trainer, "_jit_train_step_fn_no_hook")
    with pytest.raises(UsageError, match="has no `_jit_train_step_fn_no_hook`") as caught:
        built(monkeypatch, mesh(data=2))
    assert "marin-levanter 0.2.227" in str(caught.value.hint)


def test_what_levanter_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def absent(name: str) -> object:
        if name == "levanter.main.train_lm":
            raise ModuleNotFoundError("No module named 'draccus'", name="draccus")
        return original(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="Levanter needs the module `draccus`") as caught:
        built(monkeypatch, mesh(data=2))
    assert caught.value.hint == "`pip install draccus`"


def test_without_levanter_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="levanter")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="Levanter is not installed") as caught:
        built(monkeypatch, mesh(data=2))
    assert "marin-levanter" in str(caught.value.hint)


def test_it_is_found_by_its_name() -> None:
    assert parse_entry("levanter", ["--config_path", "x.yaml"]) == Entry(
        kind="module",
        location="automesh_frameworks.steps.levanter",
        argv=("--config_path", "x.yaml"),
    )


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automesh", "search", "levanter", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--", *SMALL]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == "data:4 gradient_checkpointing=true microbatches=1"
    assert {row["plan"].split()[0] for row in told["candidates"]} >= {"data:4", "model:4"}
