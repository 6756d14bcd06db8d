"""The process that runs what was submitted: `automesh search`, as a command, beside the server.

It is no part of the server: a server that is killed leaves it at its work, and the next one finds
it by the lock that it holds. Each search is a process of its own, in a session of its own, and
holds a lock of its own in the folder of its submission. So a runner that is killed leaves its
searches at their work, too: the next runner waits for them instead of starting others beside them.
What a search has found is in its study, nowhere else: one that was cut short is started again with
the same command, and goes on.
"""

from __future__ import annotations

import fcntl
import json
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
from automesh.files import open_log, write_whole
from automesh.jsonio import dumps
from automesh.limits import SMALL_RECORD_BYTES
from automesh.reading import parse_json, read_text
from automesh.submissions.audit import Audit
from automesh.submissions.bundle import BadBundle, unpack
from automesh.submissions.database import RUNNERS, Database
from automesh.submissions.home import Home, is_held, open_home
from automesh.submissions.order import words_of
from automesh.submissions.store import State, Store, Submission
from automesh.texts.terminal import clean

TICK_S = 0.25
_BEAT_S = 2.0
_END_S = 60.0
"""For a search to end after SIGTERM: it keeps what it has and ends its workers."""
_ALONE_S = 10.0
"""Without a server and without work: then there is nobody to wait for."""
_MOST_RUNS = 5
"""Of one submission whose searches were killed by somebody else."""
_LOG_TAIL_BYTES = 2**14


@dataclass(kw_only=True)
class RunningSearch:
    """A submission whose search runs.

    Attributes:
      process: None where a former runner has started it.
    """

    submission: Submission
    process: subprocess.Popen[bytes] | None
    told_s: float = 0.0


