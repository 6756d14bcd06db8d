"""`automesh agent --server`: takes submissions of a service, and runs their searches here.

The agent sends requests to the service; nothing connects to the agent. For a submission it holds a
lease, and a separate thread keeps the lease by beats. The search is a process that ends with the
agent. The agent sends the log and the results of the search to the service while it runs. If the
service gave up the agent, the answer to its next beat says that the lease has ended; then it ends
the search and sends nothing more.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil
from filelock import Timeout

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import write_whole
from automesh.jsonio import dumps, read_json
from automesh.reading import open_regular
from automesh.texts.terminal import clean, shortened
from automesh_service.remote.answers import (
    IS_IT,
    JSON,
    Answer,
    BeatHeard,
    LogKept,
    RunEnded,
    WrongAnswer,
)
from automesh_service.remote.client import Server
from automesh_service.remote.patience import RefusedRequest, Unreachable
from automesh_service.remote.tied import tied
from automesh_service.submissions.bundle import BadBundle, unpack
from automesh_service.submissions.home import Home, open_home
from automesh_service.submissions.leases import Lease
from automesh_service.submissions.order import checked, words_of
from automesh_service.submissions.process import SearchProcess, find_search, run_of, start_search
from automesh_service.submissions.state import check_state, check_studies, pack_state, put_in_place
from automesh_service.submissions.store import ENDED

POLL_S = 2.0
"""Seconds between two requests for work by an agent that has none."""
TICK_S = 0.5
STATE_S = 20.0
"""Seconds between two states that are sent: for each one the study is copied."""
BEAT_S = 5.0
_GIVE_UP_S = 900.0
"""Seconds without an answer after which the agent gives up: by then another agent has the
submission."""
_KEPT_S = 7 * 86_400.0
"""Seconds for which the folder of a submission is kept that another agent goes on with."""
_LOST = (404, 409)
_BUSY = (429, 502, 503, 504)  # also the statuses of a proxy while the service restarts
_NUMBER, _LEASE_ID = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_RUNS = 2**31
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The options of an agent.

    Attributes:
      name: a name for people; empty for the name of the host.
      takes: patterns of the targets that it searches for.
      has: labels of this host that submissions may need.
      folder: the folder for bundles and studies.
    """

    name: str
    takes: tuple[str, ...]
    has: tuple[str, ...]
    folder: Path


@dataclass(kw_only=True)
class Beats:
    """Keeps a lease, in a thread of its own, until it is stopped.

    Attributes:
      is_cancelled: whether the submission was cancelled.
      is_lost: whether the lease has ended; then nothing may be sent any more.
    """

    server: Server
    path: str
    is_cancelled: bool = False
    is_lost: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(BEAT_S)

    def _beat(self) -> None:
        answered_s = time.monotonic()
        while not self._stop.wait(BEAT_S):
            try:
                answer = self.server.ask("POST", f"{self.path}/beat", b"")
                self.is_cancelled = answer.read(BeatHeard).is_cancelled
                answered_s = time.monotonic()
            except RefusedRequest as error:
                self.is_lost = self.is_lost or error.status not in (*_BUSY, 500)
            except UsageError:
                self.is_lost = self.is_lost or time.monotonic() - answered_s > _GIVE_UP_S


