"""All studies of a service, and the contents of each, as they were read last.

Another process reads them (`automesh_service.serve.reading`); this module keeps what that process
has sent.
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
"""Seconds after which the list of studies counts as too old: then requests get no answer from
it."""
LATE_S = 5.0
"""Seconds for which a request then waits until the studies are listed again."""
_ATTEMPTS = 3  # in one look, each with a new process
_MOST_WAITING = 8  # each waiting request keeps a thread of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index for the studies of one moment.

    Attributes:
      known: the studies in the index.
      listed: the studies, the one that changed last first.
      below: names of studies by the parent folder of their folders, in order.
    """

    known: Mapping[str, KnownStudy]
    listed: tuple[KnownStudy, ...]
    below: Mapping[Path, tuple[str, ...]]


class Catalogue:
    """The studies in several folders of results, and in a storage.

    One thread calls `refresh`; this thread must live as long as the catalogue is open. Any thread
    may call the other methods.

    Args:
      roots: returns the folders of results, whose number may grow.
      storage: as for `--storage` of the searches; empty for SQLite in each study's folder.
      pause_s: seconds before a changed study is read again: while a search runs its study changes
        all the time, and reading must not disturb its measurements.
      on_listed: is called each time that the studies were listed.
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
        """The process id of the process that reads; None while there is none."""
        return self._reader.pid

    def known(self) -> Mapping[str, KnownStudy]:
        """Returns the studies by name; the returned mapping never changes."""
        return self._known

    def get(self, name: str) -> KnownStudy | None:
        """Returns a study by its exact name; no path is ever made from the name."""
        return self._known.get(name)

    def listed(self) -> tuple[KnownStudy, ...]:
        """Returns all studies for a list, the one that changed last first."""
        return self._indexed().listed

    def below(self, folder: Path) -> tuple[str, ...]:
        """Returns the names of the studies whose folders lie in a folder, in order."""
        return self._indexed().below.get(folder, ())

    def _indexed(self) -> Index:
        """Returns the index of the studies that are known now; it is made when it is first
        needed."""
        with self._lock:
            if self._index.known is not self._known:
                self._index = _index(self._known)
            return self._index

    # Whether the list is fresh

    def keep_fresh(self) -> None:
        """Notes that from now on a thread calls `refresh` all the time."""
        self._is_kept_fresh = True

    @property
    def is_fresh(self) -> bool:
        """Whether the studies were listed lately."""
        return not self._is_kept_fresh or time.monotonic() - self._looked_s < STALE_S

    @property
    def has_looked(self) -> bool:
        """Whether the studies were ever listed: before this, it is not known of any study that it
        does not exist."""
        return not self._is_kept_fresh or self._looked_s > -math.inf

    def wait_until_fresh(self) -> None:
        """Waits a moment for a new list of studies if the last one is old.

        Raises:
          Away: no list was made in time.
        """
        if self._wait_for(lambda: self.is_fresh):
            return
        said = "the list of the studies is too old to be shown: they cannot be read now"
        if not self.has_looked:
            said = "it is not known yet which studies there are: nobody could look at them so far"
        raise Away(said, hint="ask again in a few seconds; the log of the service says why")

    def when_read(self, known: KnownStudy) -> KnownStudy:
        """Waits a moment until a study was read, and returns it.

        Raises:
          Away: it was not read in time.
        """
        name = known.summary.name

        def latest() -> KnownStudy:
            return self._known.get(name, known)

        if not self._wait_for(lambda: latest().summary.state != "unread"):
            raise Away(f"the study `{name}` was not read yet", hint="ask again in a few seconds")
        return latest()

    def _wait_for(self, is_so: Callable[[], bool]) -> bool:
        """Waits a moment until a look changes something; returns whether the condition then
        holds."""
        if not is_so() and self._waiting.acquire(blocking=False):
            try:
                with self._looked:
                    self._looked.wait_for(is_so, LATE_S)
            finally:
                self._waiting.release()
        return is_so()

    # Questions about one study, answered from its present contents

    def result(self, known: KnownStudy) -> str:
        """Returns all figures of a study as JSON.

        Raises:
          UsageError: the study cannot be read, or does not exist any more.
          Away: nothing can be read now; or this study cannot, because it ends the process that
            reads it.
        """
        return self._ask("result", known)

    def table(self, known: KnownStudy, *, width: int, top: int) -> str:
        """Returns the table of a study; raises as `result`."""
        return self._ask("table", known, width=width, top=top)

    def diff(self, known: KnownStudy, mine: str) -> str:
        """Returns what the rule of a study changes in a rules file.

        Raises:
          AutomeshError: as for `result`; or there is no rule, or the file is broken.
        """
        return self._ask("diff", known, mine=mine)

    def _ask(self, what: str, known: KnownStudy, **more: Any) -> str:
        name = known.summary.name
        asked = {"what": what, "folder": str(known.folder), "storage": known.storage, **more}
        return self._asking.answer(name, lambda: self._reader.ask(asked))

    # Looks

    def refresh(self, most: int = 20) -> bool:
        """Lists the studies, and has up to `most` of the changed ones read, beginning with the one
        that changed last.

        Returns:
          Whether some changed studies are still unread.

        Raises:
          UsageError: the storage cannot be used, or the process that reads ends again and again.
          ReadingFailed, OSError: as for `Reader.look`.
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
        """Returns what is known of each study, as it is sent to a new process."""
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
                if new or gone:  # Otherwise the index stays as it is.
                    self._replace(new, set(gone))
                with self._looked:
                    self._looked_s = time.monotonic()
                    self._looked.notify_all()
                self._on_listed()
            case {"new": list(new)}:  # Further messages with new studies will follow.
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
    """Returns a study as it was read now. If it could not be read, it keeps its former rule and the
    description of what the rule is for: a training must not miss its rule because a storage is down
    for a moment."""
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
    """Makes the index of some studies."""
    below: dict[Path, list[str]] = {}
    for name, one in known.items():
        below.setdefault(one.folder.parent, []).append(name)
    listed = sorted(known.values(), key=lambda one: (-one.summary.changed_s, one.summary.name))
    return Index(
        known=known,
        listed=tuple(listed),
        below={folder: tuple(sorted(names)) for folder, names in below.items()},
    )
