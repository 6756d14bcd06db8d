"""Streams that take everything: what nobody can read costs no result."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from automesh.report.progress import open_progress

# A command that says something in every way in which ours do, writes its rule and prints its table.
COMMAND = """
import logging, os, sys, threading, warnings
from pathlib import Path
from automesh import api
from automesh.cli.guard import guarded, prepare_streams

def search():
    with api.progress_on_stderr() as progress:
        progress.phase("measure", total=2)
        logging.getLogger("library").warning("a line of the log")
        warnings.warn("a warning")
        progress.notice("a notice")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        progress.log("x" * 100_000)
    # A database opens files, which must not get the number of a stream.
    for number in range(3):
        opened = os.open("study.db", os.O_RDWR | os.O_CREAT)
        assert opened > 2
    Path("rule").write_text("dp:2")
    print("the table")
    print("y" * 100_000)
    if how == "interrupt":
        raise KeyboardInterrupt

def interrupted():
    try:
        search()
    except KeyboardInterrupt:
        return 130

how = sys.argv[1]
prepare_streams()
sys.exit(guarded(interrupted, []))
"""


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("redirection", "codes"),
    [
        ("2> /dev/full", "0"),
        ("2>&-", "0"),
        ("2>&1 | true", "0 0"),
        ("2> >(exec 0<&-)", "0"),
        ("> /dev/full", "2"),
        (">&-", "2"),
        ("| true", "0 0"),
        ("> /dev/full 2>&1", "2"),
        ("<&- >&- 2>&-", "2"),
    ],
)
def test_whatever_takes_its_output_a_command_ends_as_it_should(
    tmp_path: Path, redirection: str, codes: str
) -> None:
    """Before, a full disk under stderr ended a search with exit code 1, and without a word."""
    ran = run(tmp_path, redirection)
    assert ran.stdout.endswith(f"codes {codes}\n")
    assert (tmp_path / "rule").read_text() == "dp:2"
    assert (tmp_path / "study.db").read_bytes() == b""
    if not redirection.startswith((">", "|", "<", "2>&1")):
        assert "the table" in ran.stdout
    if redirection == "> /dev/full":
        assert "\nerror: stdout cannot be written: no space left on device\n" in ran.stderr
    if redirection == ">&-":
        assert "\nerror: stdout is closed" in ran.stderr
    assert "BrokenPipe" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2> /dev/full", "> /dev/full", ">&- 2>&-"])
def test_an_interruption_stays_one(tmp_path: Path, redirection: str) -> None:
    ran = run(tmp_path, redirection, how="interrupt")
    assert ran.stdout.endswith("codes 130\n")
    assert ("the same command goes on" in ran.stderr) == ("2" not in redirection)


@pytest.mark.parametrize("option", ["", "-u"])
def test_lines_on_stderr_are_there_at_once(tmp_path: Path, option: str) -> None:
    code = (
        "import sys; from automesh.cli.guard import prepare_streams; prepare_streams()\n"
        "sys.stderr.write('said\\n')\nsys.stdout.write('\u2500')\n"
        "import os; sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, *filter(None, [option]), "-c", code],
        cwd=tmp_path,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"-", b"said\n")


def test_progress_of_a_search_from_python_ends_nothing_either(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("w") as full:
        with open_progress(full) as progress:
            progress.phase("measure", total=2)
            progress.notice("x" * 100_000)
        full.close()
    read_only = tmp_path / "log"
    read_only.touch()
    with read_only.open() as file, open_progress(file) as progress:
        progress.notice("nobody reads it")


def run(folder: Path, redirection: str, how: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(COMMAND)} {how or 'end'}"
    shell = f'{{ {command} {redirection}; }} ; echo "codes ${{PIPESTATUS[*]}}"'
    return subprocess.run(
        ["bash", "-c", shell], cwd=folder, capture_output=True, text=True, timeout=100
    )
