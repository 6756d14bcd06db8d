"""What `benchmarks.check` changes in the dense example, and how it counts what it is told."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from automesh.mesh.rules.file import read_rules
from benchmarks.check import EDITS, Edit, Run, edited, example, is_right, rules_text, summary

SILENT = Run(code=0, reasons=(), told=(), wall_s=20.0)
LOUD = replace(SILENT, code=1, reasons=("beyond the bounds: memory",), told=("memory",))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_the_example_and_is_undone(name: str) -> None:
    edit = EDITS[name]
    with example() as folder:
        path = folder / edit.file
        before = path.read_text()
        assert before.count(edit.old) == 1
        with edited(folder, edit):
            during = path.read_text()
        assert path.read_text() == before
    is_same = ast.dump(ast.parse(during)) == ast.dump(ast.parse(before))
    assert is_same == (name == "only reformatted")


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    edit = replace(EDITS["lost donation"], old="nowhere in it")
    with example() as folder, pytest.raises(LookupError, match="nowhere"), edited(folder, edit):
        pass


@pytest.mark.parametrize(
    ("edit", "run", "right"),
    [
        (Edit(file="", old="", new="", code=1, said="memory"), LOUD, True),
        (Edit(file="", old="", new="", code=1, said="FLOPs"), LOUD, False),
        (Edit(file="", old="", new="", code=1, said="memory"), SILENT, False),
        (Edit(file="", old="", new="", code=0), SILENT, True),
        (Edit(file="", old="", new="", code=0), replace(SILENT, told=("memory",)), False),
    ],
)
def test_a_verdict_is_right_by_its_code_and_its_reason(edit: Edit, run: Run, right: bool) -> None:
    assert is_right(edit, run) == right


def test_a_rule_is_for_as_many_devices_as_its_sizes_multiply_to(tmp_path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(rules_text(["fsdp:4,tp:2", "dp:2"]))
    assert [rule.match for rule in read_rules(path).rules] == ["cpu-8", "cpu-2"]


def test_alarms_are_counted() -> None:
    slow = replace(SILENT, wall_s=50.0)
    told = summary([SILENT, LOUD, slow], ["lost donation"], "0.10.1", "0.10.2")
    assert (told["runs"], told["alarms"], told["told"]) == (3, 1, ["memory"])
    assert (told["wall_s"], told["most_wall_s"]) == (20.0, 50.0)
    assert told["wrong_edits"] == ["lost donation"]
