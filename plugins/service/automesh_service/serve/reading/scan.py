"""Lists the studies, and has each of them read; runs in the process that reads studies.

Studies lie in folders of results, each with a database of its own, or all in one storage. Each is
read once, and again when it has changed: its files show that, or counts in the storage, which cost
two queries for all studies. This process itself does not read studies. Other processes do, each
within a bound of time, so that a study that takes for ever does not block the others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automesh.jsonio import read_json
from automesh.tuner.study.backend import Backend, open_backend
from automesh.tuner.study.identity import submission_in
from automesh.tuner.study.storage import Storage, parse_storage
from automesh_service.serve.reading.messages import Message, to_message, unread
from automesh_service.serve.reading.read import Found, unreadable
from automesh_service.serve.reading.summary import KnownStudy, StudySummary

LOOK_S = 10.0
"""Seconds for the studies that one look reads; then the studies are listed again."""
SLOW_S = 2.0
"""Seconds that hardly any study takes to be read. A slower study is read after the others."""
QUICK_S = 5.0
"""Seconds for reading a study in the normal lanes. After that the reading is ended, and the study
is read again in the lane of the slow ones, where it blocks no others."""
READ_S = 60.0
"""Seconds for reading a study there: the locks of a study alone may take 30 s."""
AGAIN_S = 300.0
"""Seconds before an unreadable study is read again, although it has not changed."""
STUCK_AGAIN_S = 600.0
"""Seconds before a study is read again whose reading failed twice in a row, by its bound or because
its process ended; also if the study has changed. Doubled after each further failure."""
LONGEST_S = 6 * 3600.0
"""The longest pause before a study is read again whose reading failed, in seconds."""
_FAILURES = 2
_TICK_S = 0.5
_LOG = logging.getLogger("automesh.serve")
_MOST_NEW = 1000
"""New studies in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedStudy:
    """The data of this process about a study that the server knows.

    Attributes:
      stamp: the stamp when the study was read; empty if it was not read yet.
      is_running: whether its search was running; such a study may change without a change of its
        stamp, because the process may have ended.
      is_unreadable: whether it could not be read; its storage may only have been down for a moment.
      is_slow: whether it is read in the lane of the slow ones, where it blocks no others.
      failures: how often in a row its reading was ended by the bound, or its process has ended.
      read_s: when it was read, by the monotonic clock.
      took_s: how long the reading took.
    """

    stamp: str = ""
    is_running: bool = False
    is_unreadable: bool = False
    is_slow: bool = False
    failures: int = 0
    read_s: float = -math.inf
    took_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether it is read again although it has not changed."""
        return self.is_unreadable and now_s - self.read_s >= AGAIN_S

    def is_stuck(self, now_s: float) -> bool:
        """Whether it is not read for a while, because its reading would fail as it did the last
        times."""
        if self.failures < _FAILURES:
            return False
        rest_s = min(LONGEST_S, STUCK_AGAIN_S * 2.0 ** min(self.failures - _FAILURES, 30))
        return now_s - self.read_s < rest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A finished reading.

    Attributes:
      said: the message about the study; None if there was no answer.
      reason: why there was no answer.
    """

    name: str
    took_s: float
    said: Message | None = None
    reason: str = ""


class Readings(Protocol):
    """The interface of what reads studies: `automesh_service.serve.reading.lanes.Lanes`."""

    def has_room(self) -> bool:
        """Whether the reading of a study would begin at once."""
        ...

    def begin(self, name: str, found: Found, *, is_slow: bool, failures: int) -> None:
        """Has a study read. The reading begins at once; that of a slow study begins when other slow
        ones are done, those with the fewest failures first."""
        ...

    def ended(self, limit_s: float) -> Reading | None:
        """Waits for the next reading that ends; returns None if none ends within `limit_s`."""
        ...


