"""The command as a process: what goes to which stream, jax, pipes, encodings, Ctrl-C."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cases import bad_inputs_run
from tests.support.cases.bad_inputs import GOOD, GOOD_SPACE
from tests.support.made_once import made_once
from tests.support.undecided import until_decided

LIMIT_S = 900  # More than the largest budget, and the start and the end of a search.
SEARCH = "search train.py --target cpu:4 --space space.toml --top 1 --baseline dp:4"
# Runs the command, and then writes down what of jax the process has imported.
WATCHED = """
import atexit, sys
from pathlib import Path

def note():
    names = sorted(name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib"))
    Path(place).write_text(" ".join(names))

place = sys.argv.pop(1)
atexit.register(note)
{first}
from automesh.cli.app import main
main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command that has ended; `jax` are the modules of jax that its process had imported."""

    code: int
    stdout: str
    stderr: str
    jax: str


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    unwanted = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    base = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**base, **(variables or {})}


def call(
    command: str, folder: Path, variables: Mapping[str, str] | None = None, first: str = ""
) -> Done:
    """Runs `automesh COMMAND` in a process of its own."""
    place = folder / "modules.txt"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(first=first), str(place), *shlex.split(command)],
        cwd=folder,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    jax = place.read_text()
    place.unlink()
    return Done(code=done.returncode, stdout=done.stdout, stderr=done.stderr, jax=jax)


def folder_for_search(folder: Path, space: str = GOOD_SPACE) -> Path:
    (folder / "train.py").write_text(GOOD)
    (folder / "space.toml").write_text(space)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    folder: Path
    done: Done

    @property
    def study(self) -> Path:
        (study,) = self.folder.glob("results/train-cpu-4-*")
        return study


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """A small search from its beginning to its end, without a terminal."""

    folder, done = made_once(tmp_path_factory, "searched", search_in)
    mine = tmp_path_factory.mktemp("searched") / "copy"  # Its tests go on with the search.
    return Searched(folder=Path(shutil.copytree(folder / "last", mine)), done=Done(**done))


def search_in(folder: Path) -> dict[str, Any]:
    minutes = itertools.chain((1,), itertools.repeat(5))  # More where others have the cores.
    place = folder / "last"

    def search() -> Done:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return call(f"{SEARCH} --budget {next(minutes)}m", folder_for_search(place))

    found = until_decided(search, lambda one: one.stderr)
    assert found.code == 0, found.stderr
    return asdict(found)


@pytest.mark.parametrize(
    "command", ["--help", "--version", "search --help", "show --help", "doctor --help"]
)
def test_help_does_without_jax(command: str, tmp_path: Path) -> None:
    done = call(command, tmp_path)
    assert (done.code, done.stderr, done.jax) == (0, "", "")
    assert done.stdout


def test_an_import_of_jax_would_be_noticed(tmp_path: Path) -> None:
    assert "jax" in call("--version", tmp_path, first="import jax").jax.split()


def test_a_dry_run_does_without_jax_and_leaves_its_estimates(tmp_path: Path) -> None:
    folder = folder_for_search(tmp_path)
    before = bad_inputs_run.contents(folder)
    done = call(f"{SEARCH} --dry-run --json", folder)
    assert (done.code, done.jax) == (0, "")
    result = json.loads(done.stdout)
    assert result["funnel"]["legal"] == 3
    # What the next command is, and what it finds.
    assert "--dry-run" not in result["command"]
    study = folder / result["results_dir"]
    assert len((study / "estimates.csv").read_text().splitlines()) == 1 + 3
    assert (study / "terms").is_dir()
    # The user's own files are as they were, and no rule is written.
    after = bad_inputs_run.contents(folder)
    assert {name: after[name] for name in before} == before
    assert not (folder / "mesh_rules.toml").exists()
    shown = call("show --json", folder)
    assert (shown.code, shown.jax) == (0, "")
    assert json.loads(shown.stdout)["funnel"]["estimated"] == 3


def test_doctor_looks_at_devices_without_jax(tmp_path: Path) -> None:
    text = call("doctor --target cpu:4", tmp_path)
    assert (text.code, text.stderr, text.jax) == (0, "", "")
    assert max(map(len, text.stdout.splitlines())) <= 80
    assert "4 x cpu (cpu)" in text.stdout
    findings = json.loads(call("doctor --target cpu:4 --json", tmp_path).stdout)
    assert {"level", "about", "detail", "hint"} == set(findings[0])


@pytest.mark.slow
class TestAWholeSearch:
    def test_the_parent_does_without_jax(self, searched: Searched) -> None:
        assert searched.done.jax == ""

    def test_stdout_has_the_table_and_nothing_else(self, searched: Searched) -> None:
        lines = searched.done.stdout.splitlines()
        assert lines[0] == "train on cpu-4 (4 x cpu)"
        assert lines[2].split()[:3] == ["mesh", "step", "time"]
        assert any(line.startswith(("best      ", "keep      ")) for line in lines)
        assert max(map(len, lines)) <= 80
        assert "\x1b" not in searched.done.stdout

    def test_stderr_has_the_progress_in_lines(self, searched: Searched) -> None:
        lines = searched.done.stderr.splitlines()
        assert re.fullmatch(r"\.\.\. looking at .*train\.py, \d+ s elapsed", lines[0])
        doing = [line for line in lines if line.startswith("... ")]
        assert all(line.endswith(" elapsed") for line in doing)
        # Who is first so far is told while the estimates are made.
        told = [line for line in lines if line.startswith(("first ranked: ", "now first: "))]
        assert told and told[0].startswith("first ranked: ")
        # On a busy machine a note says that the start of a process takes most of the budget.
        noted = [line for line in lines if line.startswith("note: ")]
        assert all("a confirmed rule needs about" in line for line in noted)
        lines = [line for line in lines if line not in (*doing, *told, *noted)]
        assert lines[0] == "enumerate 3/3, 3 legal"
        phases = {"enumerate", "estimate", "compile", "measure", "confirm"}
        assert {line.split()[0] for line in lines} == phases
        assert "\x1b" not in searched.done.stderr
        assert "\r" not in searched.done.stderr

    def test_the_rule_is_written(self, searched: Searched) -> None:
        text = (searched.folder / "mesh_rules.toml").read_text()
        assert 'match = "cpu-4"' in text
        assert 'kind = "measured"' in text

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_show_fits_the_terminal(self, searched: Searched, width: int) -> None:
        shown = bad_inputs_run.run("show --top 1", searched.folder, {"COLUMNS": str(width)})
        assert (shown.code, shown.stderr) == (0, "")
        assert max(map(len, shown.stdout.splitlines())) <= width
        folder = bad_inputs_run.run(
            f"show {searched.study} --top 1", searched.folder, {"COLUMNS": str(width)}
        )
        assert folder.stdout == shown.stdout
        if width == 80:
            assert shown.stdout.splitlines()[:6] == searched.done.stdout.splitlines()[:6]

    def test_show_does_without_jax(self, searched: Searched) -> None:
        done = call("show --json", searched.folder)
        assert (done.code, done.stderr, done.jax) == (0, "", "")
        result = json.loads(done.stdout)
        assert result["schema"] == 1
        assert result["best"]["evidence"] == "measured"
        assert result["baseline"] == "dp:4"
        assert result["candidates"][0]["plan"] == result["best"]["plan"]
        assert set(result["candidates"][0]) == {
            *("plan", "mesh", "axes", "mapping", "knobs", "compiler_options", "evidence"),
            *("is_baseline", "standing", "outcome", "compiled", "estimated", "bound_by"),
            *("peak_bytes", "reason", "partly_counted"),
        }
        assert set(result) == {
            *("schema", "workload", "target", "device", "device_count", "axes", "made", "versions"),
            *("interrupted", "best", "baseline", "candidates", "funnel", "reference"),
            *(
                "verifications",
                "stop_reason",
                "notices",
                "details",
                "made_up",
                "tokens_per_step",
                "study",
            ),
            *("results_dir", "rules_path", "command", "speeds", "certificate", "belief"),
            *("device_memory_bytes", "reserve_bytes", "template", "best_command", "split"),
            *("not_searched", "findings", "data_by_mesh"),
        }

    @pytest.mark.long
    def test_json_alone_is_on_stdout_of_a_resumed_search(self, searched: Searched) -> None:
        before = searched.study / "study.db"
        trials = states(before)
        done = call(f"{SEARCH} --budget 60s --json", searched.folder)
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["best"]["evidence"] == "measured"
        assert states(before)["compile"] == trials["compile"]

    def test_show_leaves_the_study_as_it_is(self, searched: Searched) -> None:
        trials = states(searched.study / "study.db")
        storage = f"--storage {searched.study}/study.db"
        for place in (searched.study, f"{searched.study} {storage}", storage):
            assert bad_inputs_run.run(f"show {place}", searched.folder).code == 0
        assert states(searched.study / "study.db") == trials
        # A study that moved is not taken for a new one.
        moved = searched.folder / "moved"
        moved.mkdir(exist_ok=True)
        (moved / "study.db").write_bytes((searched.study / "study.db").read_bytes())
        shown = bad_inputs_run.run("show moved", searched.folder)
        assert shown.code == 2
        assert shown.stderr == (
            "error: there is no study `moved` in TMP/moved/study.db\n"
            "hint: run its search first; the studies there are: `train-cpu-4-HASH`\n"
        )

    def test_a_terminal_that_has_only_ascii(self, searched: Searched) -> None:
        done = call("show", searched.folder, {"PYTHONIOENCODING": "ascii"})
        assert (done.code, done.stderr) == (0, "")
        assert done.stdout.isascii()
        assert "?" not in done.stdout
        wide = call("show", searched.folder, {"PYTHONIOENCODING": "utf-8"}).stdout
        assert not wide.isascii()
        widths = [[len(line) for line in text.splitlines()] for text in (done.stdout, wide)]
        assert widths[0] == widths[1]

    @pytest.mark.parametrize(
        ("variables", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
    )
    def test_colour_on_a_terminal(
        self, searched: Searched, variables: dict[str, str], colour: bool
    ) -> None:
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "automesh", "show"],
                cwd=searched.folder,
                env=environment({"TERM": "xterm", **variables}),
                stdout=theirs,
                stderr=subprocess.PIPE,
                timeout=LIMIT_S,
            )
            os.close(theirs)
            text = os.read(ours, 1 << 16).decode()
        finally:
            os.close(ours)
        assert (done.returncode, done.stderr) == (0, b"")
        assert ("\x1b[" in text) is colour

    @pytest.mark.parametrize("command", ["show", "show --json", "--help", "--version"])
    def test_a_reader_that_goes_away(self, searched: Searched, command: str) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "automesh", *command.split()],
            cwd=searched.folder,
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_a_full_disk_and_no_stream_at_all(self, searched: Searched) -> None:
        shell = f"{shlex.quote(sys.executable)} -m automesh show"
        results = [
            subprocess.run(
                ["bash", "-c", f"{shell} {redirection}"],
                cwd=searched.folder,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            for redirection in ("> /dev/full", ">&-")
        ]
        assert [one.returncode for one in results] == [2, 2]
        assert [one.stderr.split("\n")[0] for one in results] == [
            "error: stdout cannot be written: no space left on device",
            "error: stdout is closed: what was to be printed there is lost",
        ]


def states(database: Path) -> dict[str, Counter[str]]:
    """How many trials are in which state, per rung; empty before there is a study."""
    try:
        uri = f"file:{database}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
            rows = connection.execute(
                "SELECT study_name, state FROM trials JOIN studies USING (study_id)"
            ).fetchall()
    except sqlite3.OperationalError:
        return {}
    found: dict[str, Counter[str]] = {}
    for name, state in rows:
        found.setdefault(name.rpartition("/")[2], Counter())[state] += 1
    return found


def started(command: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "automesh", *shlex.split(command)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def compiled(folder: Path) -> int:
    databases = list(folder.glob("results/*/study.db"))
    return states(databases[0]).get("compile", Counter())["COMPLETE"] if databases else 0


def stop(process: subprocess.Popen[str], by: signal.Signals = signal.SIGINT) -> tuple[str, str]:
    """Ctrl-C or SIGTERM, and what it must do: a quick end that leaves no process."""
    parent = psutil.Process(process.pid)
    below = parent.children(recursive=True)
    assert below
    began = time.monotonic()
    process.send_signal(by)
    out, err = process.communicate(timeout=300)
    took_s = time.monotonic() - began
    assert not psutil.wait_procs(below, timeout=60)[1]
    assert process.returncode == 128 + by, err
    # Quiet machines need a second; it waits for nobody, whose bound would be a minute.
    assert took_s < 20.0
    return out, err


@pytest.mark.slow
def test_sigterm_ends_like_ctrl_c_with_a_table_and_how_to_go_on(tmp_path: Path) -> None:
    """As a cluster's scheduler ends a job; before, nothing was printed."""
    folder = folder_for_search(tmp_path, GOOD_SPACE + "[knobs]\nwidth = [8, 16, 24, 32]\n")
    process = started(f"{SEARCH} --budget 60s --new", folder)
    deadline = time.monotonic() + 300
    while compiled(folder) < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out, err = stop(process, signal.SIGTERM)
    assert "train on cpu-4 (4 x cpu), interrupted" in out
    assert "stopped   interrupted" in out
    # How to go on, without what would begin anew.
    assert " ".join(out.split()).endswith(f"next automesh {SEARCH} --budget 60s")
    assert err.rstrip().endswith(f"automesh {SEARCH} --budget 60s")


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_while_compiling_and_then_the_same_command(tmp_path: Path) -> None:
    knobs = f"[knobs]\nwidth = {[8 * n for n in range(1, 13)]}\n"
    folder = folder_for_search(tmp_path, GOOD_SPACE + knobs)
    process = started(f"{SEARCH} --budget 60s", folder)
    deadline = time.monotonic() + 300
    while compiled(folder) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out, err = stop(process)
    assert "train on cpu-4 (4 x cpu), interrupted" in out
    assert "stopped   interrupted" in out
    assert "predicted from the compiled program" in out
    assert err.endswith(
        "error: interrupted; what is finished is kept\n"
        f"hint: the same command goes on: automesh {SEARCH} --budget 60s\n"
    )
    assert not (folder / "mesh_rules.toml").exists()

    (database,) = folder.glob("results/*/study.db")
    before = states(database)["compile"]
    assert before["RUNNING"] == 0
    done = until_decided(
        lambda: call(f"{SEARCH} --budget 60s --json", folder), lambda one: one.stderr
    )
    assert done.code == 0, done.stderr
    after = states(database)["compile"]
    assert after["COMPLETE"] > before["COMPLETE"]
    plans = [one["plan"] for one in json.loads(done.stdout)["candidates"]]
    assert len(plans) == len(set(plans))
    assert after["COMPLETE"] == len(plans)


@pytest.mark.slow
def test_ctrl_c_while_the_script_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    process = started("search train.py --target cpu:4", tmp_path)
    deadline = time.monotonic() + 300
    while not any("child" in str(p.cmdline()) for p in psutil.Process(process.pid).children(True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out, err = stop(process)
    assert out == ""
    assert bad_inputs_run.normalised(err, tmp_path) == (
        "error: interrupted; what is finished is kept\n"
        "hint: the same command goes on: automesh search train.py --target cpu:4\n"
    )
