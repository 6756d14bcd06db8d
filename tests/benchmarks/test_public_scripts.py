"""What the benchmark of public scripts reads from a manifest and from what a search says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks.public_scripts import (
    STAND_INS,
    Outcome,
    Script,
    cell,
    outcome_of,
    preparing,
    read_manifest,
    search,
    summary,
)
from tests.support.paths import ROOT

MANIFEST = ROOT / "benchmarks" / "data" / "public_scripts.json"
ONE_DEVICE = MANIFEST.with_name("public_one_device_scripts.json")


def report(**other: object) -> str:
    said = {
        "candidates": [],
        "notices": ["the script was run up to its step `train_step` (train.py:7), called at ..."],
        "details": ["the script was started 2 times: first run, data:4,model:2"],
        "funnel": {"legal": 4},
        "best": {"plan": "model:8"},
        "baseline": "data:2,model:4",
        "stop_reason": "dry run",
    }
    return json.dumps(said | other)


def test_a_result_is_read() -> None:
    found = outcome_of("tpu-v5p-16", report(), "", 3.0)
    assert (found.step, found.plans, found.starts, found.is_carried) == ("train_step", 4, 2, True)
    assert found.started_for == "first run, data:4,model:2"
    assert cell(found) == "model:8, of 4; carried, 2 starts"


def test_a_measurement_without_a_rule_is_told() -> None:
    found = outcome_of("cpu:8", report(rules_path="mesh_rules.toml"), "", 3.0)
    assert found.has_rule
    assert "no rule" not in cell(found)
    assert cell(outcome_of("cpu:8", report(), "", 3.0)).endswith("2 starts; no rule")


def test_why_a_script_is_run_again_is_read() -> None:
    why = "the batch size depends on the mesh: train.py is run again for each mesh"
    found = outcome_of("cpu:8", report(notices=[why]), "", 3.0)
    assert (found.is_carried, found.why_not) == (False, why)


def test_of_a_failed_search_the_sentence_is_kept() -> None:
    words = "... estimating\nerror: train.py makes no mesh\nhint: split its arrays\n"
    found = outcome_of("cpu:8", "", words, 3.0)
    assert found.error == "error: train.py makes no mesh hint: split its arrays"
    assert not found.best


def test_scripts_are_counted_for_each_target() -> None:
    own = Outcome(target="cpu:8", best="data:8", own="data:8", plans=1, starts=2, is_carried=True)
    again = Outcome(target="cpu:8", best="data:4,model:2", plans=4, starts=6)
    failed = Outcome(target="cpu:8", error="error: no mesh")
    counts = summary({"a/b/x.py": [own], "a/b/y.py": [again], "c/d/z.py": [failed]})
    assert counts["repositories"] == 2
    assert counts["targets"]["cpu:8"] == {
        "searched": 3,
        "with_a_result": 2,
        "with_a_rule": 0,
        "among_several": 1,
        "carried": 1,
        "three_starts_at_most": 1,
    }


@pytest.mark.parametrize("manifest", [MANIFEST, ONE_DEVICE])
def test_a_manifest_names_whole_commits_and_stand_ins_that_are_there(manifest: Path) -> None:
    scripts = read_manifest(manifest)
    assert scripts
    assert all(len(one.commit) == 40 for one in scripts)
    named = [*(name for one in scripts for name in (*one.stand_ins, *one.prepare[:1]))]
    assert [name for name in named if not (STAND_INS / name).exists()] == []


def test_what_is_no_manifest_is_told(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"scripts": [{"path": "train.py"}]}')
    with pytest.raises(typer.BadParameter, match="is not a manifest"):
        read_manifest(tmp_path / "list.json")


def test_a_missing_checkout_is_told(tmp_path: Path) -> None:
    found = search(read_manifest(MANIFEST)[0], tmp_path, "cpu:8", "1m", tmp_path)
    assert "does not exist: check out" in found.error


def test_data_are_written_where_the_script_reads_them() -> None:
    script = Script(
        repository="someone/some",
        commit="0" * 40,
        path="train.py",
        variables={},
        prepare=("text_file.py", "{root}/data/input.txt", "2000"),
    )
    _, program, *arguments = preparing(script, Path("/checkouts"))
    assert Path(program) == STAND_INS / "text_file.py"
    assert arguments == ["/checkouts/someone_some/data/input.txt", "2000"]
