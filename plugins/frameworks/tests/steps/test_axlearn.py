"""AXLearn's adapter, with a stand-in for AXLearn; `test_real_axlearn.py` has the real one."""

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
from jax.sharding import Mesh

from automesh.errors import UsageError
from automesh.mesh.axes import format_mesh, parse_mesh
from automesh.plugins.framework import framework_at
from automesh.program.script.workload import Workload
from automesh.space.spec import read_space
from automesh.tuner.request import parse_entry
from automesh_frameworks.steps import axlearn as adapter
from automesh_frameworks.steps.registry import FRAMEWORKS
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"
AXES = ("pipeline", "data", "expert", "fsdp", "seq", "model")
TEST = ("--module=text.gpt.c4_trainer", "--config=fuji-test-v1")
ROWS = "input.input_dispatcher.global_logical_batch_size"

# AXLearn's trainer enters its mesh in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:`with mesh:DeprecationWarning")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget("axlearn", adapter._axlearn, adapter._asked)  # pyright: ignore[reportPrivateUsage]


def built(monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str, **knobs: str | int) -> Workload:
    monkeypatch.setattr(sys, "argv", ["axlearn", *(argv or TEST)])
    return adapter.build(on, **knobs)  # pyright: ignore[reportArgumentType]


def trainer_of(workload: Workload) -> Any:
    """The trainer whose method the step is."""
    return workload.step.__wrapped__.__self__  # pyright: ignore[reportFunctionMemberAccess]


def layer_of(workload: Workload) -> Any:
    return trainer_of(workload).config.model.decoder.transformer.layer


def steps_of(workload: Workload) -> int:
    transformation = trainer_of(workload).config.learner.forward_fn_transformation
    return 1 if transformation is None else transformation.steps


def test_the_mesh_has_axlearns_axes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = mesh(model=2, fsdp=4)
    workload = built(monkeypatch, given)
    whole = workload.args[0].model["up"].sharding.mesh
    assert whole.axis_names == AXES
    assert whole.devices.shape == trainer_of(workload).config.mesh_shape == (1, 1, 1, 4, 1, 2)
    for fsdp, model in ((0, 1), (3, 0)):
        assert whole.devices[0, 0, 0, fsdp, 0, model] == given.devices[model, fsdp]


def test_arguments_are_abstract_and_split_as_the_trainer_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, batch = built(monkeypatch, mesh(fsdp=4, model=2)).args
    assert all(isinstance(one, jax.ShapeDtypeStruct) for one in jax.tree.leaves((state, batch)))
    assert state.model["up"].sharding.shard_shape(state.model["up"].shape) == (4, 16)
    assert batch["input_ids"].sharding.shard_shape(batch["input_ids"].shape) == (4, 8)


def test_the_step_is_traced_and_run_inside_the_trainers_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = built(monkeypatch, mesh(fsdp=4, model=2))
    step: Any = workload.step
    with pytest.raises(RuntimeError, match="mesh"):
        step.lower(*workload.args)
    assert callable(workload.context)
    with workload.context():
        compiled = step.lower(*workload.args).compile()
    inputs, _ = compiled.input_shardings
    assert inputs[0].model["up"].is_equivalent_to(workload.args[0].model["up"].sharding, 2)
    assert "input_output_alias" in compiled.as_text()  # The trainer donates its state.


