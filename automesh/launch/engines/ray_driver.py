"""The process that talks to Ray: it reads orders as lines of JSON until its input ends.

The first order is `{"start": command, "hosts": N, "token": ..., "folder": ..., "variables": ...}`.
`{"refill": true}` follows whenever agents are missing. The process answers `{"trouble": why}` if it
cannot start agents.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from automesh.jsonio import dumps
from automesh.launch.wire import LOST_S
from automesh.worker.environment import TOKEN, TOKEN_VARIABLES
from automesh.worker.wire import Message, decode_json

_TAIL_CHARS = 2000
_ACCELERATORS = ("GPU", "TPU")
_LOOK_S = 0.5
_GOODBYE_S = 4.0
_REACHED_S = 10.0
_TICK_S = 1.0


def run_agent(command: Sequence[str], token: str, folder: str, variables: Mapping[str, str]) -> str:
    """Runs an agent inside a Ray actor until the agent ends.

    An agent that was stopped by a signal is killed once the search has given it up, since the
    search then asks for another one.

    Args:
      variables: environment variables of the search; they override those of Ray's processes.

    Returns:
      The last line of its output if it failed; empty if the search ended it.
    """
    own = {k: v for k, v in os.environ.items() if k not in TOKEN_VARIABLES}
    with tempfile.TemporaryFile() as output:
        running = subprocess.Popen(
            command,
            env={**own, **variables, TOKEN: token},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        is_hung = _wait_or_kill(running)
        if running.returncode == 0:
            return ""
        output.seek(max(output.seek(0, os.SEEK_END) - _TAIL_CHARS, 0))
        lines = output.read().decode(errors="replace").strip().splitlines()
    if is_hung:
        return f"the agent was stopped by a signal for {LOST_S:.0f} s"
    return lines[-1] if lines else f"the agent ended with code {running.returncode}"


def _wait_or_kill(agent: subprocess.Popen[bytes]) -> bool:
    """Waits for the end of an agent; True if it was stopped for too long and had to be killed."""
    stopped_since_s = math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(_TICK_S)
            return False
        now_s = time.monotonic()
        stopped_since_s = min(stopped_since_s, now_s) if _is_stopped(agent.pid) else math.inf
        if now_s - stopped_since_s > LOST_S:
            agent.kill()  # Its workers have guardians, which end with it.
            agent.wait()
            return True


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def bundle_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the resources that an agent reserves on its node: one core, and all accelerators.

    Args:
      nodes: `ray.nodes()`. If there are several kinds, the one with the most accelerators counts.
    """
    alive = [dict(node.get("Resources", {})) for node in nodes if node.get("Alive")]
    most = {name: max((one.get(name, 0.0) for one in alive), default=0.0) for name in _ACCELERATORS}
    return {"CPU": 1.0, **{name: count for name, count in most.items() if count}}


class Driver:
    """The agents of one search under Ray.

    Args:
      ray: the imported library.
      order: the order that starts them.
    """

    def __init__(self, ray: Any, order: Message) -> None:
        self._ray = ray
        self._order = order
        self._hosts = int(order["hosts"])
        self._bundle = bundle_of(ray.nodes())
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self.last = ""

    def start(self, is_over: Callable[[], bool]) -> None:
        """Creates a placement group, waits until it has nodes, and starts an agent on each.

        Args:
          is_over: whether the search has ended and nobody waits for the agents any more.
        """
        placing = importlib.import_module("ray.util.placement_group")
        # One bundle per host and never two on the same host: one process uses all devices of a
        # host.
        bundles = [dict(self._bundle) for _ in range(self._hosts)]
        self._group = placing.placement_group(bundles, strategy="STRICT_SPREAD")
        ready = self._group.ready()
        while not self._ray.wait([ready], timeout=_LOOK_S)[0]:
            if is_over():
                return
        self._actors = [self._actor(number) for number in range(self._hosts)]
        self._runs = [self._run(actor) for actor in self._actors]

    def refill(self) -> None:
        """Restarts agents that have ended and actors that are gone."""
        for number, run in enumerate(self._runs):
            ready, _ = self._ray.wait([run], timeout=0)
            if not ready:
                continue
            try:
                self.last = str(self._ray.get(run)) or self.last
            except self._ray.exceptions.RayError as error:
                self.last = str(error).strip().splitlines()[0]
                self._actors[number] = self._actor(number)
            self._runs[number] = self._run(self._actors[number])

    def close(self) -> None:
        """Kills all actors and the processes that they started."""
        if self._runs:  # The agents end when the search tells them to.
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_GOODBYE_S)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._group is not None:
            placing = importlib.import_module("ray.util.placement_group")
            with contextlib.suppress(Exception):
                placing.remove_placement_group(self._group)
        self._ray.shutdown()

    def _actor(self, number: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        ray, bundle = self._ray, dict(self._bundle)

        class AgentOfHost:
            def run(
                self, command: list[str], token: str, folder: str, variables: dict[str, str]
            ) -> str:
                return run_agent(command, token, folder, variables)

        remote = ray.remote(
            num_cpus=bundle.pop("CPU"),
            num_gpus=bundle.pop("GPU", 0),
            resources=bundle,
            max_restarts=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            ),
        )(AgentOfHost)
        return remote.remote()

    def _run(self, actor: Any) -> Any:
        order = self._order
        return actor.run.remote(
            list(order["start"]), str(order["token"]), str(order["folder"]), order["variables"]
        )


def why_unreachable(address: str) -> str:
    """Returns why nothing answers at RAY_ADDRESS; empty if something does, or if it is not
    `host:port`."""
    found = re.fullmatch(r"\[?([^\[\]/]+?)\]?:(\d{1,5})", address)
    if found is None:
        return ""
    try:
        with socket.create_connection((found[1], int(found[2])), timeout=_REACHED_S):
            return ""
    except (OSError, OverflowError) as error:
        return f"nothing answers at {address} ({error})"


def _say_trouble(why: str) -> None:
    sys.stdout.write(dumps({"trouble": why}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves one search."""
    orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            orders.put(decode_json(line) or {})
        orders.put(None)

    def is_over() -> bool:
        """Whether the search has closed the pipe; orders to refill do not matter here."""
        while not orders.empty():
            if orders.get() is None:
                orders.put(None)
                return True
        return False

    threading.Thread(target=read, daemon=True).start()
    order = orders.get()
    if order is None:
        return
    if why := why_unreachable(os.environ.get("RAY_ADDRESS", "")):
        _say_trouble(f"no Ray cluster can be joined: {why}")
        return
    try:
        ray = importlib.import_module("ray")
        ray.init(address="auto", log_to_driver=False, namespace="automesh")
    except Exception as error:  # noqa: BLE001 - Ray raises what it likes
        why = str(error).strip().splitlines()
        _say_trouble(f"no Ray cluster can be joined: {why[0] if why else type(error).__name__}")
        return
    driver = Driver(ray, order)
    try:
        driver.start(is_over)
        while (message := orders.get()) is not None:
            if "refill" in message:
                driver.refill()
    except Exception as error:  # noqa: BLE001 - as above
        why = str(error).strip().splitlines()
        _say_trouble(f"Ray cannot start the agents: {why[0] if why else type(error).__name__}")
    finally:
        driver.close()


if __name__ == "__main__":
    main()
