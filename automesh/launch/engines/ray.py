"""The Ray launcher: a placement group with one actor for each host, which runs an agent.

Only a process of its own (`ray_driver`) imports Ray. So Ray's threads, signal handlers and output
stay out of the search, and since that process ends with its input, the actors end even if the
search is killed. The cluster is the one at RAY_ADDRESS, or the one that runs on this host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from automesh.errors import UsageError
from automesh.files import open_log
from automesh.jsonio import dumps
from automesh.launch.launcher import AgentOrder, agent_command
from automesh.texts.terminal import clean
from automesh.worker.environment import TOKEN_VARIABLES
from automesh.worker.process import log_tail
from automesh.worker.temporary import temporary_folder
from automesh.worker.wire import Message, decode_json

_AGENT_WAIT_S = 120
_END_S = 10.0
_TAKEN = ("JAX_", "XLA_", "LIBTPU_", "NCCL_")
_TAKEN_TOO = ("PYTHONPATH", "AUTOMESH_CACHE", "AUTOMESH_CACHE_LIMIT")
_OF_A_PROCESS = (
    *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "JAX_LOCAL_DEVICE_IDS",
)


def variables_to_take(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the search's environment that agents need, since Ray's processes
    have those of `ray start`.

    Other engines pass on the whole environment. Variables that name a process or its devices are
    left out.
    """
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_TAKEN) or name in _TAKEN_TOO) and name not in _OF_A_PROCESS
    }


class RayLauncher:
    """See the module and `automesh.launch.launcher.Launcher`.

    Args:
      folder: where Ray's output is kept.
    """

    name = "ray"

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ray.log"
        self._driver: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._said = ""
        self._lock = threading.Lock()

    def start(self, order: AgentOrder) -> None:
        """See `Launcher`."""
        if find_spec("ray") is None:
            raise UsageError(
                "Ray is not installed here", hint="run `pip install 'jax-automesh[ray]'`"
            )
        variables = {k: v for k, v in os.environ.items() if k not in TOKEN_VARIABLES}
        try:
            with open_log(self._log) as log:
                self._driver = subprocess.Popen(
                    [sys.executable, "-P", "-m", "automesh.launch.engines.ray_driver"],
                    env=variables,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"a process for Ray could not be started: {error}", hint="free some memory"
            ) from None
        self._listener = threading.Thread(target=self._listen, args=(self._driver,), daemon=True)
        self._listener.start()
        # The token goes through a pipe, then into the arguments of a call: never into a command
        # line or an environment variable.
        self._tell(
            {
                "start": agent_command(order, wait_s=_AGENT_WAIT_S),
                "hosts": order.hosts,
                "token": order.token,
                "folder": str(Path.cwd()),
                "variables": variables_to_take(os.environ),
            }
        )

    def refill(self) -> bool:
        """See `Launcher`."""
        if self._driver is None or self._driver.poll() is not None:
            return False
        self._tell({"refill": True})
        return True

    def give_up(self, name: str) -> None:
        """Does nothing: the actor itself kills an agent that hangs; see `ray_driver.run_agent`."""

    def trouble(self) -> str:
        """See `Launcher`."""
        if self._said:
            return self._said
        if self._driver is None or self._driver.poll() is None:
            return ""
        lines = [line for line in log_tail(self._log).splitlines() if line.strip()]
        return f"the process for Ray has ended: {lines[-1] if lines else 'it says nothing'}"

    def close(self) -> None:
        """See `Launcher`."""
        driver = self._driver
        if driver is None:
            return
        with contextlib.suppress(OSError):
            assert driver.stdin is not None
            driver.stdin.close()
        for end in (lambda: None, driver.terminate, driver.kill):
            end()
            try:
                driver.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue
            break
        if self._listener is not None:
            self._listener.join(_END_S)

    @property
    def pid(self) -> int:
        """Process id of the driver."""
        return self._driver.pid if self._driver is not None else 0

    def _tell(self, message: Message) -> None:
        driver = self._driver
        assert driver is not None
        assert driver.stdin is not None
        # If the driver has ended, `trouble` says so. If it is stopped, it must not block the
        # search: an order that does not fit into the pipe is dropped, and refills are repeated
        # anyway.
        with self._lock, contextlib.suppress(OSError, ValueError):
            driver.stdin.write(dumps(message).encode() + b"\n")
            os.set_blocking(driver.stdin.fileno(), False)

    def _listen(self, driver: subprocess.Popen[bytes]) -> None:
        """Reads, in a thread of its own, why the driver cannot start agents."""
        assert driver.stdout is not None
        with driver.stdout:
            for line in driver.stdout:
                message = decode_json(line) or {}
                if "trouble" in message:
                    self._said = clean(str(message["trouble"]))


@contextmanager
def ray_launcher() -> Generator[RayLauncher]:
    """Makes a launcher whose agents have ended when the body ends."""
    with temporary_folder("ray") as folder:
        launcher = RayLauncher(folder)
        try:
            yield launcher
        finally:
            launcher.close()
