"""Presets: found by name, read with how they were made, and all that come along are whole."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest

import automesh
from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.mesh.evidence import StaleEvidenceWarning
from automesh.mesh.rules import shipped
from automesh.mesh.rules.shipped import Preset, find_presets, preset_files, rules_path
from automesh.platforms import platform_named
from benchmarks.presets.index import page
from benchmarks.presets.models import MODELS, TARGETS
from tests.support.presets import made, preset_in

KEPT = find_presets()
EVERY = [(preset, target) for preset in KEPT for target in preset.targets]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    preset_in(tmp_path)
    preset_in(tmp_path, "maxtext/other-1.5b")
    monkeypatch.setattr(shipped, "presets_folder", lambda: tmp_path)
    return tmp_path


def test_a_preset_is_loaded_by_its_name(folder: Path) -> None:
    config = automesh.load("preset:maxtext/small").select("tpu-v5p-64")
    assert config.mesh_axis_names == ("data", "fsdp", "tensor")
    assert config.mesh_shape.ici_mesh_shape == (1, 32, 1)
    assert config.knobs["remat_policy"] == "full"
    assert config.evidence.kind == "compiled"


def test_a_name_with_a_dot_is_whole(folder: Path) -> None:
    assert list(preset_files()) == ["maxtext/other-1.5b", "maxtext/small"]
    assert rules_path("preset:maxtext/other-1.5b") == folder / "maxtext" / "other-1.5b.toml"


def test_any_other_path_stays_as_it_is() -> None:
    assert rules_path("mesh_rules.toml") == "mesh_rules.toml"
    assert rules_path(Path("a/preset:b")) == Path("a/preset:b")


@pytest.mark.parametrize("name", ["maxtext/smal", "small", "", "../small", "maxtext/small.toml"])
def test_a_preset_that_is_not_there_is_told(name: str, folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no preset") as told:
        automesh.load(f"preset:{name}")
    assert "automesh presets" in told.value.hint
    if name == "maxtext/smal":
        assert "did you mean `maxtext/small`" in told.value.message


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["maxtext/other-1.5b", "maxtext/small"]),
        ("SMALL", ["maxtext/small"]),
        ("preset:maxtext/small", ["maxtext/small"]),
        ("*/other-*", ["maxtext/other-1.5b"]),
        ("maxtext/", ["maxtext/other-1.5b", "maxtext/small"]),
    ],
)
def test_a_pattern_finds_names(pattern: str, names: list[str], folder: Path) -> None:
    assert [one.name for one in automesh.presets(pattern).found] == names


@pytest.mark.parametrize("pattern", ["zz", "*zz*", "x" * 300])
def test_a_pattern_that_means_nothing_is_told(pattern: str, folder: Path) -> None:
    with pytest.raises(UsageError):
        automesh.presets(pattern)


def test_it_is_read_how_a_rule_was_made(folder: Path) -> None:
    (preset,) = find_presets("small")
    assert preset.targets == ("tpu-v5p-64", "gpu-h100-64")
    assert preset.records["tpu-v5p-64"] == made()
    assert "estimated to fit" in preset.records["tpu-v6e-64"].reason


def test_a_record_with_an_unknown_key_is_refused(folder: Path) -> None:
    path = folder / "maxtext" / "small.json"
    tree = json.loads(path.read_text())
    tree["targets"]["tpu-v5p-64"]["secs"] = 1.0
    path.write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"targets\.tpu-v5p-64\.secs"):
        find_presets("small")


@pytest.mark.plugin("frameworks")
def test_the_figures_of_a_preset_stay_as_they_are(folder: Path) -> None:
    with pytest.raises(UsageError, match="comes with automesh"):
        automesh.api.check("maxtext", rules="preset:maxtext/small", update=True)


# Those that come along.


def test_every_kept_preset_is_of_a_model_and_a_target_on_the_list() -> None:
    assert {preset.name for preset in KEPT} <= {model.preset for model in MODELS}
    assert len(MODELS) >= 6
    assert {target for preset in KEPT for target in preset.records} <= set(TARGETS)


@pytest.mark.parametrize(
    ("preset", "target"), EVERY, ids=[f"{preset.name} {target}" for preset, target in EVERY]
)
def test_every_rule_is_loaded_and_fits_its_devices(preset: Preset, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleEvidenceWarning)
        config = automesh.load(f"preset:{preset.name}").select(target)
    absent = parse_target(target, {}).absent
    assert absent is not None
    shape = config.mesh_shape
    granules = math.prod(shape.dcn_mesh_shape)
    assert granules == absent.fabric.num_granules
    assert granules * math.prod(shape.ici_mesh_shape) == absent.num_devices
    told = preset.records[target]
    assert told.ours is not None
    assert told.ours.kind == config.evidence.kind
    assert told.ours.step_s == config.evidence.step_s > 0
    assert told.arguments.startswith(f"model_name={preset.name.partition('/')[2]} ")
    if config.evidence.kind == "compiled":
        assert config.evidence.program.fingerprint
        versions = dict(config.evidence.versions)
        plugins = [plugin.packages[0] for plugin in platform_named(absent.platform).plugins]
        (compiler,) = [name for name in plugins if name in versions]
        assert told.versions[compiler] == versions[compiler]
        assert config.evidence.hbm_bytes <= absent.device_memory_bytes
    else:
        assert not config.evidence.program.fingerprint
        assert told.ours.memory_bytes <= absent.device_memory_bytes


@pytest.mark.parametrize("preset", KEPT, ids=[preset.name for preset in KEPT])
def test_what_has_no_rule_says_why(preset: Preset) -> None:
    for target, told in preset.records.items():
        assert (target in preset.targets) == (told.ours is not None)
        assert told.ours is not None or told.reason
        assert told.seconds > 0


def test_the_index_page_is_that_of_the_kept_presets() -> None:
    kept = (shipped.presets_folder() / "README.md").read_text(encoding="utf-8")
    assert kept == page(KEPT), "run `python -m benchmarks.presets --index-only`"
