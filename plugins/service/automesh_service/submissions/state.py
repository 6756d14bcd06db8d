"""The state of a search: its studies and rules as one tar. The service shows them, and another
machine can continue the search from them.

A state comes from another machine, and submitted code has written its files. So a state may only
contain file names that a search writes; above all no journal, log or shared memory of a database. A
database in it is checked before it is moved to the place where SQLite opens it. A database in a
job's folder is packed from a copy (`automesh.foreign.sqlite`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from automesh import limits
from automesh.errors import AutomeshError
from automesh.foreign.sqlite import HEADER_BYTES, as_wal, copied, is_wal
from automesh.reading import open_regular, read_bytes
from automesh.tuner.study.stored.sqlite import check_copy
from automesh_service.submissions.bundle import BadBundle, members_of, shown

RESULTS, RULES = "results", "mesh_rules.toml"
_DATABASE = "study.db"
# The most important first, because the last ones may be left out.
_FILES = ("trials.csv", "estimates.csv", "report.html")
_LOGS = "logs"
_STUDY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@=,-]{0,250}")
_LOG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@=,-]{0,250}\.log")
MOST_STUDIES = 200
"""The most studies of one submission: an order has no more targets than it may have words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A packed state.

    Attributes:
      sign: a hash of the contents; equal while nothing has changed.
    """

    data: bytes
    sign: str


def pack_state(job: Path) -> State | None:
    """Packs the studies and rules in the folder of a submission, while its search runs or after it.
    Returns None if there is nothing yet.

    If they are larger than a state may be, logs and tables are left out, beginning with the last
    ones.

    Raises:
      BadBundle: a study alone is larger than a state may be.
      OSError: the disk is full.
    """
    left = limits.STATE_BYTES
    buffer, sign = io.BytesIO(), hashlib.sha256()
    count = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, is_needed in _contents(job):
            needs = len(content) + 4 * tarfile.BLOCKSIZE
            if needs > left or count >= limits.BUNDLE_MEMBERS:
                if is_needed:
                    raise BadBundle(f"`{name}` is larger than what a service takes")
                continue
            left -= needs
            count += 1
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o600
            tar.addfile(member, io.BytesIO(content))
            sign.update(f"{name}\0{len(content)}\0".encode() + content)
    if not count:
        return None
    data = gzip.compress(buffer.getvalue(), 1)
    if len(data) > limits.BUNDLE_BYTES:
        raise BadBundle("what the search has found is larger than what a service takes")
    return State(data=data, sign=sign.hexdigest())


def _contents(job: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Yields names, contents, and whether a state is useless without this file."""
    rules = job / RULES
    if rules.exists():
        yield RULES, read_bytes(rules, limit_bytes=limits.PEOPLE_FILE_BYTES), True
    studies = [one for one in _below(job / RESULTS) if one.is_dir() and _STUDY.fullmatch(one.name)]
    for study in studies:
        content = _copied(study / _DATABASE)
        if content:
            yield f"{RESULTS}/{study.name}/{_DATABASE}", content, True
    for study in studies:
        paths = [study / name for name in _FILES]
        logs = [one for one in _below(study / _LOGS) if one.is_file()]
        paths += [one for one in logs if _LOG.fullmatch(one.name)]
        for path in paths:
            with suppress(AutomeshError):
                name = f"{RESULTS}/{path.relative_to(job / RESULTS).as_posix()}"
                yield name, read_bytes(path, limit_bytes=limits.STATE_BYTES), False


def _below(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(
            one for one in folder.iterdir() if not one.is_symlink() and not one.name.startswith(".")
        )
    return []


def _copied(path: Path) -> bytes:
    """Returns a consistent copy of a database, even while others write to it; empty if there is
    none."""
    try:
        with tempfile.TemporaryDirectory(prefix="automesh-state-") as folder:
            # While a search writes, the last changes may only be in the write-ahead log.
            copy = copied(
                path, Path(folder), limit_bytes=limits.STATE_BYTES, with_log=True, follow=False
            )
            content = read_bytes(copy, limit_bytes=limits.STATE_BYTES)
            # A database in this mode can be opened for writing without a journal file.
            return as_wal(content) if content else b""
    except (AutomeshError, sqlite3.Error):
        return b""


def check_state(path: Path) -> tuple[str, ...]:
    """Returns the names of the studies in a packed state, including folders without files.

    Raises:
      BadBundle: it is no tar, contains something that no search writes, or has too many studies;
        names the member.
    """
    studies: set[str] = set()
    for name, is_file in members_of(path):
        match name.split("/"), is_file:
            case ([one], True) if one == RULES:
                continue
            case ([one], False) if one == RESULTS:
                continue
            case ([top, study, *rest], _) if top == RESULTS and _STUDY.fullmatch(study):
                if not _is_of_study(rest, is_file=is_file):
                    raise _no_part(name)
                studies.add(study)
            case _:
                raise _no_part(name)
    if len(studies) > MOST_STUDIES:
        raise BadBundle(f"a submission has more than {MOST_STUDIES} studies")
    return tuple(sorted(studies))


def _is_of_study(rest: list[str], *, is_file: bool) -> bool:
    """Whether a search writes a file or a folder of this name into the folder of a study."""
    match rest:
        case []:
            return not is_file
        case [name]:
            return name in (_DATABASE, *_FILES) if is_file else name == _LOGS
        case [folder, name]:
            return is_file and folder == _LOGS and _LOG.fullmatch(name) is not None
        case _:
            return False


def _no_part(name: str) -> BadBundle:
    return BadBundle(f"`{shown(name)}` is no part of what a search has found")


def check_studies(new: Path) -> None:
    """Checks the databases of an unpacked state, before anything opens them at their final place.
    After this none of them needs a journal.

    Raises:
      BadBundle: one is no study's database, or is damaged; names it.
    """
    for path in sorted((new / RESULTS).glob(f"*/{_DATABASE}")):
        with open_regular(path, follow=False) as file:
            header = file.read(HEADER_BYTES)
        if not header:
            continue
        name = path.relative_to(new).as_posix()
        try:
            check_copy(path, f"`{name}`")
        except AutomeshError as error:
            raise BadBundle(error.message) from None
        if not is_wal(header):
            path.write_bytes(as_wal(path.read_bytes()))


def put_in_place(new: Path, job: Path, old: Path) -> None:
    """Moves the studies and rules of an unpacked state into the folder of a submission. Other
    studies there are kept as far as there is room: those that changed longest ago are removed
    first.

    Args:
      old: a folder in the same file system, to which the replaced files are moved.

    Raises:
      OSError: a file cannot be written.
    """
    studies = new / RESULTS
    (job / RESULTS).mkdir(mode=0o700, exist_ok=True)
    ours = sorted(studies.iterdir()) if studies.exists() else []
    names = {one.name for one in ours}
    others = [one for one in (job / RESULTS).iterdir() if one.name not in names]
    others.sort(key=lambda one: one.lstat().st_mtime)
    for other in others[: max(0, len(others) + len(ours) - MOST_STUDIES)]:
        other.rename(old / other.name)
    for study in ours:
        place = job / RESULTS / study.name
        if place.exists():
            place.rename(old / study.name)
        study.rename(place)
    if (new / RULES).exists():
        (new / RULES).replace(job / RULES)
