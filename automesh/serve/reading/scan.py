"""Which studies there are, and what each of them says; in the process that reads them.

Studies lie in folders of results, each with a database of its own, or all in one storage. To read
one takes tens of milliseconds, so each is read once, and again when it has changed: that is told
by its files, or by what a database counts, which costs two queries for all of them.
"""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.errors import AutomeshError, NoFeasibleMesh
from automesh.report import words
from automesh.report.files.rule import rule_of, rule_text
from automesh.report.result import SearchResult
from automesh.serve.reading.messages import (
    Message,
    from_message,
    known_of,
    packed,
    to_message,
    unread,
)
from automesh.serve.reading.summary import KnownStudy, State, StudySummary
from automesh.skipped import reason_of
from automesh.texts.terminal import clean
from automesh.tuner.study.assemble import assemble
from automesh.tuner.study.backend import Backend, open_backend
from automesh.tuner.study.identity import submission_in
from automesh.tuner.study.metadata import header_in, reading
from automesh.tuner.study.results import NOT_ENDED
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.study import Study, open_study

LOOK_S = 10.0
"""For the studies that one look reads: then it is looked again which there are."""
SLOW_S = 10.0
"""What hardly any study takes to be read whose lock nobody keeps."""
AGAIN_S = 300.0
"""Before a study that could not be read is read again, although it has not changed."""
_MOST_OPEN = 16
_MOST_NEW = 1000
"""Studies that were found, in one message."""
_KEPT_OPEN = ("server",)
"""Kinds of storages: a row of SQLite may get the number of one that was deleted, and who had read
that would take it for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A study that is there, before it is read; `storage` as of `KnownStudy`."""

    folder: Path
    storage: str
    stamp: str
    changed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is remembered of a study that the server knows.

    Attributes:
      stamp: as it was when the study was read; empty if it was not.
      is_running: it changes without a change of its stamp: its process may have ended.
      is_unreadable: its storage may only have been away for a moment.
      read_s: when it was read, by a clock that nobody sets.
      took_s: how long that took.
    """

    stamp: str = ""
    is_running: bool = False
    is_unreadable: bool = False
    read_s: float = -math.inf
    took_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether it is read again although nothing of it has changed."""
        return self.is_unreadable and now_s - self.read_s >= AGAIN_S


class Scan:
    """Looks at the studies in several folders of results, and in a storage.

    Args:
      storage: as `--storage` of the searches; empty for SQLite in each study's folder.
      pause_s: before a study that has changed is read again: one that is searched changes all the
        time, and who measures must not be disturbed.
      seen: what the server knows already.
    """

    def __init__(self, storage: str, *, pause_s: float, seen: Mapping[str, Seen]) -> None:
        self._storage = storage
        self._pause_s = pause_s
        self._place: Storage | None = parse_storage(storage, Path()) if storage else None
        self._backend: Backend | None = None
        self._sign: tuple[object, ...] | None = None
        self._changes: Mapping[str, tuple[tuple[object, ...], float]] = {}
        self._seen: dict[str, Seen] = dict(seen)
        # Those that are searched: what is finished in them is not read again.
        self._open: OrderedDict[str, Study] = OrderedDict()

    def close(self) -> None:
        self._open.clear()
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def look(
        self, roots: Sequence[Path], *, most: int, without: Sequence[str] = ()
    ) -> Iterator[Message]:
        """Looks which studies there are, and reads up to `most` of those that have changed: who
        changed last comes first, and who took very long the last time comes last.

        Args:
          without: names of studies that are not to be read.

        Yields:
          Messages: which are new, in one or more, and in the last of them which are gone; of each
          that is read its name before, and what it says; at the end, whether some are left to be
          read.

        Raises:
          UsageError: the storage cannot be used.
        """
        began_s = time.monotonic()
        there = self._there(roots)
        new = [name for name in there if name not in self._seen]
        gone = [name for name in self._seen if name not in there]
        for name in gone:
            del self._seen[name]
            self._open.pop(name, None)
        self._seen |= dict.fromkeys(new, Seen())
        said = [to_message(_unread(name, there[name])) for name in new]
        while len(said) > _MOST_NEW:  # What is sent at once has a bound.
            yield {"new": said[:_MOST_NEW]}
            del said[:_MOST_NEW]
        yield {"new": said, "gone": gone}
        stale = [
            name
            for name, one in self._seen.items()
            if name not in without
            and began_s - one.read_s >= self._pause_s
            and (one.stamp != there[name].stamp or one.is_running or one.is_due(began_s))
        ]
        # Who keeps the lock of a study, and changes it often, keeps no other from being read.
        stale.sort(key=lambda name: (self._seen[name].took_s > SLOW_S, -there[name].changed_s))
        done = 0
        for name in stale[:most]:
            yield {"begun": name}
            begun_s = time.monotonic()
            read = self._read(name, there[name])
            self._seen[name] = Seen(
                stamp=there[name].stamp,
                is_running=read.summary.state == "running",
                is_unreadable=read.summary.state == "unreadable",
                read_s=time.monotonic(),
                took_s=time.monotonic() - begun_s,
            )
            yield {"study": to_message(read)}
            done += 1
            if time.monotonic() - began_s > LOOK_S:
                break
        yield {"is_behind": len(stale) > done}

    def _there(self, roots: Sequence[Path]) -> dict[str, Found]:
        """The studies that are there. One that is in two folders counts in the first."""
        found: dict[str, Found] = {}
        # Of a service with a storage, only agents keep studies in folders, which are below jobs.
        for root in roots if self._place is None else roots[1:]:
            for name, one in _in_folders(root):
                # Code of one submission may make folders, and no study of another one.
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
        # A file of SQLite is read from a copy, which is made anew when it has changed.
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

    def _read(self, name: str, found: Found) -> KnownStudy:
        try:
            result, is_running = self._read_result(name, found)
            summary = summary_of(name, result, is_running=is_running)
            rule, missing = rule_or_reason(result)
            known = _known(replace(summary, changed_s=found.changed_s), found, rule, missing)
            message = to_message(known)
            packed({"study": message})  # It must not end the conversation about all others.
            from_message(message, self._storage)  # as the server will
        except Exception as error:  # noqa: BLE001  One study that somebody broke hides no others.
            reason = reason_of(error)
            summary = StudySummary(
                name=name, changed_s=found.changed_s, state="unreadable", problem=reason
            )
            return _known(summary, found, "", reason)
        return known

    def _read_result(self, name: str, found: Found) -> tuple[SearchResult, bool]:
        """What a study holds now, and whether somebody searches."""
        lent = self._backend.lent() if found.storage and self._backend is not None else None
        if lent is None:
            folder = found.folder
            # What submitted code or an agent has left is never opened where it lies.
            with reading(folder, results=folder.parent, storage=found.storage, in_place=False) as (
                _,
                study,
                header,
            ):
                study.freeze()
                return assemble(study, header), study.leader() is not None
        kept = self._open.pop(name, None)
        if kept is not None:
            try:
                return self._read_open(name, kept, found)
            except Exception:  # noqa: BLE001  It may have been removed, and made anew.
                self._open.pop(name, None)
        opened = open_study(lent.storage, name, create=False, backend=lent)
        return self._read_open(name, opened, found)

    def _read_open(self, name: str, study: Study, found: Found) -> tuple[SearchResult, bool]:
        study.freeze()
        result = assemble(study, header_in(study, found.folder))
        is_running = study.leader() is not None
        if is_running and study.storage.kind in _KEPT_OPEN:
            self._open[name] = study
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return result, is_running


