"""Configurations that anybody may have written: each is a value or one sentence, within bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from automesh.cli.export import import_
from automesh.errors import UsageError
from automesh.report.export.frameworks import granules_of, import_rules
from automesh_frameworks.exports.yaml_text import yaml_tree

_SIZE = "ici_fsdp_parallelism"


def _bomb(key: str, of: str = "*a6") -> str:
    """Ten lines of aliases that stand for millions of values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)]
    return "\n".join([*lines, f"{key}: {of}", ""])


def _merged() -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 7)]
    return "\n".join([*lines, f"{_SIZE}: 8", ""])


YAML = [
    ("aliases of aliases", _bomb(_SIZE), "aliases included, line"),
    ("aliases in what is merged", _merged(), "aliases included, line"),
    ("a list in itself", f"{_SIZE}: &a [*a]\n", "contains itself, line 1"),
    ("a mapping in itself", "trainer: &a {mesh: *a}\n", "contains itself, line 1"),
    (
        "a chain of aliases",
        "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 99)]),
        "nested more than",
    ),
    ("a deep list", f"{_SIZE}: {'[' * 100_000}", "nested more than"),
    ("a long number of seconds", f"a: 1{':1' * 20_000}\n", "a number of 40,001 characters"),
    ("a fraction that no float holds", f"a: 1{':1' * 500}.5\n", "a number of 1,003 characters"),
    ("a number that Python does not print", f"{_SIZE}: 0x{'f' * 20_000}\n", "a number of 20,002"),
    ("a number of 240 bits", f"{_SIZE}: 0x{'f' * 60}\n", "more than 64 bits"),
    ("no integer", 'a: !!int ""\n', "`` is no int, line 1"),
    ("no float", 'a: !!float ""\n', "`` is no float, line 1"),
    ("no truth", "a: !!bool maybe\n", "`maybe` is no bool, line 1"),
    ("no time", "a: !!timestamp x\n", "`x` is no timestamp, line 1"),
    ("no day", "\na: 2001-99-99\n", "`2001-99-99` is no timestamp, line 2"),
    ("half of a character", f'{_SIZE}: 4\nremat_policy: "\\ud800x"\n', "half of a character"),
    ("rows", f"{_SIZE}: 4\nper_device_batch_size: 1.0e+308\n", "batch has more than"),
    (
        "rows by microbatches",
        f"{_SIZE}: 4\ngradient_accumulation_steps: 999999999999999999\nper_device_batch_size: 4\n",
        "batch has more than",
    ),
]


@pytest.mark.parametrize(("text", "said"), [row[1:] for row in YAML], ids=[row[0] for row in YAML])
def test_yaml(text: str, said: str) -> None:
    for framework in ("maxtext", "levanter", "tunix") if "batch" not in said else ("maxtext",):
        with pytest.raises(UsageError, match=said) as refused:
            import_rules(text, framework, granules=granules_of("tpu-v5p-8"), source=Path("f.yml"))
        assert refused.value.message.startswith("`f.yml`: ")
        assert len(refused.value.message) < 300


PYTHON = [
    ("a number that Python does not print", f"(1, -0x{'f' * 20_000})", "more than 64 bits"),
    ("a deep sum", f"1{'+1' * 3_000}", "nested too deep"),
    ("deep calls", f"f(){'.x()' * 3_000}", "nested too deep"),
    ("calls within calls", f"{'f(' * 150}{')' * 150}", "does not spell out|nested too deep"),
    ("deep signs", f"{'-' * 200_000}1", "nested too deep"),
    ("half of a character", '("\\ud800", 8)', "half of a character"),
]


@pytest.mark.parametrize(
    ("mesh", "said"), [row[1:] for row in PYTHON], ids=[row[0] for row in PYTHON]
)
def test_python(mesh: str, said: str) -> None:
    text = f'mesh_axis_names = ("data", "fsdp")\nmesh_rules = (("tpu-v5p-8", {mesh}),)\n'
    for framework in ("axlearn", "loadax"):
        with pytest.raises(UsageError, match=said) as refused:
            import_rules(text, framework, granules=granules_of("tpu-v5p-8"), source=Path("f.py"))
        assert len(refused.value.message) < 300


def test_aliases_that_people_write() -> None:
    tree = yaml_tree("a: &a {x: 1, t: 1:30}\nb: {<<: *a, y: 2001-01-01}\nc: [*a, *a]\n")
    assert tree["b"]["x"] == 1
    assert tree["a"]["t"] == 90
    assert tree["c"] == [tree["a"], tree["a"]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_nothing_that_it_obeys(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    path = tmp_path / "base.yml"
    path.write_text(f'{_SIZE}: 4\nremat_policy: "red\\x9b31m\\u202e"\n')
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    import_(path, framework="maxtext", target="tpu-v5p-8")
    printed = capsys.readouterr().out
    assert 'remat = "red' in printed
    assert ("\x9b" in printed, "\u202e" in printed) == (not is_terminal, not is_terminal)
