"""A script that fails under automesh is run by itself: whether it goes past the line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from automesh.program.capture.world.by_itself import Verdict, run_by_itself
from automesh.program.nouns import Entry
from automesh.program.script.notebook import cell_name

# Script -> the line at which it failed, and what it does by itself.
SCRIPTS = {
    "one_line": ("assert 1 + 1 == 3, 'no'\nprint('on')", 1, "fails"),
    "several_lines": (
        """\
        count = 16
        assert (
            4 * 2 == count
        ), f"there are {count} devices, \\
            and not {4 * 2}"
        print('on')
        """,
        2,
        "fails",
    ),
    "call_over_lines": ("print(\n    1,\n    2,\n)\nprint('on')", 1, "passes"),
    "in_a_function": (
        "def check(n):\n    if (\n        n > 8\n    ):\n        raise ValueError(n)\n\n"
        "check(16)\nprint('on')",
        5,
        "fails",
    ),
    "last_line": ("print('on')", 1, "passes"),
    "made_and_called_later": (
        "check = lambda n: {8: n}[n]\nprint('on')\ncheck(16)\nprint('on')",
        1,
        "fails",
    ),
    "fails_in_its_second_call": (
        "def check(n):\n    return {8: n}[n]\n\nprint([check(n) for n in (8, 16)])\nprint('on')",
        2,
        "fails",
    ),
    "passes_and_another_line_fails": (
        "check = lambda n: {8: n}[n]\ncheck(8)\nraise ValueError",
        1,
        "passes",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_statement_over_several_lines_is_passed_when_it_is_done(
    name: str, tmp_path: Path
) -> None:
    text, line, what = SCRIPTS[name]
    script = tmp_path / f"{name}.py"
    script.write_text(textwrap.dedent(text))
    entry = Entry(kind="script", location=str(script))
    verdict = run_by_itself(entry, str(script), line, limit_s=120)
    assert verdict.what == what


def test_of_a_notebook_nothing_is_run_after_the_cell_that_fails(tmp_path: Path) -> None:
    """Else a long cell after it would use the time up, and nobody knew."""
    path = tmp_path / "train.ipynb"
    sources = ["x = 1\nraise ValueError('no')", "import time\ntime.sleep(100)"]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    path.write_text(json.dumps({"cells": cells}))
    entry = Entry(kind="script", location=str(path))
    verdict = run_by_itself(entry, cell_name(path, 1), 2, limit_s=20)
    assert verdict == Verdict(what="fails", error="ValueError: no")


def test_a_statement_of_a_cell_over_several_lines_is_passed_when_it_is_done(
    tmp_path: Path,
) -> None:
    """Its second line was taken for code below it: what Jupyter refuses as well was said to fail
    "only as automesh runs it"."""
    path = tmp_path / "train.ipynb"
    cell = {"cell_type": "code", "source": "same = int(\n    'no',\n    10,\n)\nprint(same)"}
    path.write_text(json.dumps({"cells": [cell]}))
    entry = Entry(kind="script", location=str(path))
    verdict = run_by_itself(entry, cell_name(path, 1), 1, limit_s=60)
    assert verdict.what == "fails"
    assert "invalid literal" in verdict.error