def test_it_begins_with_a_trainings_first_state(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built(monkeypatch, mesh(fsdp=4, model=2))
    assert workload.init is not None
    [state] = workload.init(mesh(fsdp=4, model=2))
    wanted = workload.args[0]
    assert jax.tree.map(lambda one: (one.shape, one.dtype), state) == jax.tree.map(
        lambda one: (one.shape, one.dtype), wanted
    )
    assert state.model["up"].sharding.is_equivalent_to(wanted.model["up"].sharding, 2)
    # The trainer keeps none beside it.
    assert trainer_of(workload).trainer_state is None


def test_nothing_is_written_and_no_data_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", "gs://theirs")
    argv = ("--data_dir=gs://mine", "--trainer_dir=out", "--jax_backend=tpu", *TEST)
    assert built(monkeypatch, mesh(fsdp=2), *argv)
    assert list(tmp_path.iterdir()) == []
    assert os.environ["DATA_DIR"] == "gs://theirs"


def test_flags_for_libtpu_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """AXLearn sets them where it is imported: every rule would be told as made under them."""
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    built(monkeypatch, mesh(fsdp=2))
    assert "LIBTPU_INIT_ARGS" not in os.environ
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=true")
    _forget()
    built(monkeypatch, mesh(fsdp=2))
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_tpu_x=true"


@pytest.mark.parametrize(
    ("config", "asked", "parts"),
    [("v1", 0, 1), ("v1", 1, 1), ("v1", 4, 4), ("accumulating", 0, 4), ("accumulating", 2, 2)],
)
def test_an_update_has_the_same_rows_at_every_accumulation(
    monkeypatch: pytest.MonkeyPatch, config: str, asked: int, parts: int
) -> None:
    argv = ("--module=text.gpt.c4_trainer", f"--config=fuji-test-{config}")
    workload = built(monkeypatch, mesh(fsdp=4), *argv, grad_acc_steps=asked)
    assert steps_of(workload) == parts
    assert workload.args[1]["input_ids"].shape == (16, 8)
    assert (workload.facts["batch"], workload.tokens_per_step) == (16, 16 * 8)


def test_other_accumulation_is_that_of_an_exported_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--module=text.gpt.c4_trainer", "--config=fuji-test-accumulating")

    def transformation(steps: int) -> Any:
        workload = built(monkeypatch, mesh(fsdp=4), *argv, grad_acc_steps=steps)
        return trainer_of(workload).config.learner.forward_fn_transformation

    # As configured, all of it stays; the modifier that a rule is exported as knows steps alone.
    assert (transformation(4).steps, transformation(4).grad_dtype) == (4, "float32")
    assert (transformation(2).steps, transformation(2).grad_dtype) != (2, "float32")
    assert transformation(1) is None


def test_a_learner_that_does_something_else_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--module=text.gpt.c4_trainer", "--config=fuji-test-transforming")
    assert built(monkeypatch, mesh(fsdp=4), *argv)
    with pytest.raises(UsageError, match="grad_acc_steps=2 would replace it"):
        built(monkeypatch, mesh(fsdp=4), *argv, grad_acc_steps=2)
    # Before, the baseline, which says 1, was refused.
    workload = built(monkeypatch, mesh(fsdp=4), *argv, grad_acc_steps=1)
    assert trainer_of(workload).config.learner.forward_fn_transformation is not None


def test_what_is_recomputed_is_axlearns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = layer_of(built(monkeypatch, mesh(fsdp=4))).remat_spec
    assert own.policy.names_which_can_be_saved == ".*([qkvo]_proj|context)"
    none = layer_of(built(monkeypatch, mesh(fsdp=4), remat_policy="None"))
    assert none.remat_spec is None
    spec = layer_of(built(monkeypatch, mesh(fsdp=4), remat_policy="dots_saveable")).remat_spec
    assert (spec.prevent_cse, spec.policy) == (False, jax.checkpoint_policies.dots_saveable)
    spec = layer_of(built(monkeypatch, mesh(fsdp=4), remat_policy="FEED_FORWARD")).remat_spec
    assert spec.policy.names_which_can_be_saved == ".*linear1"
    # One plan does not change the configuration of the next.
    again = layer_of(built(monkeypatch, mesh(fsdp=4))).remat_spec
    assert again.policy.names_which_can_be_saved == ".*([qkvo]_proj|context)"


def test_a_policy_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no remat_policy `dots_savable`.*`dots_saveable`"):
        built(monkeypatch, mesh(fsdp=4), remat_policy="dots_savable")
    argv = ("--module=text.gpt.c4_trainer", "--config=fuji-test-stacked")
    with pytest.raises(UsageError, match=r"`model\.decoder\.transformer\.layer`, which the model"):
        built(monkeypatch, mesh(fsdp=4), *argv, remat_policy="None")


def test_facts_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(monkeypatch, mesh(fsdp=4)).facts == {
        "batch": 16,
        "max_sequence_length": 8,
        "dim": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_experts": 1,
        "vocab_size": 32,
    }


def test_values_of_the_configuration_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = (*TEST, f"{ROWS}=32", "model.decoder.dim=64", "learning_rate=1")
    workload = built(monkeypatch, mesh(fsdp=4), *argv)
    assert (workload.facts["batch"], workload.facts["dim"]) == (32, 64)
    assert trainer_of(workload).config.learning_rate == 1


@pytest.mark.parametrize(
    ("argv", "baseline"),
    [
        (TEST, "data:8"),
        ((*TEST, "--mesh_selector=tpu-v5p-64"), "data:2,fsdp:2,model:2"),
        ((*TEST, "--mesh_selector=gpu-x"), "fsdp:8"),
        ((*TEST, "--mesh_selector=tpu-v4-64"), "data:8"),
        ((*TEST, "mesh_shape=(1,1,1,2,2,2)"), None),  # The space lacks `seq`.
        ((*TEST, "mesh_shape=(1,3,1,1,1,1)"), None),
        ((*TEST, "mesh_shape=(8,)"), None),
    ],
)
def test_the_baseline_is_the_mesh_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], baseline: str | None
) -> None:
    eight = jax.devices()[:8]
    monkeypatch.setattr(jax, "devices", lambda: eight)
    workload = built(monkeypatch, mesh(data=1, fsdp=1, model=1), *argv)
    assert workload.baseline == (baseline and f"{baseline} remat_policy=config grad_acc_steps=1")


def test_the_baseline_says_the_accumulation_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ("--module=text.gpt.c4_trainer", "--config=fuji-test-accumulating")
    eight = jax.devices()[:8]
    monkeypatch.setattr(jax, "devices", lambda: eight)
    workload = built(monkeypatch, mesh(data=2, fsdp=2), *argv)
    assert workload.baseline == "data:8 remat_policy=config grad_acc_steps=4"


