"""What can be refused without a worker is refused before any is started, and waits for no lock."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from automesh import limits
from automesh.errors import UsageError
from automesh.report.progress import Silent
from automesh.tuner import start
from automesh.tuner.request import read_request
from automesh.tuner.study import backend
from automesh.tuner.study.storage import parse_storage
from automesh.worker.pool import Pool
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "adamw.py"
UNMODIFIED = SCRIPTS / "capture" / "optax_example.py"
AT_ONCE_S = 20.0  # Optuna and SQLAlchemy are imported; the processes of others take the cores.


class WorkerStarted(AssertionError):
    """A search has come so far as to want a worker."""


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise WorkerStarted

    monkeypatch.setattr(Pool, "__init__", refuse)


def searched(subject: object, folder: Path, target: str = "cpu:8", **options: Any) -> str:
    """What the search says for a refusal; it must come soon."""
    given = {"results": folder / "results", "rules": folder / "rules.toml", **options}
    begun = time.monotonic()
    with pytest.raises(UsageError) as error:
        start.start(read_request(subject, given, targets=(target,)), Silent())
    assert time.monotonic() - begun < AT_ONCE_S
    assert error.value.hint
    return error.value.message


def test_what_is_well_comes_to_its_workers(tmp_path: Path) -> None:
    for subject in (SCRIPT, UNMODIFIED):
        options = {"results": tmp_path, "rules": tmp_path / "rules.toml", "baseline": "dp:-1"}
        with pytest.raises(WorkerStarted):
            start.start(read_request(subject, options, targets=("cpu:8",)), Silent())


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("dp", "does not begin with a mesh"),
        ("dp:x", "is not of the form `axis:size`"),
        ("warp:8", "names the axis `warp`"),
        ("dp:3", "8"),
        ("dp:-1,tp:-1", "at most one may be -1"),
        ("dp:8,dp:8", "twice"),
    ],
)
def test_a_wrong_baseline(baseline: str, message: str, tmp_path: Path) -> None:
    assert message in searched(SCRIPT, tmp_path, baseline=baseline)
    if "warp" not in baseline:  # Its axes are known after its first run.
        assert message in searched(UNMODIFIED, tmp_path, baseline=baseline)


def test_of_attached_devices_the_number_is_not_known_yet(tmp_path: Path) -> None:
    assert "names the axis `warp`" in searched(SCRIPT, tmp_path, "local", baseline="warp:-1")
    options = {"results": tmp_path, "rules": tmp_path / "rules.toml", "baseline": "dp:3,tp:-1"}
    with pytest.raises(WorkerStarted):
        start.start(read_request(SCRIPT, options), Silent())


@pytest.mark.parametrize("subject", [SCRIPT, UNMODIFIED])
def test_places_that_cannot_be_written(subject: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in searched(subject, tmp_path, results=tmp_path / "file")
    assert "is a folder" in searched(subject, tmp_path, rules=tmp_path)
    rules = tmp_path / "broken.toml"
    rules.write_text("axes = [")
    assert "broken.toml" in searched(subject, tmp_path, rules=rules)


def test_a_target_without_its_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(target: object) -> None:
        raise UsageError("no compiler for it", hint="install it")

    monkeypatch.setattr(start, "check_compilable", refuse)
    assert searched(UNMODIFIED, tmp_path, "tpu-v5p-16") == "no compiler for it"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("study.db", b"this is no database", "is not a SQLite database"),
        ("study.journal", b"this is no journal\n", "is not an Optuna journal"),
    ],
)
def test_a_storage_that_is_none(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in searched(SCRIPT, tmp_path, storage=str(tmp_path / name))
    assert (tmp_path / name).read_bytes() == content


def test_a_server_that_nobody_runs(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    storage = "postgresql+psycopg://me@127.0.0.1:9/studies"
    assert "cannot be reached" in searched(SCRIPT, tmp_path, storage=storage)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A database that another connection keeps for itself."""
    path = tmp_path / "study.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE studies (study_id INTEGER)")
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    yield path
    connection.close()


def test_a_locked_database_is_said_to_be_locked(
    locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, after a minute and a worker's work: `is damaged: database is locked`."""
    monkeypatch.setattr(limits, "LOOK_S", 0.2)
    message = searched(SCRIPT, tmp_path, storage=str(locked))
    assert message.endswith(f"storage {locked} locked for 0 s")
    assert "damaged" not in message


def test_a_lock_that_a_stopped_process_keeps_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOCK_S", 0.2)
    storage = parse_storage(str(tmp_path / "study.db"), tmp_path)
    with FileLock(f"{storage.location}.flock"), pytest.raises(UsageError) as error:
        backend.open_backend(storage)
    assert f"another process has kept the study's storage {storage.text}" in error.value.message


def test_no_lock_keeps_a_search_for_a_minute() -> None:
    """Opening waits for one look and one lock, and no write waits for longer than a lock."""
    assert limits.LOOK_S + limits.LOCK_S < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "warp:8"}, "names the axis `warp`"),
        ({"storage": "study.txt"}, "is not a storage"),
        ({"rules": "."}, "is a folder"),
    ],
)
def test_a_command_looks_at_no_devices_before(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    command = f"{sys.executable} train.py --tp {{tp}}"
    assert message in searched(None, tmp_path, "local", command=command, **options)


def test_the_parent_still_imports_nothing_heavy_for_help() -> None:
    code = "import automesh.tuner.start, sys; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
