"""`automesh serve` as a process of its own, for tests that kill it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from automesh.submissions.home import is_held
from tests.support.paths import ROOT
from tests.support.processes import free_ports

START_S = 240.0


@dataclass(kw_only=True)
class ServeProcess:
    """A service in `folder`, started with the same command after each kill."""

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(1))
    process: subprocess.Popen[bytes] | None = None

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
                [sys.executable, "-m", "automesh", *words],
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
            assert time.monotonic() < end_s, self.said()
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers=sent)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()
        return reply.status, json.loads(data) if data else None

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
