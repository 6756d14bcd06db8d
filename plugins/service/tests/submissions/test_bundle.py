"""Bundles: the same bytes for the same files, and nothing but plain files out of anybody's tar."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from automesh import limits
from automesh.errors import UsageError
from automesh_service.submissions.bundle import BadBundle, check, digest_of, pack, unpack
from plugins.service.tests.support.service import tar_of

NAMES = st.lists(
    st.text("abcXYZ09._- ", min_size=1, max_size=8).filter(lambda name: name.strip(". ")),
    min_size=1,
    max_size=3,
)


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = kind
    for key, value in fields.items():
        setattr(found, key, value)
    return found


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    for number, folder in enumerate((tmp_path / "one", tmp_path / "other")):
        (folder / "lib").mkdir(parents=True)
        for name in ("train.py", "lib/model.py") if number else ("lib/model.py", "train.py"):
            (folder / name).write_text(f"# {name}\n")
        os.utime(folder / "train.py", (number, number))
    first, other = pack(tmp_path / "one"), pack(tmp_path / "other")
    assert first == other
    assert first[1].files == ("lib/model.py", "train.py")
    (tmp_path / "one" / "train.py").write_text("other\n")
    assert pack(tmp_path / "one")[1].digest != other[1].digest


def test_links_hidden_folders_and_results_stay_at_home(tmp_path: Path) -> None:
    for name in (".git/config", "results/a/study.db", "__pycache__/x.pyc", "lib/.env", "a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "etc").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mesh_rules.toml").touch()
    (tmp_path / "mine.toml").touch()
    assert pack(tmp_path)[1].files == ("a.py", "mine.toml")
    assert pack(tmp_path, without=tmp_path / "mine.toml")[1].files == ("a.py",)


def test_a_folder_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.bin").touch()
    os.truncate(tmp_path / "data.bin", 2**40)
    with pytest.raises(UsageError, match="more than a bundle may"):
        pack(tmp_path)
    os.truncate(tmp_path / "data.bin", 1)
    (tmp_path / "more").touch()
    monkeypatch.setattr(limits, "BUNDLE_MEMBERS", 1)
    with pytest.raises(UsageError, match="more than a bundle may"):
        pack(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(files=st.dictionaries(NAMES.map("/".join), st.binary(max_size=200), max_size=5))
def test_what_is_packed_is_unpacked(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bundle")
    path = folder / "bundle.tar"
    path.write_bytes(tar_of(files))
    try:
        found = check(path)
    except BadBundle:  # One path is a file and the folder of another.
        return
    unpack(path, folder / "out")
    there = {
        one.relative_to(folder / "out").as_posix(): one.read_bytes()
        for one in (folder / "out").rglob("*")
        if one.is_file()
    }
    assert tuple(sorted(there)) == found.files
    assert sorted(there.values()) == sorted(files.values())


HOSTILE = {
    "absolute": tar_of({"/etc/cron.d/x": b"x"}),
    "dots": tar_of({"a/../../x": b"x"}),
    "only dots": tar_of({"..": b"x"}),
    "nothing": tar_of({".": b""}),
    "link": tar_of({}, member("x", tarfile.SYMTYPE, linkname="/etc/passwd")),
    "link to a folder": tar_of({}, member("x", tarfile.SYMTYPE, linkname="..")),
    "hard link": tar_of({"a": b""}, member("x", tarfile.LNKTYPE, linkname="a")),
    "pipe": tar_of({}, member("x", tarfile.FIFOTYPE)),
    "device": tar_of({}, member("x", tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "sparse": tar_of({}, member("x", tarfile.GNUTYPE_SPARSE)),
    "unknown kind": tar_of({}, member("x", b"Z")),
    "twice": tar_of({"a": b"1"}, member("a")),
    "file and folder": tar_of({"a": b"1", "a/b": b"2"}),
    "folder and file": tar_of({"a/b": b"2", "a": b"1"}),
    "backslash": tar_of({"..\\x": b"x"}),
    "escapes": tar_of({"a\x1b[31m": b"x"}),
    "line end": tar_of({"a\nb": b"x"}),
    "long": tar_of({"a/" * 300 + "x": b"x"}),
    "long part": tar_of({"a" * 300: b"x"}),
    "deep": tar_of({"a/" * 40 + "x": b"x"}),
    "cut": tar_of({"a": bytes(5000)})[:1500],
    "no tar": b"what is this" * 100,
    "zip": b"PK\x03\x04" + bytes(1000),
    "broken gzip": gzip.compress(tar_of({"a": b"x"}))[:-20],
    "no tar in gzip": gzip.compress(b"what is this" * 100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / "bundle.tar"
    path.parent.mkdir()
    path.write_bytes(HOSTILE[name])
    with pytest.raises(BadBundle):
        check(path)
    with pytest.raises(BadBundle):
        unpack(path, tmp_path / "work" / "out")
    assert [one.name for one in (tmp_path / "work").iterdir()] == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "work"]


def test_an_empty_tar_is_an_empty_folder(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    path.write_bytes(tar_of({}))
    assert check(path).files == ()


def test_bombs_are_refused_before_they_unpack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUNDLE_UNPACKED_BYTES", 8 * 2**20)
    path = tmp_path / "bundle.tar"
    # A few kilobytes that would unpack to more than is taken.
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        for _ in range(9):
            file.write(bytes(2**20))
    path.write_bytes(packed.getvalue())
    assert path.stat().st_size < 2**17
    with pytest.raises(BadBundle, match="unpacks to more than"):
        check(path)
    # A member that claims more than there is.
    path.write_bytes(member("x", size=2**40).tobuf())
    with pytest.raises(BadBundle, match="unpacks to more than"):
        check(path)
    # A name of half a gigabyte.
    huge = member("x", tarfile.XHDTYPE, size=2**29).tobuf()
    path.write_bytes(huge + bytes(2048))
    with pytest.raises(BadBundle, match="header"):
        check(path)
    monkeypatch.setattr(limits, "BUNDLE_MEMBERS", 3)
    path.write_bytes(tar_of({str(number): b"" for number in range(4)}))
    with pytest.raises(BadBundle, match="more than 3 members"):
        check(path)


def test_modes_and_owners_of_others_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    first = member("run.sh", mode=0o4777, uid=0, gid=0)
    path.write_bytes(tar_of({"a.py": b""}, first, member("lib", tarfile.DIRTYPE, mode=0o777)))
    assert check(path).digest == digest_of(path)
    unpack(path, tmp_path / "out")
    modes = {one.name: one.stat().st_mode & 0o7777 for one in (tmp_path / "out").iterdir()}
    assert modes == {"a.py": 0o600, "run.sh": 0o700, "lib": 0o700}
    with pytest.raises(OSError):
        unpack(path, tmp_path / "out")
