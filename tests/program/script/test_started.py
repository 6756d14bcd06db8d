"""Programs are found as `python -m` and a console script find them, and notebooks are read."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.program.capture.world.starting import code_cells, start
from automesh.program.capture.world.told import forget, told
from automesh.program.nouns import Entry
from automesh.program.script.started import file_of, module_name_of, words_of
from automesh.report.search_command import read_words
from automesh.tuner.request import UNMODIFIED, parse_entry


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pkg" / "deep"
    folder.mkdir(parents=True)
    # It would start jax, and is not imported.
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "train.py").write_text("")
    (folder / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pkg"


def test_a_module_is_found_without_being_imported(package: Path) -> None:
    assert file_of("-m pkg.deep.train") == package / "deep/train.py"
    assert file_of("-m pkg.deep") == package / "deep/__main__.py"
    with pytest.raises(UsageError, match=r"--module: there is no module `pkg\.nothing`"):
        file_of("-m pkg.nothing")
    with pytest.raises(UsageError, match="is not the name of a module"):
        file_of("-m pkg/train.py")
    assert module_name_of(package / "deep/train.py", "pkg") == "pkg.deep.train"
    assert module_name_of(package / "deep/train.py", "other") == ""


def test_a_console_script_is_found_by_its_name() -> None:
    assert file_of("--entry pytest").parts[-3:-1] == ("_pytest", "config")
    with pytest.raises(UsageError, match="no installed package has a console script `pytes`"):
        file_of("--entry pytes")


def test_such_a_program_is_an_entry_of_its_own(package: Path) -> None:
    entry = parse_entry("-m pkg.deep.train", ["--steps", "5"])
    assert (entry.function, entry.start) == (UNMODIFIED, "-m pkg.deep.train")
    assert entry.by_itself == "python -m pkg.deep.train"
    assert words_of("-m pkg.deep.train") == ["-m", "pkg.deep.train"]
    again = read_words(["-m", "pkg.deep.train", "--target", "cpu:4", "--", "--steps", "5"])
    assert again is not None
    assert again.words == [
        *("--module", "pkg.deep.train", "--target", "cpu:4", "--", "--steps", "5")
    ]


def test_a_notebook_is_its_code_cells_without_what_is_for_ipython(tmp_path: Path) -> None:
    cells = [
        ("markdown", "# text"),
        ("code", "%matplotlib inline\n!pip install x\nfiles = !ls\nx = 7 \\\n  % 4\nx?\nprint(x)"),
        ("code", "%%bash\nls"),
        ("code", "%%time\ny = 1"),
    ]
    path = tmp_path / "train.ipynb"
    held = [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in cells]
    path.write_text(json.dumps({"cells": held}))
    first, second, third = (cell.text for cell in code_cells(path))
    assert first.splitlines() == [
        *("pass", "pass", "files = []", "x = 7 \\", "  % 4", "pass", "print(x)"),
    ]
    assert second.strip() == ""
    assert third.splitlines() == ["", "y = 1"]
    assert parse_entry(str(path)).function == UNMODIFIED
    with pytest.raises(UsageError, match="names a function of a notebook"):
        parse_entry(f"{path}:build")
    path.write_text("{}")
    with pytest.raises(UsageError, match="is no notebook that can be read"):
        code_cells(path)


def test_after_a_cell_that_fails_the_next_ones_are_run(tmp_path: Path) -> None:
    """Before, the first error ended the run, though people go on with the next cell."""
    path = tmp_path / "train.ipynb"
    tag = {"tags": ["raises-exception"]}
    saved = [{"output_type": "error", "ename": "KeyError"}]
    cells = [
        {"source": "import sys\nsys.reached = []"},
        {"source": "raise ValueError('shapes differ')", "metadata": tag},
        {"source": "{}['no']", "outputs": saved},
        {"source": "sys.reached.append('trained')"},
        {"source": "1 +"},
        {"source": "missing(3)"},
        {"source": "sys.reached.append('the end')"},
    ]

    def run(*chosen: dict[str, Any], **options: Any) -> list[str]:
        held = [{"cell_type": "code", "metadata": {}, **cell} for cell in chosen]
        path.write_text(json.dumps({"cells": held}))
        forget()
        start(Entry(kind="script", location=str(path), function="step"), **options)
        return vars(sys)["reached"]

    before = list(sys.path), list(sys.argv)
    try:
        assert run(*cells[:4]) == ["trained"]
        assert told()[0] == (
            "cell 2 of the notebook fails, as it is marked to (ValueError: shapes differ); the "
            "next ones were run all the same, as Jupyter does"
        )
        with pytest.raises(SyntaxError):
            run(*cells)
        assert getattr(sys, "reached") == ["trained", "the end"]  # noqa: B009
        assert "cell 6 of the notebook fails (NameError: name 'missing'" in told()[3]
        with pytest.raises(KeyError):
            run(*cells, ends=lambda error: isinstance(error, KeyError))
        assert getattr(sys, "reached") == []  # noqa: B009
    finally:
        sys.path[:], sys.argv[:] = before
        delattr(sys, "reached")
        forget()


def test_only_a_notebook_finds_the_stand_in_for_ipython(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, every library found it, too, and asked it for what it has not: `No module named
    'IPython.core'`."""
    library = tmp_path / "site-packages" / "shows_in_ipython.py"
    library.parent.mkdir()
    library.write_text(
        "try:\n    import IPython\nexcept ImportError:\n    found = None\n"
        "else:\n    import IPython.core\n    found = IPython"
    )
    monkeypatch.syspath_prepend(str(library.parent))
    path = tmp_path / "train.ipynb"
    text = (
        "import sys\nimport IPython\nimport IPython.display as shown\nimport shows_in_ipython\n"
        "shown.clear_output()\nsys.reached = shows_in_ipython.found"
    )
    cell = {"cell_type": "code", "metadata": {}, "source": text}
    path.write_text(json.dumps({"cells": [cell]}))
    before = list(sys.path), list(sys.argv), builtins.__import__
    try:
        start(Entry(kind="script", location=str(path), function="step"))
        assert vars(sys)["reached"] is None
        assert builtins.__import__ is before[2]
        assert told() == ()
    finally:
        sys.path[:], sys.argv[:] = before[:2]
        delattr(sys, "reached")
        forget()


def test_a_notebook_finds_what_jupyter_always_has(tmp_path: Path) -> None:
    """Before, a cell that imports what shows its results failed where IPython is not installed, and
    so did one that awaits something."""
    path = tmp_path / "train.ipynb"
    cells = [
        "import sys\nfrom IPython.display import HTML, clear_output, display",
        # Libraries that are told of IPython want more of it.
        "assert 'IPython' not in sys.modules\nimport IPython.display as shown\nshown.HTML('')",
        "clear_output(wait=True)\nshell = get_ipython()",
        "import asyncio\nsys.reached = await asyncio.sleep(0, 'awaited')",
    ]
    held = [{"cell_type": "code", "metadata": {}, "source": text} for text in cells]
    path.write_text(json.dumps({"cells": held}))
    before = list(sys.path), list(sys.argv)
    try:
        for _ in range(2):
            forget()
            start(Entry(kind="script", location=str(path), function="step"))
            assert told() == ()
        assert vars(sys)["reached"] == "awaited"
    finally:
        sys.path[:], sys.argv[:] = before
        delattr(sys, "reached")
        forget()
