"""`automesh serve` and `automesh agent` as processes of their own, for tests that kill them."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from automesh_service.submissions.database import Database
from automesh_service.submissions.home import is_held
from automesh_service.submissions.process import TOKEN
from automesh_service.submissions.tokens import Tokens
from benchmarks.support.search_process import MARK, end_processes, marked
from plugins.service.tests.support.service import order, tar_of
from tests.support.paths import ROOT
from tests.support.processes import free_ports

START_S = 600.0
"""For a service to answer, and for an agent to ask it: imports alone take minutes on a machine that
does something else with all of its cores."""
_ASK_S = 120.0


@dataclass(kw_only=True)
class ServeProcess:
    """A service in `folder`, started with the same command after each kill.

    Attributes:
      before: words of a program that starts it, such as one that sets limits.
    """

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(1))
    process: subprocess.Popen[bytes] | None = None
    before: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def home(self) -> Path:
        return self.folder / "automesh-service"

    @property
    def token(self) -> str:
        return (self.home / "local.token").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """Of the service, and of commands that talk to it."""
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "PYTHONPATH": str(ROOT)}
        return {**os.environ, **state}

    def start(self) -> None:
        words = ["serve", "--listen", f"127.0.0.1:{self.port}", *self.options]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.before, sys.executable, "-m", "automesh", *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        end_s = time.monotonic() + START_S
        while self.ask("GET", "/v1/health", token="")[0] != 200:
            late = f"the service did not answer within {START_S:.0f} s:\n{self.said()}"
            assert time.monotonic() < end_s, late
            assert self.process is None or self.process.poll() is None, self.said()
            time.sleep(0.1)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        token: str | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and JSON; status 0 if nobody answers, or the connection broke."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is None:
            sent["Authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ASK_S)
        try:
            connection.request(method, path, body=body, headers=sent)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()
        return reply.status, json.loads(data) if data else None

    def send(self, key: str, files: Mapping[str, bytes], **changes: Any) -> str:
        """Sends a bundle and an order, as often as there is no answer; the submission's number."""
        data = tar_of(files)
        digest = hashlib.sha256(data).hexdigest()
        body = json.dumps({"bundle": digest, "order": order(**changes)}).encode()
        self._sent("PUT", f"/v1/bundles/{digest}", data)
        headers = {"Content_Type": "application/json", "Idempotency_Key": key}
        return self._sent("POST", "/v1/studies", body, **headers)["number"]

    def _sent(self, method: str, path: str, body: bytes, **headers: str) -> Any:
        end_s = time.monotonic() + START_S
        while True:
            status, said = self.ask(method, path, body, **headers)
            if status in (200, 201):
                return said
            assert status == 0 and time.monotonic() < end_s, (status, said, self.said())
            time.sleep(0.2)

    def submission(self, number: str) -> dict[str, Any]:
        """A submission with the names of its studies, asked for until there is an answer."""
        return self.got(f"/v1/submissions/{number}")

    def audit(self, subject: str) -> list[dict[str, Any]]:
        """What was done to a submission, the first first; all of it, as far as a page goes."""
        entries = self.got("/v1/audit?size=200")
        while entries and entries[-1]["number"] > 1:
            entries += self.got(f"/v1/audit?size=200&before={entries[-1]['number']}")
        return [one for one in reversed(entries) if one["subject"] == subject]

    def got(self, path: str) -> Any:
        """What stands at a path, asked for until there is an answer."""
        end_s = time.monotonic() + START_S
        while True:
            status, said = self.ask("GET", path)
            if status == 200:
                return said
            assert status in (0, 429, 503) and time.monotonic() < end_s, (status, said, self.said())
            time.sleep(0.2)

    def agent_token(self, name: str) -> str:
        """A token for an agent, made beside the service, as `automesh token` does."""
        database = Database(self.home / "service.db")
        try:
            return Tokens(database).make(name, "agent", None)
        finally:
            database.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ctrl-C; waits until the runner has ended, too."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(180)
        assert not is_held(FileLock(str(self.home / "runner.lock"), timeout=0))
        return code

    def end(self) -> None:
        """Leaves no process behind, however a test ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self._left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _left(self) -> list[int]:
        """The runner and its searches, by the folder that stands in their command."""
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if re.search(re.escape(str(self.home)).encode(), words):
                found.append(int(entry.parent.name))
        return found

    def said(self) -> str:
        """What the service and its runner have said."""
        logs = (self.folder / "serve.log", self.home / "runner.log")
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())


@dataclass(kw_only=True)
class AgentProcess:
    """An agent with a folder of its own, started with the same command after each kill.

    Attributes:
      state_s: between two states that it sends.
    """

    served: ServeProcess
    name: str
    process: subprocess.Popen[bytes] | None = None
    marks: list[str] = field(default_factory=list[str])
    state_s: float = 20.0
    _said_bytes: int = 0

    def __post_init__(self) -> None:
        self._token = self.served.agent_token(self.name)

    @property
    def folder(self) -> Path:
        return self.served.folder / f"agent-of-{self.name}"

    @property
    def _log(self) -> Path:
        return self.served.folder / f"agent-of-{self.name}.log"

    def start(self) -> None:
        """Starts it; everything that it starts carries a mark of its own."""
        self.marks.append(uuid.uuid4().hex)
        start = "import sys; from automesh.cli.app import main"
        start += "; from automesh_service.remote import agent"
        start += f"; agent.STATE_S = {self.state_s}; sys.exit(main())"
        words = ["agent", "--server", self.served.url, "--name", self.name]
        self._said_bytes = self._log.stat().st_size if self._log.exists() else 0
        environment = {**self.served.environment, TOKEN: self._token, MARK: self.marks[-1]}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *words, "--folder", str(self.folder)],
                cwd=self.served.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL, to the agent alone; waits until its search has ended, too.

        Raises:
          AssertionError: something of it is still there after five minutes.
        """
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        until(lambda: not self.left(), 300.0, lambda: f"left of {self.name}: {self.left()}")

    def stop(self) -> int:
        """As Ctrl-C, once it has begun to ask for work; its exit code."""
        assert self.process is not None
        until(self._has_begun, START_S, self.said)
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(180)

    def _has_begun(self) -> bool:
        # Before that, Ctrl-C ends a Python that is still importing: with another code, or not at
        # all where a shell has started it in the background. One that was killed so early has said
        # nothing.
        return b"asking " in self._log.read_bytes()[self._said_bytes :]

    def left(self) -> list[str]:
        """The commands of processes that it, or an earlier start of it, has left behind."""
        found = [one for mark in self.marks for one in marked(mark)]
        mine = self.process.pid if self.process is not None else 0
        return [f"{one.pid}: {one.cmdline()}" for one in found if one.pid != mine]

    def end(self) -> None:
        """Leaves no process behind, however a test ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for mark in self.marks:
            end_processes(marked(mark))

    def said(self) -> str:
        """What it has said, in all of its lives."""
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""


def until(
    is_so: Callable[[], object], limit_s: float, said: Callable[[], str], *, every_s: float = 0.2
) -> None:
    """Waits until something is so.

    Args:
      every_s: between two looks.

    Raises:
      AssertionError: not within the limit; with what `said` tells then.
    """
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"not within {limit_s:.0f} s:\n{said()}"
        time.sleep(every_s)