def _unread(name: str, found: Found) -> KnownStudy:
    return unread(name, folder=found.folder, storage=found.storage, changed_s=found.changed_s)


def _known(summary: StudySummary, found: Found, rule: str, missing: str) -> KnownStudy:
    return known_of(
        summary,
        folder=found.folder,
        storage=found.storage,
        rule=rule,
        missing=missing,
        stamp=found.stamp,
    )


def rule_or_reason(result: SearchResult) -> tuple[str, str]:
    """The text of the rule file, or why there is none."""
    try:
        return rule_text(result), ""
    except NoFeasibleMesh as error:
        return "", error.message
    except AutomeshError as error:
        return "", error.message


def summary_of(name: str, result: SearchResult, *, is_running: bool) -> StudySummary:
    """What a list shows of a study that was read."""
    best, funnel = words.best_of(result), result.funnel
    last = result.verifications[-1] if result.verifications else None
    state: State = "interrupted" if result.interrupted else "ended"
    if result.stop_reason == NOT_ENDED:
        state = "stopped"
    return StudySummary(
        name=name,
        workload=clean(result.workload),
        target=clean(result.target),
        device=clean(result.device),
        device_count=result.device_count,
        state="running" if is_running else state,
        sentence=clean(words.best_sentence(result) or ""),
        evidence=words.evidence(best) if best is not None else "none",
        plan=str(best.plan) if best is not None else "",
        step_s=_finite(words.step_s(best)) if best is not None else None,
        speedup=_finite(last.speedup) if last is not None and last.baseline else None,
        legal=funnel.legal,
        compiled=funnel.compiled + funnel.duplicates,
        measured=funnel.measured,
        failed=funnel.failed + funnel.out_of_memory + funnel.timed_out,
        waiting=funnel.waiting,
        has_rule=_has_rule(result),
        made=result.made,
        stop_reason=clean(result.stop_reason),
    )


def _finite(figure: float | None) -> float | None:
    """A figure that JSON has a word for. One study with another would spoil the list for all."""
    return figure if figure is not None and math.isfinite(figure) else None


def _has_rule(result: SearchResult) -> bool:
    try:
        rule_of(result)
    except AutomeshError:
        return False
    return True


def _names_in(root: Path) -> list[str]:
    """Names of the folders in a folder of results, in order; links are not followed: others may
    have put them there."""
    try:
        with os.scandir(root) as entries:
            return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _sign_of(location: str) -> tuple[object, ...]:
    """What changes with a database in a file."""
    found: list[object] = []
    for file in (location, f"{location}-wal"):
        try:
            status = os.lstat(file)
        except OSError:
            continue
        if status.st_size:  # An empty log is made by whoever reads, too.
            found += [file, status.st_ino, status.st_mtime_ns, status.st_size]
    return tuple(found)


def _in_folders(root: Path) -> Iterator[tuple[str, Found]]:
    """Studies with a database of their own."""
    for name in _names_in(root):
        folder = f"{root}/{name}"  # There may be a thousand of them, each second.
        stamp: list[object] = []
        changed_s = 0.0
        for file in ("study.db", "study.db-wal"):
            try:
                status = os.lstat(f"{folder}/{file}")
            except OSError:
                continue
            stamp += [file, status.st_mtime_ns, status.st_size]
            # An empty log is made by whoever reads, too.
            if status.st_size:
                changed_s = max(changed_s, status.st_mtime)
        if stamp and stamp[0] == "study.db":
            yield (
                name,
                Found(folder=Path(folder), storage="", stamp=repr(stamp), changed_s=changed_s),
            )
