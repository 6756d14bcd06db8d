"""Mutated bundles, states and databases of studies: each is taken or refused with one sentence,
within its bounds, and no file is made outside of the folder that is meant.

`pytest -m long tests/security/test_fuzz_of_bundles.py` tries 50,000; a few hundred always.
"""

from __future__ import annotations

import gzip
import io
import random
import resource
import shutil
import sqlite3
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from automesh import limits
from automesh.errors import AutomeshError
from automesh.tuner.study.study import open_study, parse_storage
from automesh_service.submissions.bundle import check, unpack
from automesh_service.submissions.state import check_state, check_studies, put_in_place
from plugins.service.tests.support.service import make_measured

FEW, ALL = 100, 50_000
PARTS = 4  # of the long test, for `-n 4`
SECONDS = 2.0
NAME = "train-cpu-2-0123456789abcdef-01234567"
NAMES = (
    *(
        "train.py",
        "a/b.py",
        "../x",
        "/etc/passwd",
        "a/../../x",
        "./a",
        "a//b",
        "",
        ".",
        "..",
        "a/.",
    ),
    *(
        "a\\b",
        "\x1b[31m",
        "a\nb",
        "é" * 200,
        "a" * 300,
        "/".join("a" * 200),
        "con",
        "a:b",
        " ",
        "~x",
    ),
    *("mesh_rules.toml", "results", f"results/{NAME}", f"results/{NAME}/study.db"),
    *(f"results/{NAME}/study.db-journal", f"results/{NAME}/study.db-wal", f"results/{NAME}/logs"),
    *(f"results/{NAME}/logs/worker-1.log", f"results/{NAME}/trials.csv", "results/../x/study.db"),
    *(f"results/{NAME}/report.html", "results/.x/study.db", f"results/{NAME}/terms/a.json"),
)
TYPES = (
    *[tarfile.REGTYPE] * 8, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE,
    tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.AREGTYPE,
    tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"x", b"g", b"V",
)  # fmt: skip
PAX = (
    *("path", "linkpath", "size", "GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.size", "mtime"),
    *("GNU.sparse.name", "GNU.sparse.realsize", "uid", "hdrcharset", "SCHILY.xattr.user.x"),
)
VALUES = ("0", "-1", "1", "99999999999999999999", "../x", "/x", "0,1,2", "nan", "1e9", "BINARY", "")


