"""Each case of tests/data/conformance.json: it passes, or deviates as the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance import cases, deviations
from tests.conformance.cases import Numbered

CASES = {str(one): one for one in cases.cases_of(cases.DATA)}
DEVIATIONS = {case: one.name for one in deviations.deviations() for case in one.cases}
NOT_COVERED = {case for one in deviations.not_covered() for case in one.cases}
GROUPS_NOT_COVERED = {group for one in deviations.not_covered() for group in one.groups}


# tests/conformance/test_pipeline_cases.py has a table of its own.
SCHEDULES = {"pipeline_schedules", "multimesh_wavefront", "jaxpp_schedule_errors"}
COVERED = [name for name, one in CASES.items() if one.group not in GROUPS_NOT_COVERED | SCHEDULES]
NEEDS = {group: plugin for plugin, groups in cases.IN_PLUGINS.values() for group in groups}


def marked(name: str) -> object:
    plugin = NEEDS.get(CASES[name].group)
    return name if plugin is None else pytest.param(name, marks=pytest.mark.plugin(plugin))


@pytest.mark.parametrize("name", [marked(name) for name in COVERED])
def test_case(name: str) -> None:
    verdict = cases.run_case(CASES[name])
    if name in NOT_COVERED:
        assert verdict.status == "not_covered"
    elif name in DEVIATIONS:
        assert (verdict.status, verdict.deviation) == ("deviated", DEVIATIONS[name]), verdict.detail
    else:
        assert verdict.status == "passed", f"{verdict.deviation} {verdict.detail}"


@pytest.mark.plugin("pipeline")
def test_the_table_is_about_cases_that_there_are() -> None:
    assert len(CASES) == 421
    assert set(DEVIATIONS) | NOT_COVERED <= set(CASES)
    assert set(cases.NOT_COVERED) == GROUPS_NOT_COVERED
    assert {one.group for one in CASES.values()} == GROUPS_NOT_COVERED | set(cases.runners())
    names = [one.name for one in deviations.deviations()]
    assert len(set(names)) == len(names)
    assert all(one.old and one.new and one.why for one in deviations.deviations())


def test_the_page_shows_the_table() -> None:
    assert deviations.PAGE.read_text(encoding="utf-8") == deviations.page(), (
        "run `python -m tests.regenerate.update_golden`"
    )


def file_of(folder: Path, **groups: list[object]) -> Path:
    path = folder / "cases.json"
    tree = {"groups": {name: {"cases": cases} for name, cases in groups.items()}}
    path.write_text(json.dumps(tree))
    return path


SIZES = {"mesh_shape": [2, -1], "as_type": "tuple", "num_devices": 8}


def test_another_file_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(
        tmp_path,
        infer_mesh_shape=[
            {**SIZES, "expect": {"returns": [2, 4]}},
            {**SIZES, "mesh_shape": [0, 4], "expect": {"returns": [0, 4]}},
            {**SIZES, "expect": {"returns": [4, 2]}},
            {"what": "another form"},
        ],
        dances=[{"step": 1}],
    )
    assert cases.main([str(path)]) == 1
    printed = capsys.readouterr().out
    counts = json.loads(printed.splitlines()[-1])
    assert counts == {"passed": 1, "deviated": 1, "failed": 2, "not_covered": 1}
    assert "failed    infer_mesh_shape[2]: returned [2, 4]; wanted: returns [4, 2]" in printed
    assert "the group `dances` is not known" in printed


def test_an_error_of_another_library_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import automesh

    def broken(*_: object, **__: object) -> None:
        raise ValueError("cannot reshape array of size 8 into shape (3,newaxis)")

    monkeypatch.setattr(automesh, "infer_mesh_shape", broken, raising=False)
    case = {**SIZES, "mesh_shape": [-1, 3], "expect": {"raises": "ValueError"}}
    one = Numbered(group="infer_mesh_shape", index=0, case=case, about={})
    assert cases.run_case(one).status == "failed"


def test_a_file_of_another_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.json"
    path.write_text("[]")
    with pytest.raises(SystemExit):
        cases.main([str(path)])
    assert "has no object `groups`" in capsys.readouterr().err
