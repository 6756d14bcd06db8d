"""Executables are kept where nobody else can put one: what lies there is run."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from automesh.foreign import ownership
from automesh.worker import executables
from automesh.worker.executables import executables_folder, why_others_may_write

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
STRANGER = 65534


def environ(cache: Path) -> Mapping[str, str]:
    return {"AUTOMESH_CACHE": str(cache)}


def used(cache: Path, study: Path, said: list[str] | None = None) -> Path:
    """The folder that a search of a study uses, after its end."""
    with executables_folder(study, environ(cache), (said if said is not None else []).append) as it:
        assert it.is_dir()
        return it


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_the_accounts_own_and_none_of_the_results(tmp_path: Path) -> None:
    cache, study, said = tmp_path / "cache", tmp_path / "results" / "train-cpu-8-0123", []
    before = os.umask(0)
    try:
        folder = used(cache, study, said)
    finally:
        os.umask(before)
    assert not folder.is_relative_to(tmp_path / "results")
    assert folder.parent == cache / "executables"
    assert (mode_of(folder.parent), mode_of(folder)) == (0o700, 0o700)
    assert folder.stat().st_uid == os.geteuid()
    assert said == []
    assert used(cache, study) == folder, "the next search starts from it"
    assert used(cache, tmp_path / "others" / study.name) != folder


def test_without_a_variable_it_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with executables_folder(tmp_path / "study", {}, pytest.fail) as folder:
        assert folder.is_relative_to(tmp_path / "automesh" / "executables")


@pytest.mark.parametrize("place", [".", "..", "../.."])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_place_that_others_may_write_is_refused(
    tmp_path: Path, place: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_is_group_of_one", lambda group: False)
    cache = tmp_path / "shared" / "cache"
    (cache / "executables").mkdir(parents=True, mode=0o700)
    (cache / "executables" / place).resolve().chmod(mode)
    said: list[str] = []
    folder = used(cache, tmp_path / "study", said)
    assert not folder.is_relative_to(cache)
    assert not folder.exists(), "of this search alone"
    (why,) = said
    assert "other accounts may write into" in why and "AUTOMESH_CACHE" in why


@needs_root
def test_a_place_that_others_own_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "executables").mkdir(parents=True, mode=0o700)
    os.chown(cache / "executables", STRANGER, STRANGER)
    said: list[str] = []
    assert not used(cache, tmp_path / "study", said).is_relative_to(cache)
    assert "belongs to another account" in said[0]


@needs_root
def test_a_link_to_what_others_own_is_refused(tmp_path: Path) -> None:
    real, cache = tmp_path / "real", tmp_path / "cache"
    real.mkdir(mode=0o700)
    os.chown(real, STRANGER, STRANGER)
    cache.mkdir()
    (cache / "executables").symlink_to(real)
    assert "belongs to another account" in why_others_may_write(cache / "executables")


def test_a_link_in_a_folder_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_is_group_of_one", lambda group: False)
    real, shared = tmp_path / "real", tmp_path / "shared"
    real.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "executables").symlink_to(real)
    assert f"may write into `{shared}`" in why_others_may_write(shared / "executables")
    shared.chmod(0o1777)  # As /tmp: nobody else can remove the link.
    assert why_others_may_write(shared / "executables") == ""


def test_the_group_that_each_account_has_for_itself_is_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o770)
    group = folder.stat().st_gid
    is_mine = ownership._is_group_of_one(group)  # pyright: ignore[reportPrivateUsage]
    assert (why_others_may_write(folder) == "") == is_mine
    assert not ownership._is_group_of_one(2**30)  # pyright: ignore[reportPrivateUsage]


def test_no_cache_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    said: list[str] = []
    used(tmp_path / "cache", tmp_path / "study", said)
    assert "file exists" in said[0] or "not a directory" in said[0]


def test_what_was_used_least_recently_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "EXECUTABLES_BYTES", 250)
    monkeypatch.setattr(executables, "EXECUTABLES_IN_USE_S", 50.0)
    cache, days = tmp_path / "cache", {"old": 300, "older": 400, "running": 10}
    folders = {name: used(cache, tmp_path / name) for name in days}
    for folder in folders.values():
        (folder / "entry-cache").write_bytes(b"x" * 100)
    now_s = folders["old"].stat().st_mtime
    for name, folder in folders.items():
        os.utime(folder, (now_s - days[name], now_s - days[name]))
    used(cache, tmp_path / "new")
    assert {name for name, folder in folders.items() if folder.exists()} == {"old", "running"}
    (folders["running"] / "more-cache").write_bytes(b"x" * 1000)
    os.utime(folders["running"], (now_s - 10, now_s - 10))
    used(cache, tmp_path / "new")
    assert {name for name, folder in folders.items() if folder.exists()} == {"running"}
