"""benchmarks/README.md names every benchmark, and each of them says what it takes."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| `python -m benchmarks\.(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
COMMANDS = sorted(
    {path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    | {path.parent.name for path in FOLDER.glob("*/__main__.py")}
)


def test_the_index_names_every_command_once() -> None:
    assert sorted(name for _, name, _ in ROWS) == COMMANDS
    assert all(question.endswith("?") for question, _, _ in ROWS)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", PAGE)
    assert links and [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m` runs it, but in this process, which has imported most of it already."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    if (FOLDER / f"{name}.py").exists():
        # `runpy` warns if the module that it is to run has been imported, as other tests do.
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()
