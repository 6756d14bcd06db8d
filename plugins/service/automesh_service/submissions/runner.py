"""The process that runs what was submitted: `automesh search`, as a command, beside the server.

It is no part of the server: a server that is killed leaves it at its work, and the next one finds
it by the lock that it holds. Each search is a process of its own, in a session of its own, and
holds a lock of its own in the folder of its submission. So a runner that is killed leaves its
searches at their work, too: the next runner waits for them instead of starting others beside them.
What a search has found is in its study, nowhere else: one that was cut short is started again with
the same command, and goes on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import sqlalchemy as sa
from filelock import Timeout

from automesh.errors import AutomeshError
from automesh.files import open_log
from automesh.jsonio import dumps
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.bundle import BadBundle, unpack
from automesh_service.submissions.database import RUNNERS, Database, Unwritable
from automesh_service.submissions.home import Home, is_held, open_home
from automesh_service.submissions.order import words_of
from automesh_service.submissions.process import SearchProcess, code_of, find_search, start_search
from automesh_service.submissions.store import Note, Store, Submission
from automesh_service.submissions.verdict import end_run

TICK_S = 0.25
_BEAT_S = 2.0
_ALONE_S = 10.0
"""Without a server and without work: then there is nobody to wait for."""
_TROUBLE_S = 2.0
"""Before a disk that is full is tried again."""


@dataclass(kw_only=True)
class SubmissionRunner:
    """Runs the submissions of a service, the one that has waited longest first.

    Attributes:
      searches: how many at once: searches that measure on the same devices disturb each other.
      storage: for the studies; empty for SQLite in their own folders. Without a password.
      is_stopping: it ends its searches, and then itself.
      running: by the numbers of the submissions.
    """

    home: Home
    searches: int = 1
    storage: str = ""
    is_stopping: bool = False
    running: dict[str, SearchProcess] = field(default_factory=dict[str, SearchProcess])
    _started_s: float = field(default_factory=time.time)
    _beat_s: float = 0.0
    _alone_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.database = Database(self.home.database)
        self.store = Store(self.home, self.database)
        self.audit = Audit(self.database)

    def serve(self) -> None:
        """Works until it is told to stop, or until there is neither a server nor work."""
        is_new, said = True, ""
        while True:
            try:
                self.beat(is_new=is_new)
                is_new = False
                for left in self.store.left_running():
                    if left.number not in self.running:
                        self.adopt(left)
                self._work()
                break
            except Unwritable as error:  # The disk may have room again soon; searches go on.
                if error.message != said:
                    with suppress(OSError):  # Its log is on a full disk, too.
                        sys.stderr.write(f"{error.message}\n")
                said = error.message
                time.sleep(_TROUBLE_S)
        self._stop()

    def _work(self) -> None:
        """Raises Unwritable: the disk is full."""
        while not (self.is_stopping or self._is_alone()):
            self.beat()
            self.look_after()
            if not self.is_stopping:
                self.start_more()
            time.sleep(TICK_S)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A signal that is to end it."""
        del number, frame
        self.is_stopping = True

    def _is_alone(self) -> bool:
        waits = self.running or self.store.counts().get("queued")
        if waits or is_held(self.home.lock("server")):
            self._alone_since_s = 0.0
            return False
        self._alone_since_s = self._alone_since_s or time.monotonic()
        return time.monotonic() - self._alone_since_s > _ALONE_S

    def beat(self, *, is_new: bool = False) -> None:
        """Says that it is there and what it does, and hears whether it shall stop."""
        now_s = time.monotonic()
        if not is_new and now_s - self._beat_s < _BEAT_S:
            return
        self._beat_s = now_s
        host = socket.gethostname()
        row: dict[str, Any] = {
            "host": host,
            "pid": os.getpid(),
            "started_s": self._started_s,
            "seen_s": time.time(),
            "cores": os.cpu_count() or 1,
            "memory_bytes": psutil.virtual_memory().total,
            "running": dumps(sorted(self.running)),
        }
        mine = sa.select(RUNNERS).where(RUNNERS.c.host == host)
        with self.database.change() as connection:
            known = connection.execute(mine).one_or_none()
            if known is None or is_new:
                connection.execute(sa.delete(RUNNERS).where(RUNNERS.c.host == host))
                connection.execute(sa.insert(RUNNERS).values(**row, is_told_to_stop=False))
                return
            self.is_stopping = self.is_stopping or known.is_told_to_stop
            connection.execute(sa.update(RUNNERS).where(RUNNERS.c.host == host).values(row))

    # One submission

    def start_more(self) -> None:
        """Starts what has waited longest, as long as there is room."""
        while len(self.running) < self.searches:
            submission = self.store.start_next(note=self.audit.noting("run", lambda _: ""))
            if submission is None:
                return
            try:
                self.running[submission.number] = self._start(submission)
            except (AutomeshError, OSError) as error:
                said = error.message if isinstance(error, AutomeshError) else str(error)
                said = f"the search could not be started: {said}"
                self.store.end(submission.number, "failed", said, note=self._noting_end())

    def _start(self, submission: Submission) -> SearchProcess:
        """Starts the search of a submission.

        Raises:
          AutomeshError: its bundle is broken.
          OSError: the disk is full, or no process can be started.
        """
        job = self.home.job(submission.number)
        job.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = job / "bundle"
        if not folder.exists():
            unpack(self.home.bundle(submission.digest), folder)
        if not (folder / submission.order.script).is_file():
            raise BadBundle(f"there is no `{submission.order.script}` in the bundle")
        words = words_of(submission.order, job)
        if self.storage:
            words.insert(words.index("--json"), f"--storage={self.storage}")
        return start_search(job, folder, words, run=submission.runs)

    def adopt(self, submission: Submission) -> None:
        """Goes on with what a former runner had begun: its search may still be at work."""
        try:
            found = find_search(self.home.job(submission.number))
        except OSError:  # Its folder is broken: that is said when it is started again.
            found = None
        if found is None:
            self._end(submission, None)
        else:
            self.running[submission.number] = found

    def look_after(self) -> None:
        """Says of searches that have ended how they did, and ends those that are cancelled."""
        for number, one in list(self.running.items()):
            now = self.store.get(number, None)
            if one.has_ended():
                self._end(now, one.code)
                del self.running[number]
            elif now.is_cancelled:
                one.tell_to_end()

    def _end(self, submission: Submission, code: int | None) -> None:
        """Says what the end of a search means for its submission.

        Args:
          code: its exit code; None if nobody was there to hear it.
        """
        job = self.home.job(submission.number)
        # A search that is told to end may print what it has.
        is_told = self.is_stopping or submission.is_cancelled
        if code is None and not is_told:
            code = code_of(job, submission.runs)
        end_run(
            self.store,
            submission.number,
            code,
            job,
            is_meant=self.is_stopping,
            note=self._noting_end(),
        )

    def _noting_end(self) -> Note:
        return self.audit.noting("end", lambda state: state)

    def _stop(self) -> None:
        """Ends all searches; they are queued, for the next runner to go on with."""
        while self.running:
            for one in self.running.values():
                one.tell_to_end()
            time.sleep(TICK_S)
            try:
                self.look_after()
            except Unwritable:  # The next runner finds how they ended.
                ended = [name for name, one in self.running.items() if one.has_ended()]
                for name in ended:
                    del self.running[name]
        self.database.close()


def tell_to_stop(database: Database) -> None:
    """Lets the runner end its searches and itself, soon."""
    with database.change() as connection:
        connection.execute(sa.update(RUNNERS).values(is_told_to_stop=True))


def start_runner(home: Home, *, searches: int, storage: str) -> subprocess.Popen[bytes] | None:
    """Starts the runner of a service, in a session of its own; None if there is one already."""
    if is_held(home.lock("runner")):
        return None
    words = [sys.executable, "-P", "-m", "automesh_service.submissions.runner", str(home.folder)]
    with open_log(home.runner_log) as log:
        return subprocess.Popen(
            [*words, str(searches), storage],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def main(words: Sequence[str]) -> None:
    """The process itself: FOLDER, how many searches at once, and the storage."""
    folder, searches, storage = words
    home = open_home(Path(folder))
    with suppress(Timeout), home.lock("runner", timeout_s=2.0):
        runner = SubmissionRunner(home=home, searches=int(searches), storage=storage)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, runner.on_signal)
        runner.serve()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AutomeshError as error:
        sys.exit(f"error: {error.message}")
