"""Searches under hardships of their host: stopped processes, low limits, folders that they may not
write. Each ends with one sentence, or with its result; nothing is lost, nothing is left running."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from benchmarks.kill_resume import GO_ON, SCRIPT
from benchmarks.support.finished_trials import finished_trials
from benchmarks.support.search_process import role

_WORDS = [sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:2"]
_STOPPED_S = 3.0
LIMIT_S = 900.0  # Their budgets are three minutes; the rest is for a machine with other work.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def ended_well(code: int, said: str) -> bool:
    """Whether a search ended with a winner; else, on a machine with other work, it must have said
    that it names none, and that the same command goes on."""
    assert code == 0 or (code == 1 and any(f"\nhint: {words}" in said for words in GO_ON)), said
    assert "Traceback" not in said
    return code == 0


def below(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """A worker, its guardian and its deputy, by what they are; of some that are still there."""
    found: dict[str, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):  # One has just ended.
        for one in psutil.Process(process.pid).children(recursive=True):
            name, parent = role(one), one.parent()
            if name == "guardian" and (parent is None or role(parent) != "guardian"):
                name = "deputy"
            found.setdefault(name, one)
    return found


@pytest.mark.long
@pytest.mark.parametrize("who", ["parent", "deputy", "guardian", "worker"])
def test_a_process_that_is_stopped_and_goes_on(folder: Path, who: str) -> None:
    process = subprocess.Popen(
        [*_WORDS, "--budget", "3m", "--top", "2"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (found := below(process)).keys() >= {"deputy", "guardian", "worker"}:
        assert process.poll() is None
        time.sleep(0.05)
    victim = psutil.Process(process.pid) if who == "parent" else found[who]
    victim.send_signal(signal.SIGSTOP)
    time.sleep(_STOPPED_S)
    if victim.is_running():
        victim.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=LIMIT_S)
    if ended_well(process.returncode, err):
        assert "saved" in out
        (rule,) = tomllib.loads((folder / "mesh_rules.toml").read_text())["rule"]
        assert rule["match"] == "cpu-2"
    (database,) = folder.glob("results/*/study.db")
    found = finished_trials(database)
    plans = Counter((rung, one.key) for (rung, _), one in found.items())
    assert set(plans.values()) == {1}
    assert all(one.state == "COMPLETE" for one in found.values())


# Another account


@pytest.fixture
def account() -> Generator[str]:
    """An account of its own, which owns nothing; it may read what this test may."""
    if os.geteuid() or not shutil.which("setpriv") or not shutil.which("useradd"):
        pytest.skip("only root can make an account")
    name = f"amtest{os.getpid() % 100_000}"
    subprocess.run(["useradd", "--no-create-home", name], check=True, capture_output=True)
    try:
        yield name
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)


@pytest.fixture
def open_folder() -> Generator[Path]:
    """A folder that others may enter, as those of pytest may not be."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "train.py").write_text(SCRIPT)
        yield Path(name)


def run_as(
    account: str, folder: Path, *more: str, limit: str = ""
) -> subprocess.CompletedProcess[str]:
    """A search of another account. It may read all files, as Python may lie in a home, but write
    none but its own."""
    caps = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    become = ["setpriv", "--reuid", account, "--regid", account, "--clear-groups", *caps]
    shell = f'{limit or "true"}; exec "$@"'
    home = folder / "home"  # for caches
    home.mkdir(exist_ok=True)
    found = pwd.getpwnam(account)
    os.chown(home, found.pw_uid, found.pw_gid)
    return subprocess.run(
        [*become, "bash", "-c", shell, "x", *_WORDS, "--budget", "10s", *more],
        cwd=folder,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.long
def test_a_folder_that_another_account_may_only_read(open_folder: Path, account: str) -> None:
    mine = subprocess.run(
        [*_WORDS, "--budget", "3m", "--top", "2"],
        cwd=open_folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    ended_well(mine.returncode, mine.stderr)
    before = {one: one.read_bytes() for one in open_folder.rglob("*") if one.is_file()}
    ran = run_as(account, open_folder)
    assert ran.returncode == 2 and ran.stdout == ""
    (error,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert "permission denied" in error or "another account" in error or "others" in error, error
    assert "Traceback" not in ran.stderr
    assert {one: one.read_bytes() for one in before} == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("ulimit -n 64", "`ulimit -n 1024`"),
        ("ulimit -u 3", "`ulimit -u 4096`"),
        ("ulimit -u 1", "`ulimit -u 4096`"),
        ("ulimit -v 500000", "`ulimit -v unlimited`"),
        ("ulimit -v 300000", "`ulimit -v unlimited`"),
    ],
)
def test_limits_that_are_too_low(open_folder: Path, account: str, limit: str, said: str) -> None:
    """Before, the script was to blame."""
    mine = open_folder / "mine"
    mine.mkdir()
    shutil.copy(open_folder / "train.py", mine)
    found = pwd.getpwnam(account)
    os.chown(mine, found.pw_uid, found.pw_gid)
    ran = run_as(account, mine, "--dry-run", limit=limit)
    assert ran.returncode == 2
    assert said in ran.stderr and "Traceback" not in ran.stderr
    assert "find what ends or breaks" not in ran.stderr


@pytest.mark.long
def test_two_searches_on_one_storage_lose_nothing(folder: Path) -> None:
    command = [*_WORDS, "--budget", "3m", "--top", "2", "--storage", "shared.journal"]
    both = [
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [one.communicate(timeout=LIMIT_S) for one in both]
    ended = [ended_well(one.returncode, err) for one, (_, err) in zip(both, said, strict=True)]
    if any(ended):
        assert len(tomllib.loads((folder / "mesh_rules.toml").read_text())["rule"]) == 1
