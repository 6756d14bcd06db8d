"""All studies of a service: which there are, and what each of them says, as they were read last.

They are read in a process of their own (`automesh_service.serve.reading`); here is only what it has
said.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automesh_service.serve.reading.asking import Asking
from automesh_service.serve.reading.messages import Message, from_message, known_of
from automesh_service.serve.reading.reader import Away, Reader
from automesh_service.serve.reading.summary import KnownStudy

STALE_S = 60.0
"""Without a look at which studies there are: then nobody is told what was known before as if it
were still so."""
LATE_S = 5.0
"""How long who asks then waits for a look."""
_ATTEMPTS = 3  # at one look, each with a new process
_MOST_WAITING = 8  # each of them keeps a thread of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What is looked up in the studies of one moment.

    Attributes:
      known: the studies that it is of.
      listed: the one that changed last first.
      below: names by the folder that their folders lie in, in order.
    """

    known: Mapping[str, KnownStudy]
    listed: tuple[KnownStudy, ...]
    below: Mapping[Path, tuple[str, ...]]


class Catalogue:
    """The studies in several folders of results, and in a storage.

    `refresh` is called by one thread, which has to live as long as the catalogue is open,
    everything else by any.

    Args:
      roots: gives the folders of results, which may become more.
      storage: as `--storage` of the searches; empty for SQLite in each study's folder.
      pause_s: before a study that has changed is read again: one that is searched changes all the
        time, and who measures must not be disturbed.
      on_listed: hears each time that it was looked which studies there are.
    """

    def __init__(
        self,
        roots: Callable[[], Sequence[Path]],
        storage: str = "",
        *,
        pause_s: float = 0.0,
        on_listed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_listed = on_listed
        self._roots = roots
        self._storage = storage
        self._reader = Reader(storage=storage, pause_s=pause_s)
        self._asking = Asking()
        self._known: Mapping[str, KnownStudy] = {}
        self._index = Index(known=self._known, listed=(), below={})
        self._lock = threading.Lock()
        self._looked = threading.Condition()
        self._looked_s = -math.inf
        self._is_kept_fresh = False
        self._waiting = threading.Semaphore(_MOST_WAITING)

    def close(self) -> None:
        self._reader.close()

    @property
    def reader_pid(self) -> int | None:
        """Of the process that reads; None while there is none."""
        return self._reader.pid

    def known(self) -> Mapping[str, KnownStudy]:
        """By name; what it returns never changes."""
        return self._known

    def get(self, name: str) -> KnownStudy | None:
        """A study by its exact name: nothing of the name becomes a path."""
        return self._known.get(name)

    def listed(self) -> tuple[KnownStudy, ...]:
        """All studies for a list, the one that changed last first."""
        return self._indexed().listed

    def below(self, folder: Path) -> tuple[str, ...]:
        """Names of the studies whose folders lie in a folder, in order."""
        return self._indexed().below.get(folder, ())

    def _indexed(self) -> Index:
        """The index of what is known now, made when somebody asks for it first."""
        with self._lock:
            if self._index.known is not self._known:
                self._index = _index(self._known)
            return self._index

    # Whether what is known is still so

    def keep_fresh(self) -> None:
        """Says that somebody calls `refresh` from now on, all the time."""
        self._is_kept_fresh = True

    @property
    def is_fresh(self) -> bool:
        """Whether somebody has looked lately which studies there are."""
        return not self._is_kept_fresh or time.monotonic() - self._looked_s < STALE_S

    @property
    def has_looked(self) -> bool:
        """Whether somebody has looked which studies there are, however long ago: before that it is
        not known of any that there is none."""
        return not self._is_kept_fresh or self._looked_s > -math.inf

    def wait_until_fresh(self) -> None:
        """Waits a moment for a look if the last one is long ago.

        Raises:
          Away: there was none.
        """
        if self._wait_for(lambda: self.is_fresh):
            return
        said = "what is known of the studies is too old to be told: they cannot be looked at now"
        if not self.has_looked:
            said = "it is not known yet which studies there are: nobody could look at them so far"
        raise Away(said, hint="ask again in a few seconds; the log of the service says why")

    def when_read(self, known: KnownStudy) -> KnownStudy:
        """A study after it was read: waits a moment for that.

        Raises:
          Away: it was not.
        """
        name = known.summary.name

        def latest() -> KnownStudy:
            return self._known.get(name, known)

        if not self._wait_for(lambda: latest().summary.state != "unread"):
            raise Away(f"the study `{name}` was not read yet", hint="ask again in a few seconds")
        return latest()

    def _wait_for(self, is_so: Callable[[], bool]) -> bool:
        """Waits a moment for something that a look changes; whether it is so then."""
        if not is_so() and self._waiting.acquire(blocking=False):
            try:
                with self._looked:
                    self._looked.wait_for(is_so, LATE_S)
            finally:
                self._waiting.release()
        return is_so()

    # What is asked of one study, as it is now

    def result(self, known: KnownStudy) -> str:
        """All figures as JSON.

        Raises:
          UsageError: the study cannot be read, or is not there any more.
          Away: nothing can be read now; or not this study, which ends the process that reads it.
        """
        return self._ask("result", known)

    def table(self, known: KnownStudy, *, width: int, top: int) -> str:
        """The table; raises as `result`."""
        return self._ask("table", known, width=width, top=top)

    def diff(self, known: KnownStudy, mine: str) -> str:
        """What its rule changes in a rules file.

        Raises:
          AutomeshError: as `result`; or there is no rule, or the file is broken.
        """
        return self._ask("diff", known, mine=mine)

    def _ask(self, what: str, known: KnownStudy, **more: Any) -> str:
        name = known.summary.name
        asked = {"what": what, "folder": str(known.folder), "storage": known.storage, **more}
        return self._asking.answer(name, lambda: self._reader.ask(asked))

    # Looks

    def refresh(self, most: int = 20) -> bool:
        """Looks which studies there are, and has up to `most` of those read that have changed: who
        changed last comes first.

        Returns:
          Whether some are left to be read.

        Raises:
          UsageError: the storage cannot be used, or the process that reads ends again and again.
          ReadingFailed, OSError: as `Reader.look`.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._look(most)
            except Away:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _look(self, most: int) -> bool:
        asked: Message = {"roots": [str(root) for root in self._roots()], "most": most}
        last: Message = {}

        def hear(message: Message) -> None:
            self._hear(message)
            last.update(message)

        self._reader.look(asked, self._told, hear)
        return bool(last["is_behind"])

    def _told(self) -> dict[str, Any]:
        """What a new process is told of each study."""
        return {
            name: {
                "stamp": one.stamp,
                "is_running": one.summary.state == "running",
                "is_unreadable": one.summary.state == "unreadable",
            }
            for name, one in self._known.items()
        }

    def _hear(self, message: Message) -> None:
        match message:
            case {"new": list(new), "gone": list(gone)}:
                if new or gone:  # Else the index stays as it is.
                    self._replace(new, set(gone))
                with self._looked:
                    self._looked_s = time.monotonic()
                    self._looked.notify_all()
                self._on_listed()
            case {"new": list(new)}:  # More will come: they are not all yet.
                self._replace(new, set())
            case {"study": dict(said)}:
                one = from_message(said, self._storage)
                name = one.summary.name
                self._publish({**self._known, name: _with_rule_of(self._known.get(name), one)})
                with self._looked:
                    self._looked.notify_all()
            case _:
                pass

    def _replace(self, new: Sequence[Message], gone: set[str]) -> None:
        known = {name: one for name, one in self._known.items() if name not in gone}
        for said in new:
            one = from_message(said, self._storage)
            known[one.summary.name] = one
        self._publish(known)
        for name in gone:
            self._asking.forget(name)

    def _publish(self, known: Mapping[str, KnownStudy]) -> None:
        with self._lock:
            self._known = known


def _with_rule_of(former: KnownStudy | None, one: KnownStudy) -> KnownStudy:
    """A study as it was read now; one that cannot be read with the rule that it had when it could,
    and what that is for: who trains must not miss it because a storage is away for a moment."""
    if one.summary.state != "unreadable" or former is None or not former.rule:
        return one
    was = former.summary
    summary = replace(
        one.summary,
        workload=was.workload,
        target=was.target,
        device=was.device,
        device_count=was.device_count,
        has_rule=True,
    )
    return known_of(
        summary, folder=one.folder, storage=one.storage, rule=former.rule, stamp=one.stamp
    )


def _index(known: Mapping[str, KnownStudy]) -> Index:
    """The index of some studies."""
    below: dict[Path, list[str]] = {}
    for name, one in known.items():
        below.setdefault(one.folder.parent, []).append(name)
    listed = sorted(known.values(), key=lambda one: (-one.summary.changed_s, one.summary.name))
    return Index(
        known=known,
        listed=tuple(listed),
        below={folder: tuple(sorted(names)) for folder, names in below.items()},
    )
