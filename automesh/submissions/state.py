"""The state of a search: its studies and rules as one tar, so that others see them, and another
machine goes on with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from automesh import limits
from automesh.errors import AutomeshError
from automesh.reading import open_regular, read_bytes
from automesh.submissions.bundle import BadBundle, check_name

RESULTS, RULES = "results", "mesh_rules.toml"
_DATABASE = "study.db"
# The most important first, in case that not all of it is taken.
_FILES = ("trials.csv", "estimates.csv", "report.html")
_LOGS = "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A packed state.

    Attributes:
      sign: equal for what has not changed.
    """

    data: bytes
    sign: str


def pack_state(job: Path) -> State | None:
    """Packs the studies and rules in the folder of a submission, while its search runs or after it;
    None if there is nothing yet.

    Of what is more than a state may have, logs and tables are left out, the last ones first.

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
    """Names, contents, and whether a state is nothing without it."""
    rules = job / RULES
    if rules.exists():
        yield RULES, read_bytes(rules, limit_bytes=limits.PEOPLE_FILE_BYTES), True
    studies = [one for one in _below(job / RESULTS) if one.is_dir()]
    for study in studies:
        content = _copied(study / _DATABASE)
        if content:
            yield f"{RESULTS}/{study.name}/{_DATABASE}", content, True
    for study in studies:
        paths = [study / name for name in _FILES]
        paths += [one for one in _below(study / _LOGS) if one.is_file()]
        for path in paths:
            with suppress(AutomeshError):
                name = check_name(f"{RESULTS}/{path.relative_to(job / RESULTS).as_posix()}")
                yield name, read_bytes(path, limit_bytes=limits.STATE_BYTES), False


def _below(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(
            one for one in folder.iterdir() if not one.is_symlink() and not one.name.startswith(".")
        )
    return []


def _copied(path: Path) -> bytes:
    """A database as it is at one moment, also while others write it; empty if there is none."""
    try:
        with open_regular(path, follow=False):
            pass
        with tempfile.TemporaryDirectory(prefix="automesh-state-") as folder:
            copy = Path(folder) / _DATABASE
            with (
                closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
                # In one file, without a log beside it.
                target.execute("PRAGMA journal_mode=DELETE")
            return read_bytes(copy, limit_bytes=limits.STATE_BYTES)
    except (AutomeshError, sqlite3.Error):
        return b""


def check_state(files: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the studies in a state.

    Args:
      files: names of its members.

    Raises:
      BadBundle: one of them belongs into no state.
    """
    studies: set[str] = set()
    for name in files:
        parts = name.split("/")
        if name == RULES:
            continue
        if parts[0] != RESULTS or len(parts) < 3:
            raise BadBundle(f"`{name}` is no part of what a search has found")
        studies.add(parts[1])
    return tuple(sorted(studies))


def put_in_place(new: Path, job: Path, old: Path) -> None:
    """Puts the studies and rules of an unpacked state into the folder of a submission; other
    studies there stay.

    Args:
      old: a folder in the same file system, to which goes what was there.

    Raises:
      OSError: it cannot be written.
    """
    studies = new / RESULTS
    (job / RESULTS).mkdir(mode=0o700, exist_ok=True)
    for study in sorted(studies.iterdir()) if studies.exists() else ():
        place = job / RESULTS / study.name
        if place.exists():
            place.rename(old / study.name)
        study.rename(place)
    if (new / RULES).exists():
        (new / RULES).replace(job / RULES)
