"""Starts several agents on this host, to try or test a search with several processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from automesh.errors import UsageError
from automesh.launch.launcher import AgentOrder, agent_command
from automesh.worker.environment import TOKEN, TOKEN_FILE
from automesh.worker.process import Guarded
from automesh.worker.temporary import temporary_folder

_CLOSE_S = 5.0
_WAIT_S = 120.0  # The search listens already, but a busy machine is slow.


class LocalLauncher:
    """Runs agents as processes of this account, each under a guardian, so that they end with this
    one.

    Args:
      folder: where the output of the agents is kept.
      is_one: start only the agent of this host, since an engine has started the others.
    """

    name = "local"

    def __init__(self, folder: Path, *, is_one: bool = False) -> None:
        self._folder = folder
        self._is_one = is_one
        self._filled_s = float("-inf")
        self._order: AgentOrder | None = None
        self._agents: dict[int, Guarded] = {}
        self._started = 0
        self._lock = threading.Lock()  # A thread of its own starts each gang.
        self._is_closed = False

    def start(self, order: AgentOrder) -> None:
        """See `Launcher`."""
        self._order = order
        with self._lock:
            for number in range(1, 2 if self._is_one else order.hosts + 1):
                self._start(number, order)

    def refill(self) -> bool:
        """See `Launcher`."""
        assert self._order is not None
        with self._lock:
            if self._is_closed:
                return False
            for number, agent in list(self._agents.items()):
                if agent.has_ended():
                    agent.collect_ending()
                    self._start(number, self._order)
                    self._filled_s = time.monotonic()
        return not self._is_one or time.monotonic() < self._filled_s + _WAIT_S

    def give_up(self, name: str) -> None:
        """See `Launcher`."""
        with self._lock:
            for number, agent in self._agents.items():
                if self._name_of(number) == name:
                    agent.kill()

    def trouble(self) -> str:
        """See `Launcher`."""
        with self._lock:
            for number, agent in self._agents.items():
                if agent.has_ended():
                    lines = agent.log_tail().strip().splitlines()
                    return f"agent {number} has ended: {lines[-1] if lines else 'it says nothing'}"
        return ""

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the running agents, by the agents' numbers."""
        found: dict[int, int] = {}
        for number, agent in self._agents.items():
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(agent.deputy_pid).children(recursive=True):
                    if "agent" in one.cmdline()[3:6]:
                        found.setdefault(number, one.pid)
        return found

    def close(self) -> None:
        """See `Launcher`."""
        with self._lock:
            self._is_closed = True
        for agent in self._agents.values():
            agent.kill()
        deadline, left = time.monotonic() + _CLOSE_S, dict(self._agents)
        while left and time.monotonic() < deadline:
            for number, agent in list(left.items()):
                if agent.has_ended():
                    agent.collect_ending()
                    del left[number]
            time.sleep(0.02)
        for agent in left.values():
            agent.kill_deputy()
        self._agents.clear()

    def _start(self, number: int, order: AgentOrder) -> None:
        variables = {**os.environ, TOKEN: order.token}
        variables.pop(TOKEN_FILE, None)
        self._started += 1
        try:
            self._agents[number] = Guarded(
                agent_command(order, wait_s=_WAIT_S, name=self._name_of(number)),
                variables=variables,
                log=self._folder / f"agent-{self._started}.log",
                # The agent needs no limit: its workers have limits of their own.
                memory_limit_bytes=psutil.virtual_memory().total,
            )
        except OSError as error:
            raise UsageError(
                f"an agent could not be started on this host: {error}", hint="free some memory"
            ) from None

    def _name_of(self, number: int) -> str:
        return socket.gethostname() if self._is_one else f"local-{number}"


@contextmanager
def local_launcher(*, is_one: bool = False) -> Generator[LocalLauncher]:
    """Makes a launcher whose agents have ended when the body ends."""
    with temporary_folder("agents") as folder:
        launcher = LocalLauncher(folder, is_one=is_one)
        try:
            yield launcher
        finally:
            launcher.close()