def header(luck: random.Random, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(luck.choice(NAMES))
    member.type = luck.choice(TYPES)
    member.mode = luck.choice((0o600, 0o777, 0o4755, 0, 2**20))
    member.size = luck.choice((size, size, size, size, 0, size + 1, 10**6, 2**33 - 1))
    if luck.random() < 0.3:
        member.linkname = luck.choice(NAMES)
    if luck.random() < 0.25:
        member.pax_headers = {luck.choice(PAX): luck.choice(VALUES)}
    return member


def a_tar(luck: random.Random, database: bytes) -> bytes:
    """A tar of odd members, some of them sound, with content that may be a mutated database."""
    buffer = io.BytesIO()
    for _ in range(luck.randint(1, 6)):
        content = luck.choice(
            (b"", b"x" * 10, luck.randbytes(600), mutated(luck, database), database)
        )
        member = header(luck, len(content))
        form = luck.choice((tarfile.PAX_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
        try:
            buffer.write(member.tobuf(form))
        except (ValueError, UnicodeError):
            continue
        buffer.write(content + bytes(-len(content) % tarfile.BLOCKSIZE))
    buffer.write(bytes(luck.choice((0, 512, 1024, 10_240))))
    return buffer.getvalue()


def mutated(luck: random.Random, data: bytes) -> bytes:
    """Bytes with a few of them changed, mostly where a header is; or cut, doubled, moved."""
    if not data:
        return luck.randbytes(luck.randint(0, 50))
    changed = bytearray(data)
    for _ in range(luck.choice((1, 1, 2, 5, 30))):
        start = luck.choice((0, luck.randrange(len(changed))))
        where = min(start + luck.randrange(200), len(changed) - 1)
        changed[where] = luck.choice((0, 1, 0x7F, 0x80, 0xFF, luck.randrange(256)))
    match luck.randrange(8):
        case 0:
            return bytes(changed[: luck.randrange(len(changed))])
        case 1:
            return bytes(changed) + luck.randbytes(luck.randrange(2000))
        case _:
            return bytes(changed)


def packed(luck: random.Random, data: bytes) -> bytes:
    """Mostly as it is; else gzipped, sound or not, or a bomb."""
    chance = luck.random()
    if chance < 0.7:
        return data
    if chance < 0.71:
        many = gzip.compress(bytes(2**20), 1)
        return many * luck.choice((2, 300))
    whole = gzip.compress(data, 1)
    return whole if chance < 0.85 else mutated(luck, whole)


def all_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(one): (one.lstat().st_size, one.lstat().st_mtime_ns) for one in folder.rglob("*")}


class Fuzz:
    """Tries one input after another in a folder beside which lies what must stay as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inner = folder, folder / "around" / "inner"
        self.inner.mkdir(parents=True)
        (folder / "around" / "x").write_text("to be kept")
        self.around = {k: v for k, v in all_in(folder / "around").items() if "inner" not in k}
        self.seen: Counter[str] = Counter()
        self.slowest_s = 0.0
        made = make_measured(folder / "good" / NAME)
        with closing(sqlite3.connect(made / "study.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.database = (made / "study.db").read_bytes()

    def refused_or(self, kind: str, act: Callable[[], object]) -> bool:
        began_s = time.thread_time()
        try:
            act()
            self.seen[f"{kind}: taken"] += 1
            return True
        except AutomeshError as error:
            assert error.message and "\n" not in error.message
            self.seen[f"{kind}: refused"] += 1
            return False
        finally:
            took_s = time.thread_time() - began_s
            self.slowest_s = max(self.slowest_s, took_s)
            assert took_s < SECONDS, took_s

    def check_around(self) -> None:
        now = {k: v for k, v in all_in(self.folder / "around").items() if "inner" not in k}
        assert now == self.around

    def clean(self) -> None:
        for one in self.inner.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()

    def archive(self, luck: random.Random) -> None:
        """One tar, as a bundle and as a state."""
        data = a_tar(luck, self.database)
        if luck.random() < 0.3:
            data = mutated(luck, data)
        path = self.inner / "sent.tar"
        path.write_bytes(packed(luck, data))
        place = self.inner / "unpacked"
        if self.refused_or("bundle", lambda: check(path)):
            self.refused_or("unpacked", lambda: unpack(path, place))
        if place.exists():
            found = list(place.rglob("*"))
            assert not any(one.is_symlink() for one in found)
            assert all(
                one.is_dir() or (one.is_file() and one.stat().st_nlink == 1) for one in found
            )
            total = sum(one.stat().st_size for one in found if one.is_file())
            assert total <= limits.BUNDLE_UNPACKED_BYTES
            shutil.rmtree(place)
        if (
            self.refused_or("state", lambda: check_state(path))
            and self.refused_or("unpacked state", lambda: unpack(path, place))
            and self.refused_or("studies", lambda: check_studies(place))
        ):
            job, old = self.inner / "job", self.inner / "old"
            job.mkdir()
            old.mkdir()
            put_in_place(place, job, old)
            top = {one.name for one in job.iterdir()}
            assert top <= {"results", "mesh_rules.toml"}
        self.check_around()
        self.clean()

    def study(self, luck: random.Random) -> None:
        """One mutated database, with a log or a journal beside it, as `show` reads a study."""
        study = self.inner / NAME
        study.mkdir()
        (study / "study.db").write_bytes(mutated(luck, self.database))
        if luck.random() < 0.3:
            name = luck.choice(("study.db-journal", "study.db-wal", "study.db-shm"))
            (study / name).write_bytes(luck.randbytes(luck.randrange(5000)))
        before = all_in(study)

        def read() -> None:
            place = parse_storage("", study)
            with open_study(place, NAME, create=False, in_place=False) as found:
                found.noted("header")
                found.compile.trials()
                found.measure.trials()

        self.refused_or("database", read)
        assert {k: v for k, v in all_in(study).items() if k in before} == before
        self.check_around()
        self.clean()


def fuzz(folder: Path, numbers: range) -> Fuzz:
    tried = Fuzz(folder)
    for number in numbers:
        luck = random.Random(number)
        try:
            # A study takes a hundred times as long to read as a tar.
            (tried.study if number % 20 == 0 else tried.archive)(luck)
        except Exception as error:
            error.add_note(f"input number {number}")
            raise
    return tried


def check_seen(tried: Fuzz) -> None:
    for kind in ("bundle", "state", "database"):
        assert tried.seen[f"{kind}: taken"] and tried.seen[f"{kind}: refused"], tried.seen


def test_a_few_archives_and_databases(tmp_path: Path) -> None:
    check_seen(fuzz(tmp_path, range(FEW)))


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_fifty_thousand_archives_and_databases(tmp_path: Path, part: int) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tried = fuzz(tmp_path, range(part * ALL // PARTS, (part + 1) * ALL // PARTS))
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    print(dict(tried.seen), f"slowest {tried.slowest_s:.2f} s", f"{more / 1024:.0f} MiB more")
    check_seen(tried)
    assert more < 2**19  # KiB
