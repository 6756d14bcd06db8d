"""A state holds what a search writes, and its databases are looked at before they are opened."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from automesh.tuner.study.identity import submission_in
from automesh.tuner.study.storage import parse_storage
from automesh_service.submissions.bundle import BadBundle, unpack
from automesh_service.submissions.state import (
    MOST_STUDIES,
    check_state,
    check_studies,
    pack_state,
    put_in_place,
)
from tests.support.hot_journal import plant_journal
from tests.support.samples.storage_cases import opened


def tar_of(folder: Path, files: dict[str, bytes | None]) -> Path:
    """A tar of files, and of folders where there is no content."""
    place = folder / "state.tar"
    with tarfile.open(place, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return place


def made(folder: Path) -> Path:
    """The database of a study, with one note."""
    with opened(parse_storage("", folder)) as study:
        study.note("header", "sound")
    return folder / "study.db"


@pytest.mark.parametrize(
    "name",
    [
        "results/s/study.db-journal",
        "results/s/study.db-wal",
        "results/s/study.db-shm",
        "results/s/study.db.flock",
        "results/s/study.db/x",
        "results/s/logs/worker-1.log-journal",
        "results/s/logs/deep/worker-1.log",
        "results/s/logs/.worker.log",
        "results/s/terms/a",
        "results/.s/study.db",
        "results/s t/study.db",
        "results/study.db",
        "mesh_rules.toml/x",
        "search.log",
    ],
)
def test_a_state_has_no_other_names(tmp_path: Path, name: str) -> None:
    """Before, a journal of a study came with it, and deleted files of whoever opened the study."""
    with pytest.raises(BadBundle, match="is no part of what a search has found"):
        check_state(tar_of(tmp_path, {name: b"x"}))


def test_folders_without_files_count(tmp_path: Path) -> None:
    files = dict.fromkeys([f"results/e{number}" for number in range(MOST_STUDIES + 1)])
    with pytest.raises(BadBundle, match="more than 200 studies"):
        check_state(tar_of(tmp_path, {**files}))


def test_who_comes_later_always_has_room(tmp_path: Path) -> None:
    job, old, new = tmp_path / "job", tmp_path / "old", tmp_path / "new"
    for folder in (old, new / "results" / "honest"):
        folder.mkdir(parents=True)
    for number in range(MOST_STUDIES):
        (job / "results" / f"e{number}").mkdir(parents=True)
    put_in_place(new, job, old)
    left = {one.name for one in (job / "results").iterdir()}
    assert len(left) == MOST_STUDIES and "honest" in left


def test_a_packed_state_is_one_that_is_taken(tmp_path: Path) -> None:
    job = tmp_path / "job"
    study = opened(parse_storage("", job / "results" / "s-1"))
    study.note("header", "published")
    study.note("header", "only in the log")
    (job / "results" / "s-1" / "logs").mkdir()
    (job / "results" / "s-1" / "logs" / "worker-1-0001.log").write_text("said")
    (job / "results" / "s-1" / "logs" / "other").write_text("left out")
    (job / "mesh_rules.toml").write_text("schema = 1\n")
    state = pack_state(job)
    assert state is not None
    (tmp_path / "state.tar").write_bytes(state.data)
    assert check_state(tmp_path / "state.tar") == ("s-1",)
    study.close()
    new = tmp_path / "new"
    unpack(tmp_path / "state.tar", new)
    check_studies(new)
    names = sorted(one.relative_to(new).as_posix() for one in new.rglob("*") if one.is_file())
    assert names == [
        "mesh_rules.toml",
        "results/s-1/logs/worker-1-0001.log",
        "results/s-1/study.db",
    ]
    with opened(parse_storage("", new / "results" / "s-1")) as again:
        assert again.noted("header") == "only in the log"


def test_to_pack_a_study_plays_no_journal_back(tmp_path: Path) -> None:
    """Code of a bundle writes into the folder that is packed."""
    job, victim = tmp_path / "job", tmp_path / "victim"
    victim.write_text("precious")
    plant_journal(made(job / "results" / "s-1"), victim)
    assert pack_state(job) is not None
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("sql", [
    "CREATE TABLE zz (x CHECK (abs(x) > 0))",
    "CREATE VIEW vv AS SELECT 1",
    "CREATE INDEX ii ON trials (abs(number))",
])  # fmt: skip
def test_a_database_that_would_run_something_is_not_put_in_place(tmp_path: Path, sql: str) -> None:
    path = made(tmp_path / "results" / "s-1")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
    with pytest.raises(BadBundle, match=r"`results/s-1/study\.db` has the"):
        check_studies(tmp_path)


def test_a_database_needs_no_journal_once_it_is_in_place(tmp_path: Path) -> None:
    path = made(tmp_path / "results" / "s-1")
    with closing(sqlite3.connect(path)) as connection:  # As former versions have packed it.
        connection.execute("PRAGMA journal_mode=DELETE")
    check_studies(tmp_path)
    assert path.read_bytes()[18:20] == b"\x02\x02"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("train-cpu-2-0123456789abcdef-1a2b3c4d", "0123456789abcdef"),
        ("train-cpu-2-1a2b3c4d", ""),
        ("train-0123456789abcdef-1a2b3c4d-x", ""),
        ("0123456789abcdef-1a2b3c4d", ""),
    ],
)
def test_the_number_in_a_name(name: str, number: str) -> None:
    assert submission_in(name) == number