@pytest.mark.parametrize(
    ("shape", "baseline"),
    [
        ((1, -1, 1, 1, 1, 1), "dcn.data:2,data:4"),
        ((1, -1, 1, 4, 1, 1), "dcn.data:2,fsdp:4"),
        ((1, 1, 1, -1, 1, 2), "dcn.fsdp:2,fsdp:2,model:2"),
        ((1, 1, 1, 1, 1, -1), "dcn.model:2,model:4"),
        (((1, 1, 1, -1, 1, 1), (1, -1, 1, 1, 1, 1)), "dcn.data:2,fsdp:4"),
        (((1, 1, 1, 8, 1, 1), (1, -1, 1, 1, 1, 1)), None),
    ],
)
def test_the_first_axis_of_a_baseline_spans_slices_as_in_axlearn(
    shape: tuple[Any, ...], baseline: str | None
) -> None:
    asked = SimpleNamespace(mesh_axis_names=AXES, mesh_shape=shape, learner=SimpleNamespace())
    if isinstance(shape[0], tuple):
        asked.mesh_shape = SimpleNamespace(ici_mesh_shape=shape[0], dcn_mesh_shape=shape[1])
    slices = [SimpleNamespace(platform="tpu", slice_index=at // 4) for at in range(8)]
    varied = ("data", "fsdp", "model")
    said = adapter._baseline(asked, varied, slices)  # pyright: ignore[reportPrivateUsage]
    assert said == (baseline and f"{baseline} remat_policy=config grad_acc_steps=1")
    if said:
        sizes = {"num_devices": 8, "num_granules": 2}
        assert format_mesh(parse_mesh(said.split()[0], varied, **sizes))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--config=x",), "AXLearn refuses its arguments: Flag --module must have a value"),
        ((*TEST, "--modul=x"), "AXLearn refuses its arguments: Unknown command line flag 'modul'"),
        ((TEST[0], "--config=fuji"), "AXLearn: Unrecognized config fuji"),
        (("--module=nothing", TEST[1]), "no module `nothing`, and no `axlearn.experiments.nothing"),
        ((*TEST, "x"), "`x` is neither a flag"),
        ((*TEST, "model.decoder.dimm=3"), r"no `model\.decoder\.dimm` .did you mean `dim`"),
        ((*TEST, "model.decoder.dim.x=3"), r"has no `model\.decoder\.dim\.x`"),
        ((*TEST, "model.decoder.dim=wide"), "has an int there, not a str"),
        ((*TEST, "mesh_shape=8"), "has a tuple there, not an int"),
    ],
)
def test_arguments_that_axlearn_refuses_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(fsdp=2), *argv)
    assert caught.value.hint


def test_a_module_of_the_users_own_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "their_trainers.py").write_text(
        "from axlearn.experiments.text.gpt.c4_trainer import named_trainer_configs\n"
    )
    (tmp_path / "their_needs.py").write_text("import tokenizers_of_theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    assert built(monkeypatch, mesh(fsdp=2), "--module=their_trainers", TEST[1])
    with pytest.raises(UsageError, match="needs the module `tokenizers_of_theirs`"):
        built(monkeypatch, mesh(fsdp=2), "--module=their_needs", TEST[1])


def test_a_mesh_that_the_trainer_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'fsdp': 8.* attempts to divide batch over"):
        built(monkeypatch, mesh(fsdp=8), *TEST, f"{ROWS}=4")


def test_an_axis_that_axlearn_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="AXLearn's mesh has no axis `tp`; its axes are pipeline"):
        built(monkeypatch, mesh(tp=2))
    assert built(monkeypatch, mesh(tp=1, fsdp=2))


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("utils", "host_to_global_specs", "no `host_to_global_specs` in `axlearn.common.utils`"),
        ("trainer", "_pjit_train_step", "no `_pjit_train_step` in its `SpmdTrainer`"),
    ],
)
def test_a_version_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, said: str
) -> None:
    found = importlib.import_module(f"axlearn.common.{module}")
    monkeypatch.delattr(found.SpmdTrainer if module == "trainer" else found, name)
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert "2026" in str(caught.value.hint)


def test_without_axlearn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="axlearn")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="AXLearn is not installed") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert "repository" in str(caught.value.hint)


def test_it_is_found_by_its_name_and_its_space_names_its_axes() -> None:
    assert framework_at(parse_entry("axlearn", list(TEST)).location) == FRAMEWORKS["axlearn"]
    space = read_space("axlearn")
    assert {axis.name for axis in space.axes} == set(AXES) - {"pipeline"}
    assert {knob.name for knob in space.knobs} == {"remat_policy", "grad_acc_steps"}


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automesh", "search", "axlearn", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--", *TEST]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == "data:4 remat_policy=config grad_acc_steps=1"
    assert {row["plan"].split()[0] for row in told["candidates"]} >= {"fsdp:4", "data:2,model:2"}
