"""`automesh presets`: as a table, as JSON, and what it says of a preset that has gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from automesh.answers import PresetList
from automesh.mesh.rules.shipped import find_presets
from tests.support.presets import preset_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    preset_in(tmp_path)
    return tmp_path


@pytest.mark.parametrize("width", [1, 40, 60, 80, 120])
def test_no_line_is_too_long(width: int, folder: Path) -> None:
    preset_in(folder, "maxtext/a-model-with-a-long-name-of-its-own-and-more")
    text = listed(folder=folder).table(width=width, colour=False)
    assert max(map(cell_len, text.splitlines())) <= max(width, 40)


def listed(*names: str, folder: Path) -> PresetList:
    return PresetList(found=tuple(find_presets(*names, folder=folder)))


def test_a_table_says_what_each_rule_rests_on(folder: Path) -> None:
    text = listed(folder=folder).table(width=120, colour=False)
    (tpu,) = [line for line in text.splitlines() if line.startswith("tpu-v5p-64")]
    assert all(part in tpu for part in ("fsdp:32", "remat_policy=full", "1.50 s", "20.0 GiB"))
    assert tpu.endswith("compiled")
    (gpu,) = [line for line in text.splitlines() if line.startswith("gpu-h100-64")]
    assert "dcn.data:8,fsdp:8" in gpu and gpu.endswith("estimated")
    assert "tpu-v6e-64: no rule: nothing is estimated to fit" in text
    assert 'automesh.load("preset:maxtext/small").select("tpu-v5p-64")' in text
    assert "jax 0.0, libtpu 0.0, maxtext 0.0 (1 rule); jax 0.0 (1 rule)" in text


def test_one_preset_is_shown_with_its_arguments(folder: Path) -> None:
    alone = listed("small", folder=folder).table(width=120, colour=False)
    assert "model_name=small max_target_length=128 per_device_batch_size=4" in alone
    preset_in(folder, "maxtext/other")
    assert "model_name=" not in listed(folder=folder).table(width=120, colour=False)


def test_the_example_names_a_rule_that_is_there(folder: Path) -> None:
    bare = 'schema = 1\naxes = ["data", "fsdp"]\n'
    preset_in(folder, "maxtext/a-first").write_text(bare)
    text = listed(folder=folder).table(width=120, colour=False)
    assert 'automesh.load("preset:maxtext/small").select("tpu-v5p-64")' in text
    assert "select" not in listed("a-first", folder=folder).table(width=120, colour=False)


def test_without_presets_it_is_said_how_they_are_made(tmp_path: Path) -> None:
    assert "python -m benchmarks.presets" in listed(folder=tmp_path).table(width=80, colour=False)


def test_json_has_the_rules_and_how_they_were_made(folder: Path) -> None:
    (told,) = listed(folder=folder).to_json()["presets"]
    assert told["name"] == "maxtext/small"
    assert [rule["match"] for rule in told["rules"]] == ["tpu-v5p-64", "gpu-h100-64"]
    assert told["rules"][0]["evidence"]["program"]["fingerprint"] == "abc"
    assert told["targets"]["tpu-v5p-64"]["versions"]["libtpu"] == "0.0"
    assert set(told["targets"]) == {"tpu-v5p-64", "gpu-h100-64", "tpu-v6e-64"}


def test_the_command_lists_what_comes_along(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "automesh", "presets", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    names = [one["name"] for one in json.loads(done.stdout)["presets"]]
    assert names == [preset.name for preset in find_presets()] and names
    assert done.stderr == ""