class Scan:
    """Lists and reads the studies in several folders of results, and in a storage.

    Args:
      storage: as for `--storage` of the searches; empty for SQLite in each study's folder.
      pause_s: seconds before a changed study is read again: while a search runs its study changes
        all the time, and reading must not disturb its measurements.
      seen: what the server already knows of each study.
      readings: reads the studies.
    """

    def __init__(
        self,
        storage: str,
        *,
        pause_s: float,
        seen: Mapping[str, RememberedStudy],
        readings: Readings,
    ) -> None:
        self._storage = storage
        self._pause_s = pause_s
        self._place: Storage | None = parse_storage(storage, Path()) if storage else None
        self._backend: Backend | None = None
        self._sign: tuple[object, ...] | None = None
        self._changes: Mapping[str, tuple[tuple[object, ...], float]] = {}
        self._seen: dict[str, RememberedStudy] = dict(seen)
        self._readings = readings
        self._at_work: dict[str, Found] = {}

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def look(self, roots: Sequence[Path], *, most: int) -> Iterator[Message]:
        """Lists the studies, and reads up to `most` of those that have changed. Slow ones are read
        meanwhile; a later look reports them.

        Yields:
          Messages: one or more with the new studies, the last of which also has the removed ones;
          one for each study that was read; at the end one that says whether changed studies are
          still unread.

        Raises:
          UsageError: the storage cannot be used.
        """
        began_s = time.monotonic()
        there = self._there(roots)
        new = [name for name in there if name not in self._seen]
        gone = [name for name in self._seen if name not in there]
        for name in gone:
            del self._seen[name]
        self._seen |= dict.fromkeys(new, RememberedStudy())
        said = [to_message(_unread(name, there[name])) for name in new]
        while len(said) > _MOST_NEW:  # The size of a message is bounded.
            yield {"new": said[:_MOST_NEW]}
            del said[:_MOST_NEW]
        yield {"new": said, "gone": gone}
        stale = self._stale(there, began_s)
        for name in stale:
            if self._seen[name].is_slow:
                self._begin(name, there[name])
        quick = deque(name for name in stale if not self._seen[name].is_slow)
        left = max(0, len(quick) - most)
        while True:
            is_late = time.monotonic() - began_s > LOOK_S
            while len(quick) > left and not is_late and self._readings.has_room():
                name = quick.popleft()
                self._begin(name, there[name])
            is_at_work = any(not self._seen[one].is_slow for one in self._at_work if one in there)
            ended = self._readings.ended(_TICK_S if is_at_work and not is_late else 0.0)
            if ended is not None:
                yield from self._note(ended)
            elif is_late or not is_at_work:
                break
        yield {"is_behind": bool(quick)}

    def _stale(self, there: Mapping[str, Found], now_s: float) -> list[str]:
        """Returns the studies to read. First come those that were read quickly before, the one that
        changed last first; then those that were never read, from each folder in turn: so a user who
        fills a folder with studies that take for ever delays the studies of each other folder only
        once."""
        stale = [
            name
            for name, one in self._seen.items()
            if name not in self._at_work
            and not one.is_stuck(now_s)
            and now_s - one.read_s >= self._pause_s
            and (one.stamp != there[name].stamp or one.is_running or one.is_due(now_s))
        ]
        stale.sort(key=lambda name: -there[name].changed_s)
        turns: Counter[Path] = Counter()
        order: dict[str, tuple[bool, bool, int]] = {}
        for name in stale:
            one, root = self._seen[name], there[name].folder.parent
            is_fresh = not one.stamp
            turns[root] += is_fresh
            order[name] = (one.took_s > SLOW_S, is_fresh, turns[root] if is_fresh else 0)
        return sorted(stale, key=lambda name: order[name])

    def _begin(self, name: str, found: Found) -> None:
        one = self._seen[name]
        self._at_work[name] = found
        self._readings.begin(name, found, is_slow=one.is_slow, failures=one.failures)

    def _note(self, ended: Reading) -> Iterator[Message]:
        """Records a finished reading, and yields the message about its study."""
        found, former = self._at_work.pop(ended.name, None), self._seen.get(ended.name)
        if found is None or former is None:  # The study was removed meanwhile.
            return
        if ended.said is not None:
            state = read_json(ended.said["text"], StudySummary).state
            self._seen[ended.name] = RememberedStudy(
                stamp=found.stamp,
                is_running=state == "running",
                is_unreadable=state == "unreadable",
                is_slow=ended.took_s > QUICK_S,
                read_s=time.monotonic(),
                took_s=ended.took_s,
            )
            yield {"study": ended.said}
            return
        failures = former.failures + 1
        now = replace(former, is_slow=True, failures=failures, took_s=ended.took_s)
        self._seen[ended.name] = now
        if failures < _FAILURES:  # The cause may have been a busy machine, or a kill.
            self._begin(ended.name, found)
            return
        self._seen[ended.name] = replace(
            now, stamp=found.stamp, is_unreadable=True, is_running=False, read_s=time.monotonic()
        )
        _LOG.warning("the study `%s` is not read for a while: %s", ended.name, ended.reason)
        yield {"study": to_message(unreadable(ended.name, found, ended.reason))}

    def _there(self, roots: Sequence[Path]) -> dict[str, Found]:
        """Returns the studies that exist. If one is in two folders, the first counts."""
        found: dict[str, Found] = {}
        # In a service with a storage only agents keep studies in folders, namely in those of
        # submissions.
        for root in roots if self._place is None else roots[1:]:
            for name, one in _in_folders(root):
                # The code of one submission may make folders, but not pretend to be a study of
                # another one.
                if root is roots[0] or submission_in(name) in ("", root.parent.name):
                    found.setdefault(name, one)
        if self._place is None:
            return found
        changes = self._changes_in(self._place)
        folders = {name: root for root in reversed(roots) for name in _names_in(root)}
        first = next(iter(roots), Path())
        for name, (stamp, changed_s) in changes.items():
            folder = folders.get(name, first) / name
            found[name] = Found(
                folder=folder, storage=self._storage, stamp=repr(stamp), changed_s=changed_s
            )
        return found

    def _changes_in(self, place: Storage) -> Mapping[str, tuple[tuple[object, ...], float]]:
        # A file of SQLite is read from a copy, which is renewed when the file has changed.
        sign = _sign_of(place.location) if place.kind == "sqlite" else None
        if sign is not None and sign == self._sign:
            return self._changes
        if sign is not None:
            self.close()
        if self._backend is None:
            self._backend = open_backend(place, is_read_only=True, in_place=False)
        with self._backend.explained():
            self._changes = self._backend.changes()
        self._sign = sign
        return self._changes


