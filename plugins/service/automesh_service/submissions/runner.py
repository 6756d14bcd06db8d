"""The process that runs submissions as `automesh search` commands, beside the server.

The runner is a separate process: if the server is killed, the runner goes on, and the next server
finds it by the lock that it holds. Each search, too, is a process in a session of its own and holds
a lock in the folder of its submission. So if the runner is killed, its searches go on, and the next
runner waits for them and does not start second ones. The results of a search are in its study
alone: a search that was cut short is started again with the same command, and continues.
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
"""Seconds without a server and without work, after which the runner ends."""
_TROUBLE_S = 2.0
"""Seconds before a full disk is tried again."""


@dataclass(kw_only=True)
class SubmissionRunner:
    """Runs the submissions of a service, the one that has waited longest first.

    Attributes:
      searches: how many run at once; searches that measure on the same devices disturb each other.
      storage: the storage of the studies, without a password; empty for SQLite in their own
        folders.
      is_stopping: whether it was asked to end its searches, and then itself.
      running: the searches, by the numbers of their submissions.
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
        """Works until it is asked to end, or until there is neither a server nor work."""
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
            except Unwritable as error:  # The disk may have room again soon; the searches go on.
                if error.message != said:
                    with suppress(OSError):  # Its log is on the full disk, too.
                        sys.stderr.write(f"{error.message}\n")
                said = error.message
                time.sleep(_TROUBLE_S)
        self._stop()

    def _work(self) -> None:
        """Does one round of work; raises Unwritable if the disk is full."""
        while not (self.is_stopping or self._is_alone()):
            self.beat()
            self.look_after()
            if not self.is_stopping:
                self.start_more()
            time.sleep(TICK_S)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal that asks the runner to end."""
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
        """Writes to the database that the runner lives and what it runs, and reads whether it shall
        end."""
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
        """Starts the submissions that have waited longest, as long as there is room."""
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
        """Continues a submission that a former runner had started: its search may still run."""
        try:
            found = find_search(self.home.job(submission.number))
        except OSError:  # The folder is broken: the next start of the search reports that.
            found = None
        if found is None:
            self._end(submission, None)
        else:
            self.running[submission.number] = found

    def look_after(self) -> None:
        """Records how searches have ended, and ends those that were cancelled."""
        for number, one in list(self.running.items()):
            now = self.store.get(number, None)
            if one.has_ended():
                self._end(now, one.code)
                del self.running[number]
            elif now.is_cancelled:
                one.tell_to_end()

    def _end(self, submission: Submission, code: int | None) -> None:
        """Records what the end of a search means for its submission.

        Args:
          code: its exit code; None if that is not known.
        """
        job = self.home.job(submission.number)
        # A search that was asked to end may still print its results.
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
        """Ends all searches; they are queued, and the next runner continues them."""
        while self.running:
            for one in self.running.values():
                one.tell_to_end()
            time.sleep(TICK_S)
            try:
                self.look_after()
            except Unwritable:  # The next runner finds out how they ended.
                ended = [name for name, one in self.running.items() if one.has_ended()]
                for name in ended:
                    del self.running[name]
        self.database.close()


def tell_to_stop(database: Database) -> None:
    """Asks the runner, through the database, to end its searches and itself."""
    with database.change() as connection:
        connection.execute(sa.update(RUNNERS).values(is_told_to_stop=True))


def start_runner(home: Home, *, searches: int, storage: str) -> subprocess.Popen[bytes] | None:
    """Starts the runner of a service, in a session of its own; returns None if there is one
    already."""
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
    """Runs the process; its arguments: the folder, how many searches run at once, and the
    storage."""
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