@dataclass(kw_only=True)
class Runner:
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
    running: dict[str, RunningSearch] = field(default_factory=dict[str, RunningSearch])
    _started_s: float = field(default_factory=time.time)
    _beat_s: float = 0.0
    _alone_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.database = Database(self.home.database)
        self.store = Store(self.home, self.database)
        self.audit = Audit(self.database)

    def serve(self) -> None:
        """Works until it is told to stop, or until there is neither a server nor work."""
        self.beat(is_new=True)
        for left in self.store.listed(states=("running",))[0]:
            self.adopt(left)
        while not (self.is_stopping or self._is_alone()):
            self.beat()
            self.look_after()
            if not self.is_stopping:
                self.start_more()
            time.sleep(TICK_S)
        self._stop()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A signal that is to end it."""
        del number, frame
        self.is_stopping = True

    def _is_alone(self) -> bool:
        waits = any(self.store.counts().get(state) for state in ("queued", "running"))
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
            submission = self.store.start_next()
            if submission is None:
                return
            try:
                self._start(submission)
            except (AutomeshError, OSError) as error:
                said = error.message if isinstance(error, AutomeshError) else str(error)
                self._end(submission, "failed", f"the search could not be started: {said}")

    def _start(self, submission: Submission) -> None:
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
        lock = _locked(job)
        if lock is None:  # As long as it lives nobody else may measure for this submission.
            self.running[submission.number] = RunningSearch(submission=submission, process=None)
            return
        try:
            with (
                open_log(job / "search.log") as log,
                (job / "result.json").open("wb") as result,
            ):
                process = subprocess.Popen(
                    words,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=result,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)  # The search has it from now on.
        mark = {"pid": process.pid, "created_s": _created_s(process.pid)}
        write_whole(job / "process.json", dumps(mark))
        self.running[submission.number] = RunningSearch(submission=submission, process=process)
        self.audit.note("run", who=submission.owner, subject=submission.number)

    def adopt(self, submission: Submission) -> None:
        """Goes on with what a former runner had begun: its search may still be at work."""
        lock = _locked(self.home.job(submission.number))
        if lock is None:
            self.running[submission.number] = RunningSearch(submission=submission, process=None)
            return
        os.close(lock)
        self._judge(submission, None)

    def look_after(self) -> None:
        """Says of searches that have ended how they did, and ends those that are cancelled."""
        for number, one in list(self.running.items()):
            now = self.store.get(number, None)
            if self._has_ended(one):
                del self.running[number]
                self._judge(now, one.process.returncode if one.process else None)
            elif now.is_cancelled:
                self.tell_to_end(one)

    def _has_ended(self, one: RunningSearch) -> bool:
        if one.process is not None:
            return one.process.poll() is not None
        lock = _locked(self.home.job(one.submission.number))
        if lock is not None:
            os.close(lock)
        return lock is not None

    def _judge(self, submission: Submission, code: int | None) -> None:
        """Says what the end of a search means for its submission.

        Args:
          code: its exit code; None if nobody was there to hear it.
        """
        job = self.home.job(submission.number)
        if code is None and _is_whole(job / "result.json"):
            code = 0 if (job / "mesh_rules.toml").exists() else 1
        match code:
            case 0:
                self._end(submission, "found", "a rule was found")
            case 1:
                self._end(submission, "nothing", _last_error(job) or "nothing may become a rule")
            case 2:
                self._end(submission, "failed", _last_error(job) or "the search was refused")
            case _ if submission.is_cancelled:
                self._end(submission, "cancelled", "cancelled; resume it to go on")
            case _ if submission.runs >= _MOST_RUNS and not self.is_stopping:
                self._end(submission, "failed", f"the search was ended {submission.runs} times")
            case _:
                self._end(submission, "queued", "the search was cut short, and goes on")

    def _end(self, submission: Submission, state: State, said: str) -> None:
        self.store.end(submission.number, state, said)
        self.audit.note("end", who=submission.owner, subject=submission.number, said=state)

    def tell_to_end(self, one: RunningSearch) -> None:
        """As Ctrl-C first; by force if that does not help."""
        now_s = time.monotonic()
        if not one.told_s:
            one.told_s = now_s
            self._signal(one, signal.SIGTERM)
        elif now_s - one.told_s > _END_S:
            self._signal(one, signal.SIGKILL)

    def _signal(self, one: RunningSearch, number: signal.Signals) -> None:
        pid = one.process.pid if one.process else self._pid_of(one.submission)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)

    def _pid_of(self, submission: Submission) -> int | None:
        """The search that a former runner has started, if it is still the same process."""
        with suppress(AutomeshError, KeyError, TypeError, psutil.Error):
            path = self.home.job(submission.number) / "process.json"
            mark = parse_json(read_text(path, limit_bytes=SMALL_RECORD_BYTES))
            if abs(_created_s(int(mark["pid"])) - float(mark["created_s"])) < 1.0:
                return int(mark["pid"])
        return None

    def _stop(self) -> None:
        """Ends all searches; they are queued, for the next runner to go on with."""
        for one in self.running.values():
            self.tell_to_end(one)
        while self.running:
            self.look_after()
            for one in self.running.values():
                self.tell_to_end(one)
            time.sleep(TICK_S)
        self.database.close()


def _created_s(pid: int) -> float:
    """When a process was started; 0 if it has ended already."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _locked(job: Path) -> int | None:
    """Takes the lock of a submission's search; None while such a search lives."""
    lock = os.open(
        job / "search.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _is_whole(path: Path) -> bool:
    """Whether a search has printed its result to the end."""
    with suppress(OSError, ValueError, RecursionError):
        return bool(json.loads(path.read_bytes()))
    return False


def _last_error(job: Path) -> str:
    """The last sentence of a search that ended badly."""
    with suppress(OSError), (job / "search.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return clean(errors[-1], 300) if errors else ""
    return ""


def tell_to_stop(database: Database) -> None:
    """Lets the runner end its searches and itself, soon."""
    with database.change() as connection:
        connection.execute(sa.update(RUNNERS).values(is_told_to_stop=True))


def start_runner(home: Home, *, searches: int, storage: str) -> subprocess.Popen[bytes] | None:
    """Starts the runner of a service, in a session of its own; None if there is one already."""
    if is_held(home.lock("runner")):
        return None
    words = [sys.executable, "-P", "-m", "automesh.submissions.runner", str(home.folder)]
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
        runner = Runner(home=home, searches=int(searches), storage=storage)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, runner.on_signal)
        runner.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