def _unread(name: str, found: Found) -> KnownStudy:
    return unread(name, folder=found.folder, storage=found.storage, changed_s=found.changed_s)


def _names_in(root: Path) -> list[str]:
    """Returns the names of the folders in a folder of results, in order. Links are not followed:
    submitted code may have made them."""
    try:
        with os.scandir(root) as entries:
            return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _sign_of(location: str) -> tuple[object, ...]:
    """Returns values that change whenever a database in a file changes."""
    found: list[object] = []
    for file in (location, f"{location}-wal"):
        try:
            status = os.lstat(file)
        except OSError:
            continue
        if status.st_size:  # A reader makes an empty write-ahead log, too.
            found += [file, status.st_ino, status.st_mtime_ns, status.st_size]
    return tuple(found)


def _in_folders(root: Path) -> Iterator[tuple[str, Found]]:
    """Yields studies with a database of their own."""
    for name in _names_in(root):
        # A text is faster than a path: there may be a thousand folders, each second.
        folder = f"{root}/{name}"
        stamp: list[object] = []
        changed_s = 0.0
        for file in ("study.db", "study.db-wal"):
            try:
                status = os.lstat(f"{folder}/{file}")
            except OSError:
                continue
            stamp += [file, status.st_mtime_ns, status.st_size]
            # A reader makes an empty write-ahead log, too.
            if status.st_size:
                changed_s = max(changed_s, status.st_mtime)
        if stamp and stamp[0] == "study.db":
            yield (
                name,
                Found(folder=Path(folder), storage="", stamp=repr(stamp), changed_s=changed_s),
            )
