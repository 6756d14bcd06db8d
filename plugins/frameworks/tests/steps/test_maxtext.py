"""MaxText's adapter, with a stand-in for MaxText; `test_real_maxtext.py` has the real one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from automesh.errors import UsageError
from automesh.mesh.axes import format_mesh, parse_mesh
from automesh.plugins.framework import Framework, framework_at
from automesh.program.nouns import Entry
from automesh.program.script.workload import Workload
from automesh.space.spec import read_space
from automesh.tuner.request import parse_entry, read_request
from automesh_frameworks.steps import maxtext as adapter
from automesh_frameworks.steps.registry import FRAMEWORKS
from plugins.frameworks.tests.support.framework_runs import forget, mesh
from tests.support.paths import ROOT

STAND_INS = ROOT / "plugins/frameworks/tests/support/stand_ins"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))  # pyright: ignore[reportUnknownMemberType]
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget("maxtext", adapter._maxtext, adapter._keys, adapter._axes, adapter._initialized)  # pyright: ignore[reportPrivateUsage]


def built(monkeypatch: pytest.MonkeyPatch, on: Mesh, *argv: str, **knobs: str | int) -> Workload:
    monkeypatch.setattr(sys, "argv", ["maxtext", *argv])
    return adapter.build(on, **knobs)  # pyright: ignore[reportArgumentType]


def config_of(workload: Workload) -> object:
    """What the step was made with: MaxText binds its configuration to it."""
    return workload.step.__wrapped__.args[1]  # pyright: ignore[reportFunctionMemberAccess]


def test_every_size_is_written_and_none_left_to_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built(monkeypatch, mesh(fsdp=4, tensor=2), "per_device_batch_size=2")
    config = vars(config_of(workload))
    sizes = {key: value for key, value in config.items() if key.endswith("_parallelism")}
    assert {key: size for key, size in sizes.items() if size != 1} == {
        "ici_fsdp_parallelism": 4,
        "ici_tensor_parallelism": 2,
    }
    assert len(sizes) == 12
    assert config["hardware"] == "cpu"
    assert (config["enable_checkpointing"], config["skip_jax_distributed_system"]) == (False, True)


def test_the_mesh_has_maxtexts_axes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = mesh(tensor=2, fsdp=4)
    workload = built(monkeypatch, given, "per_device_batch_size=2")
    whole = workload.args[0]["up"].sharding.mesh
    assert whole.axis_names == ("data", "stage", "fsdp", "context", "tensor", "expert")
    assert whole.devices.shape == (1, 1, 4, 1, 2, 1)
    for fsdp, tensor in ((0, 1), (3, 0)):
        assert whole.devices[0, 0, fsdp, 0, tensor, 0] == given.devices[tensor, fsdp]


@pytest.mark.parametrize(("accumulation", "rows"), [(0, 4.0), (1, 8.0), (4, 2.0)])
def test_an_update_has_the_same_rows_at_every_accumulation(
    monkeypatch: pytest.MonkeyPatch, accumulation: int, rows: float
) -> None:
    argv = ("per_device_batch_size=4", "gradient_accumulation_steps=2")
    workload = built(monkeypatch, mesh(fsdp=8), *argv, gradient_accumulation_steps=accumulation)
    config = vars(config_of(workload))
    assert config["per_device_batch_size"] == rows
    assert config["gradient_accumulation_steps"] == (accumulation or 2)
    assert workload.facts["batch"] == 4 * 2 * len(jax.devices())
    assert workload.tokens_per_step == workload.facts["batch"] * 16


def test_flags_of_the_environment_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, every rule was told as made under the flags that MaxText sets for its dumps."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    built(monkeypatch, mesh(fsdp=2))
    assert "XLA_FLAGS" not in os.environ
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    _forget()
    built(monkeypatch, mesh(fsdp=2))
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"


def test_knobs_are_maxtexts_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = {"remat_policy": "minimal", "custom_mesh_and_rule": "pure-fsdp"}
    workload = built(monkeypatch, mesh(fsdp=4), **knobs)
    assert vars(config_of(workload))["remat_policy"] == "minimal"
    assert workload.args[0]["up"].sharding.mesh.axis_names == ("fsdp",)
    with pytest.raises(UsageError, match=r"pure-fsdp has no axis `tensor`; its axes are fsdp"):
        built(monkeypatch, mesh(fsdp=4, tensor=2), **knobs)


@pytest.mark.parametrize(
    ("argv", "baseline"),
    [
        ((), "dcn.data:-1,fsdp:-1"),
        (("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"), "dcn.data:-1,fsdp:4,tensor:2"),
        (("ici_fsdp_parallelism=1",), None),
        (("ici_fsdp_parallelism=1", "dcn_data_parallelism=2"), "dcn.data:2"),
        (("ici_context_parallelism=2",), None),
    ],
)
def test_the_baseline_is_the_mesh_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], baseline: str | None
) -> None:
    names = ("data", "fsdp", "tensor")
    workload = built(monkeypatch, mesh(data=2, fsdp=2, tensor=2), *argv)
    knobs = " remat_policy=full gradient_accumulation_steps=1"
    assert workload.baseline == (baseline and baseline + knobs)
    if baseline and argv:
        sizes = {"num_devices": 16, "num_granules": 2} if "-1" in baseline else {}
        assert format_mesh(parse_mesh(baseline, names, **sizes)).startswith("dcn.data:2")


def test_the_baseline_of_the_defaults_fits_one_slice_and_several() -> None:
    """Before, a search for several slices or nodes ended with a baseline that does not fit."""
    names, text = ("data", "fsdp", "tensor"), "dcn.data:-1,fsdp:-1"
    assert format_mesh(parse_mesh(text, names, num_devices=8)) == "fsdp:8"
    whole = parse_mesh(text, names, num_devices=64, num_granules=8)
    assert format_mesh(whole) == "dcn.data:8,fsdp:8"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--model",), "`--model` is not an argument of MaxText"),
        (("emb_dimm=3",), "MaxText refuses its arguments: 1 validation error emb_dimm"),
        (("ici_data_parallelism=0",), "a size must be positive"),
    ],
)
def test_arguments_that_maxtext_refuses_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        built(monkeypatch, mesh(fsdp=2), *argv)
    assert caught.value.hint
    if argv == ("emb_dimm=3",):
        assert "`emb_dim`" in caught.value.hint


def test_compiler_options_among_the_arguments_are_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="a search would compile without it") as caught:
        built(monkeypatch, mesh(fsdp=2), "compile_xla_flags=--xla_tpu_x=true")
    assert "--xla NAME=VALUE" in str(caught.value.hint)
    assert built(monkeypatch, mesh(fsdp=2), "compile_xla_flags=")


def test_a_version_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("maxtext.utils.sharding")
    monkeypatch.delattr(module, "build_zero1_input_state_mesh_shardings")
    with pytest.raises(UsageError, match="has no `build_zero1_input_state_mesh") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert "0.2.5" in str(caught.value.hint)


def test_what_maxtext_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def absent(name: str) -> object:
        if name == "maxtext.utils.sharding":
            raise ModuleNotFoundError("No module named 'tokamax'", name="tokamax")
        return original(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="MaxText needs the module `tokamax`") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert caught.value.hint == "`pip install tokamax`"


def test_an_axis_that_maxtext_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="MaxText's mesh has no axis `dp`"):
        built(monkeypatch, mesh(dp=2))
    assert built(monkeypatch, mesh(dp=1, fsdp=2))


def test_without_maxtext_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="maxtext")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UsageError, match="MaxText is not installed") as caught:
        built(monkeypatch, mesh(fsdp=2))
    assert caught.value.hint == "`pip install maxtext`"


def test_a_framework_is_found_by_its_name_and_has_its_own_space(tmp_path: Path) -> None:
    entry = parse_entry("maxtext", ["model_name=x"])
    assert entry == Entry(
        kind="module", location="automesh_frameworks.steps.maxtext", argv=("model_name=x",)
    )
    assert framework_at(entry.location) == FRAMEWORKS["maxtext"]
    assert read_request("maxtext", {"args": ()}).space == "maxtext"
    assert read_request("maxtext", {"args": (), "space": "mine.toml"}).space == "mine.toml"
    assert read_request(str(ROOT / "examples" / "dense_lm.py"), {}).space == "auto"
    with pytest.raises(UsageError) as caught:
        parse_entry("maxtexd")
    assert caught.value.hint is not None
    assert "maxtext" in caught.value.hint


def test_a_script_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maxtext").write_text("def build(mesh): ...\n")
    monkeypatch.chdir(tmp_path)
    assert parse_entry("maxtext").kind == "script"


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))
def test_what_a_framework_names_is_there(framework: Framework) -> None:
    assert read_space(framework.space).knobs
    assert callable(importlib.import_module(framework.module).build)


@pytest.mark.slow
def test_a_search_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automesh", "search", "maxtext", "--target", "cpu:4"]
    command += ["--dry-run", "--json", "--results", str(tmp_path), "--", "per_device_batch_size=2"]
    done = subprocess.run(command, cwd=STAND_INS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["baseline"] == "fsdp:4 remat_policy=full gradient_accumulation_steps=1"
    assert {row["plan"].split()[0] for row in told["candidates"]} >= {"fsdp:4", "tensor:4"}