@dataclass(kw_only=True)
class Agent:
    """An agent of a service.

    Attributes:
      say: shows a line to the user who started the agent.
      is_stopping: whether it was asked to end: it ends its search, gives the submission back, and
        ends.
    """

    server: Server
    home: Home
    options: AgentOptions
    say: Callable[[str], None]
    is_stopping: bool = False
    _trouble: str = ""
    _wish: str = field(default_factory=lambda: secrets.token_hex(16))

    def serve(self) -> None:
        """Works until it is asked to end.

        Raises:
          UsageError: the service refuses its token.
        """
        self.end_left()
        while not self.is_stopping:
            lease = self.take()
            if lease is None:
                self._wait(POLL_S)
                continue
            self.work(lease)
            self._remove_old()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal that asks the agent to end."""
        del number, frame
        self.is_stopping = True

    def end_left(self) -> None:
        """Ends searches of a former agent: they have no lease any more, but still use the
        devices."""
        left = [find_search(job) for job in self.home.jobs.iterdir()]
        while alive := [one for one in left if one is not None and not one.has_ended()]:
            for one in alive:
                one.tell_to_end()
            time.sleep(TICK_S)

    def take(self) -> Lease | None:
        """Asks for work; returns None if there is none, or nothing answers.

        Raises:
          UsageError: the service refuses the token, or has another version.
        """
        offer = {
            "name": self.options.name or _host_name(),
            "takes": list(self.options.takes),
            "has": list(self.options.has),
            "place": str(self.home.folder),
            # The same lease id is sent until an answer comes. If an answer got lost, the service
            # then gives the same submission again, which need not wait until its agent counts as
            # lost.
            "lease": self._wish,
            "cores": os.cpu_count() or 1,
            "memory_bytes": psutil.virtual_memory().total,
        }
        headers = {"Content-Type": "application/json"}
        try:
            answer = self.server.ask(
                "POST", "/v1/agent/leases", dumps(offer).encode(), headers=headers
            )
        except Unreachable as error:
            return self._no_answer(error.message)
        except RefusedRequest as error:
            if error.status in (*_BUSY, 500):
                return self._no_answer(error.message)
            raise
        if self._trouble:
            self.say(f"{self.server.url} answers again")
            self._trouble = ""
        self._wish = secrets.token_hex(16)
        if answer.status == 204:
            return None
        return read_lease(answer)

    def _no_answer(self, said: str) -> None:
        if said != self._trouble:
            self._trouble = said
            self.say(f"waiting: {clean(said)}")

    # One submission

    def work(self, lease: Lease) -> None:
        """Runs the search of a submission to its end.

        Raises:
          UsageError: the service does not accept the token any more.
        """
        self.say(f"submission {lease.number}: {clean(lease.order.entry)}, run {lease.run}")
        path = f"/v1/agent/leases/{lease.id}"
        job = self.home.job(lease.number)
        with Beats(server=self.server, path=path) as beats:
            sender = _Sender(agent=self, beats=beats, path=path, job=job, lease=lease)
            try:
                search = self._started(lease, job, path)
            except (RefusedRequest, Unreachable) as error:
                self.say(f"submission {lease.number} is left: {clean(error.message)}")
                return
            except (AutomeshError, OSError) as error:
                said = error.message if isinstance(error, AutomeshError) else str(error)
                sender.end(2, said=f"the search could not be started: {said}")
                return
            self._follow(search, beats, sender)
            if beats.is_lost:
                self.say(f"submission {lease.number} is somebody else's now")
                return
            sender.send_log()
            sender.send_state(is_last=True)
            if sender.trouble and search.code in (0, 1):
                said = f"what was found could not be sent: {sender.trouble}"
                state = sender.end(2, said=said)
            else:
                state = sender.end(search.code, is_meant=self.is_stopping)
        self.say(f"submission {lease.number}: {clean(state) or 'the service did not answer'}")
        if state in ENDED:
            shutil.rmtree(job, ignore_errors=True)

    def _started(self, lease: Lease, job: Path, path: str) -> SearchProcess:
        job.mkdir(mode=0o700, parents=True, exist_ok=True)
        if lease.state_run > run_of(job):  # Another agent's state is newer.
            self._take_state(job, path)
        folder = job / "bundle"
        if not folder.exists():
            unpack(self._bundle(lease.digest, path), folder)
        if not (folder / lease.order.script).is_file():
            raise BadBundle(f"there is no `{lease.order.script}` in the bundle")
        found = start_search(job, folder, tied(words_of(lease.order, job)), run=lease.run)
        if found.process is None:
            raise UsageError("a search of the same submission runs here already")
        return found

    def _whole(self, path: str) -> bytes:
        """Downloads a whole tar from the service."""
        answer = self.patiently(
            lambda: self.server.ask("GET", path, most_bytes=limits.BUNDLE_BYTES)
        )
        answer.check_type("application/x-tar")
        return answer.body

    def _bundle(self, digest: str, path: str) -> Path:
        place = self.home.bundle(digest)
        if not place.exists():
            data = self._whole(f"{path}/bundle")
            if hashlib.sha256(data).hexdigest() != digest:
                raise BadBundle("the service has sent another bundle than it had named")
            write_whole(place, data)
        return place

    def _take_state(self, job: Path, path: str) -> None:
        """Unpacks the results of another agent."""
        data = self._whole(f"{path}/state")
        whole = Path(tempfile.mkdtemp(suffix=".draft", dir=job))
        try:
            (whole / "state.tar").write_bytes(data)
            check_state(whole / "state.tar")
            unpack(whole / "state.tar", whole / "new")
            check_studies(whole / "new")
            put_in_place(whole / "new", job, whole)
        except BadBundle as error:  # The submission then begins anew.
            why = clean(error.message)
            self.say(f"the state of a former run is not taken, the search begins anew: {why}")
        finally:
            shutil.rmtree(whole, ignore_errors=True)

    def _follow(self, search: SearchProcess, beats: Beats, sender: _Sender) -> None:
        """Sends what the search writes until the search has ended; ends the search when that is
        asked for."""
        sent_s = time.monotonic()
        while not search.has_ended():
            if self.is_stopping or beats.is_cancelled or beats.is_lost:
                search.tell_to_end()
            elif time.monotonic() - sent_s >= STATE_S:
                sender.send_state()
                sent_s = time.monotonic()
            if not beats.is_lost:
                sender.send_log()
            self._wait(TICK_S, is_patient=True)

    def patiently(self, ask: Callable[[], _T]) -> _T:
        """Repeats a request while nothing answers.

        Raises:
          Unreachable: nothing has answered for a quarter of an hour, or not since the agent was
            asked to end.
          RefusedRequest: the service refuses.
        """
        end_s = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                return ask()
            except UsageError as error:
                is_busy = isinstance(error, RefusedRequest) and error.status in (*_BUSY, 500)
                if not (is_busy or isinstance(error, Unreachable)):
                    raise
                if self.is_stopping or time.monotonic() > end_s:
                    raise
            self._wait(POLL_S)

    def _wait(self, seconds: float, *, is_patient: bool = False) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and (is_patient or not self.is_stopping):
            time.sleep(min(0.1, seconds))

    def _remove_old(self) -> None:
        """Removes folders that were not used for a week."""
        before_s = time.time() - _KEPT_S
        for job in self.home.jobs.iterdir():
            mark = job / "process.json"
            with suppress(OSError):
                if mark.lstat().st_mtime < before_s and find_search(job) is None:
                    shutil.rmtree(job, ignore_errors=True)
        for bundle in (self.home.folder / "bundles").iterdir():
            with suppress(OSError):
                if bundle.lstat().st_mtime < before_s:
                    bundle.unlink()


@dataclass(kw_only=True)
class _Sender:
    """Sends the log and the results of one run.

    Attributes:
      trouble: why the service did not take the last state; empty if it did.
    """

    agent: Agent
    beats: Beats
    path: str
    job: Path
    lease: Lease
    trouble: str = ""
    _sequence: int = 0
    _sign: str = ""

    def __post_init__(self) -> None:
        # The log begins with what the service already has of it.
        self._at = self.lease.log_bytes
        self._shift = _size(self.job / "search.log") - self._at

    def send_log(self) -> None:
        """Sends what the search has written since the last call; what the service does not take now
        is sent the next time."""
        with suppress(UsageError, OSError):
            while not self.beats.is_lost and self._at < limits.SEARCH_LOG_BYTES:
                with open_regular(self.job / "search.log", follow=False) as log:
                    log.seek(self._at + self._shift)
                    data = log.read(limits.LOG_SLICE_BYTES)
                if not data:
                    return
                path = f"{self.path}/log?offset={self._at}"
                kept = self.agent.server.ask("POST", path, data).read(LogKept)
                if not self._at < kept.bytes <= self._at + len(data):
                    return
                self._at = kept.bytes

    def send_state(self, *, is_last: bool = False) -> None:
        """Sends the state of the search, if it has changed. If it is the last one, waits for an
        answer."""
        self.trouble = ""
        try:
            state = pack_state(self.job)
        except (AutomeshError, OSError) as error:
            self.trouble = str(error)
            return
        if state is None or state.sign == self._sign:
            return
        self._sequence += 1
        path = f"{self.path}/state?sequence={self._sequence}"
        headers = {"Content-Type": "application/x-tar"}

        def send() -> object:
            return self.agent.server.ask("PUT", path, state.data, headers=headers)

        try:
            self.agent.patiently(send) if is_last else send()
        except UsageError as error:
            # The state had arrived before, and its answer was lost.
            if not (isinstance(error, RefusedRequest) and error.status == 412):
                self.trouble = error.message
                return
        self._sign = state.sign

    def end(self, code: int | None, *, said: str = "", is_meant: bool = False) -> str:
        """Reports how the search ended.

        Returns:
          The state of the submission, or why it is not known; empty if nothing has answered.
        """
        body = dumps({"code": code, "said": said[:2_000], "is_meant": is_meant}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            answer = self.agent.patiently(
                lambda: self.agent.server.ask("POST", f"{self.path}/end", body, headers=headers)
            )
            return answer.read(RunEnded).state
        except RefusedRequest as error:
            # The first request may have arrived, and its answer was lost.
            return "its lease has ended" if error.status in _LOST else ""
        except UsageError:
            return ""


def read_lease(answer: Answer) -> Lease:
    """Reads a lease that a service offers. Unlike in other answers, an unknown key is an error: it
    may be an option of the order that this agent would not obey.

    Raises:
      WrongAnswer: it is no lease, or has an order that must not be run.
    """
    answer.check_type(*JSON)
    try:
        lease: Lease = read_json(answer.body, Lease)
        checked(lease.order)
    except AutomeshError as error:
        raise WrongAnswer(
            f"the service has sent what is no lease: {shortened(clean(error.message), 300)}",
            hint="are the service and this agent of the same version of automesh?",
        ) from None
    is_known = (
        _NUMBER.fullmatch(lease.number)
        and _LEASE_ID.fullmatch(lease.id)
        and _DIGEST.fullmatch(lease.digest)
        and 0 <= lease.state_run < lease.run < _MOST_RUNS
        and 0 <= lease.log_bytes <= limits.SEARCH_LOG_BYTES
    )
    if not is_known:
        raise WrongAnswer("the service has sent what is no lease", hint=IS_IT)
    return lease


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _host_name() -> str:
    """Returns the name of the host, with only the characters that a name may have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return name[:64] or "agent"


def serve_agent(server: Server, options: AgentOptions, say: Callable[[str], None]) -> None:
    """Runs an agent until Ctrl-C or SIGTERM.

    Raises:
      UsageError: its folder cannot be used, another agent uses the folder, or the service refuses
        the agent.
    """
    home = open_home(options.folder)
    try:
        with home.lock("agent"):
            agent = Agent(server=server, home=home, options=options, say=say)
            before = {
                number: signal.signal(number, agent.on_signal)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            }
            say(f"asking {server.url} for work (stop with Ctrl-C)")
            try:
                agent.serve()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
    except Timeout:
        raise UsageError(
            f"another agent uses the folder `{home.folder}`",
            hint="end that one, or choose another folder with --folder",
        ) from None
