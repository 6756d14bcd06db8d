"""A search as a process of its own: what it says and when, and whom it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

MARK = "AUTOMESH_SEARCH_MARK"


class SearchProcess:
    """A running `automesh search`; every process that it starts carries its mark.

    Args:
      arguments: what follows `automesh search`.
      folder: working directory.
      variables: of its environment, beside those of this process.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.began_s = time.monotonic()
        self.said: list[tuple[float, str]] = []
        self._out = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "automesh", "search", *arguments],
            cwd=folder,
            env={**os.environ, **(variables or {}), MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = (
            threading.Thread(target=self._hear, args=(self._process.stderr,), daemon=True),
            threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True),
        )
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def words(self) -> str:
        """All of its stderr so far."""
        return "\n".join(line for _, line in self.said)

    def said_at_s(self, start: str) -> float | None:
        """When the first line with this start came, seconds after the search began."""
        for moment_s, line in list(self.said):
            if line.startswith(start):
                return moment_s - self.began_s
        return None

    def wait_for(self, start: str, timeout_s: float) -> bool:
        """Waits until it has said a line with this start; False if it did not within the time."""
        end_s = time.monotonic() + timeout_s
        while self.said_at_s(start) is None:
            if self.has_ended or time.monotonic() > end_s:
                return self.said_at_s(start) is not None
            time.sleep(0.05)
        return True

    def finish(self, timeout_s: float) -> int:
        """Waits for its end; its exit code.

        Raises:
          subprocess.TimeoutExpired: it runs on; it is killed then.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._listen_to_the_end()
        return code

    def kill(self) -> None:
        """SIGKILL, to the search alone."""
        self._process.kill()
        self._process.wait(30)
        self._listen_to_the_end()

    @property
    def printed(self) -> str:
        """Its stdout, after its end."""
        return self._out

    def result(self) -> dict[str, Any]:
        """What it printed with `--json`, after its end."""
        return json.loads(self._out)

    def helpers(self) -> list[psutil.Process]:
        """Its workers with their guardians, and whatever these have started."""
        return [process for process in marked(self.mark) if process.pid != self.pid]

    def survivors(self, limit_s: float) -> tuple[list[psutil.Process], float]:
        """Who is left `limit_s` after its end, and when the last of the others was gone."""
        began_s = time.monotonic()
        while (left := marked(self.mark)) and time.monotonic() - began_s < limit_s:
            time.sleep(0.02)
        return left, time.monotonic() - began_s

    def _hear(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.said.append((time.monotonic(), line.rstrip("\n")))

    def _collect(self, stream: IO[str]) -> None:
        with stream:
            self._out = stream.read()

    def _listen_to_the_end(self) -> None:
        # Bounded: a survivor that has inherited the streams would keep them open.
        for reader in self._readers:
            reader.join(5)


def marked(mark: str) -> list[psutil.Process]:
    """Every living process with this mark in its environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def role(process: psutil.Process) -> str:
    """`worker`, `guardian` (or its deputy) or `other`, by its command line."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return "other"
    if any(part.endswith("guardian.py") for part in command):
        return "guardian"
    return "worker" if "automesh.worker.child" in command else "other"


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kills what a search left behind, so that it does not disturb the next."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
