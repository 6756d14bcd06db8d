"""Mutants: where the code may change, which tests are asked, and what counts as caught."""

from pathlib import Path

import pytest

from benchmarks.mutants.coverage_of_tests import TestsOfLines, _node
from benchmarks.mutants.places import Mutant, draw
from benchmarks.mutants.trial import judge, judge_beside

CODE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from code_under_test import larger\n\ndef test_larger():\n    assert larger(1, 2) == 2\n"


def _mutant(code: str) -> Mutant:
    line = "return a if a > b else b"
    return Mutant(
        file="code_under_test.py", line=2, operator="x", before=line, after="?", code=code
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (CODE.replace(">", "<"), "caught"),
        (CODE.replace(">", ">="), "lives"),
        (CODE.replace("return", "while True: pass\n    return"), "caught"),
        (CODE.replace("def larger", "def greater"), "caught"),
    ],
    ids=["wrong", "the same", "endless", "does not import"],
)
def test_a_mutant_is_caught_by_a_test_that_fails_or_never_ends(
    copy: Path, code: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "while True" in code:  # The others have their usual time, as the machine may be busy.
        monkeypatch.setattr("benchmarks.mutants.trial._START_S", 5.0)
    found = judge(_mutant(code), ["test_it.py::test_larger"], {}, copy, most_s=300.0)
    assert found.outcome == outcome
    assert (copy / "code_under_test.py").read_text() == CODE


def test_a_line_that_no_test_runs_is_not_caught(copy: Path) -> None:
    assert judge(_mutant(CODE), [], {}, copy, most_s=300.0).outcome == "not run"


def test_the_fastest_tests_of_a_line_come_first_and_an_import_has_those_of_its_file() -> None:
    tests = TestsOfLines(
        by_line={"a.py": {1: frozenset(), 2: frozenset({"t::slow", "t::fast"})}},
        by_file={"a.py": frozenset({"t::slow", "t::fast", "t::other"})},
        seconds={"t::slow": 3.0, "t::fast": 0.1, "t::other": 0.2},
    )
    assert tests.of("a.py", 2) == ["t::fast", "t::slow"]
    assert tests.of("a.py", 1) == ["t::fast", "t::other", "t::slow"]
    assert tests.of("b.py", 1) == []


def test_a_test_has_the_name_that_pytest_takes() -> None:
    assert (
        _node("tests.mesh.test_x.TestY", "test_z[a-1]")
        == "tests/mesh/test_x.py::TestY::test_z[a-1]"
    )
    assert _node("tests.mesh.test_x", "test_z") == "tests/mesh/test_x.py::test_z"


def test_annotations_and_decorators_of_classes_do_not_change(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="needs `pip install 'jax-automesh[mutants]'`")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass A:\n"
        "    a: int | None\n\n\ndef f(x: int | str = 3) -> bool | None:\n    return x > 2\n"
    )
    mutants = draw(tmp_path, ["package"], 50, seed=1)
    assert {mutant.before for mutant in mutants} == {
        "def f(x: int | str = 3) -> bool | None:",
        "return x > 2",
    }
    assert all("int | str" in mutant.code and "frozen=True" in mutant.code for mutant in mutants)
    assert [m.after for m in draw(tmp_path, ["package"], 50, seed=1)] == [m.after for m in mutants]


@pytest.mark.slow
def test_a_mutant_that_lived_is_caught_by_a_test_that_was_written_since(copy: Path) -> None:
    (copy / "package" / "cost").mkdir(parents=True)
    (copy / "package" / "cost" / "larger.py").write_text(CODE)
    (copy / "tests" / "cost").mkdir(parents=True)
    mutant = Mutant(
        file="package/cost/larger.py",
        line=2,
        operator="x",
        before="",
        after="",
        code=CODE.replace(">", "<"),
    )
    written = copy / "tests" / "cost" / "test_larger.py"
    for code, outcome in ((TEST.replace("== 2", "> 0"), "lives"), (TEST, "caught")):
        written.write_text(code.replace("code_under_test", "package.cost.larger"))
        assert judge_beside(mutant, {}, copy).outcome == outcome
