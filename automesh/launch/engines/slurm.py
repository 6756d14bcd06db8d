"""SLURM: one `srun` starts an agent on each node, inside of an allocation or with one of its own.

Inside an allocation (`salloc`, a batch script) the agents are a job step of it. From a login node
`srun` asks for nodes, waits in the queue, and gives them back when the agents end. What else SLURM
wants to know it takes from its own variables, as every `srun` does: SLURM_PARTITION, SLURM_ACCOUNT,
SLURM_TIMELIMIT, SLURM_GPUS_PER_NODE, SLURM_CONSTRAINT, ... (`man srun`, INPUT ENVIRONMENT
VARIABLES).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from automesh.errors import UsageError
from automesh.files import open_log
from automesh.launch.launcher import Order, agent_command
from automesh.texts.terminal import clean
from automesh.worker.environment import TOKEN, TOKEN_FILE
from automesh.worker.process import log_tail
from automesh.worker.temporary import temporary_folder

_AGENT_WAIT_S = 120
_GOODBYE_S = 6.0  # Agents end by themselves when the search says so.
_END_S = 5.0
_JOB = "SLURM_JOB_ID"


def command_of(order: Order, environ: Mapping[str, str]) -> list[str]:
    """The `srun` that starts the agents; the token is not in it.

    One task to a node gets all of the node: its cores (`--cpu-bind=none`), its memory, and in an
    allocation its GPUs. If one ends, SLURM ends the others (`--kill-on-bad-exit`), since a gang
    that has lost a host has to begin anew anyway.
    """
    hosts = order.hosts
    command = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1"]
    command += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL", "--input=none"]
    if environ.get(_JOB):
        # Beside the step or the batch script that this process runs in.
        command += ["--overlap"]
    else:
        command += ["--exclusive", "--mem=0", "--job-name=automesh"]
    return [*command, *agent_command(order, wait_s=_AGENT_WAIT_S)]


class SlurmLauncher:
    """See the module and `automesh.launch.launcher.Launcher`.

    Args:
      folder: for what srun prints.
      environ: of this process.
    """

    name = "slurm"

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        self._order: Order | None = None
        self._srun: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._lock = threading.Lock()  # A gang is manned by a thread of its own.
        self._is_closed = False

    def start(self, order: Order) -> None:
        """See `Launcher`."""
        if shutil.which("srun", path=self._environ.get("PATH")) is None:
            raise UsageError(
                "`srun` is not installed here",
                hint="run the search on a login node or in an allocation of the SLURM cluster",
            )
        self._order = order
        self._run(order)

    def refill(self) -> bool:
        """See `Launcher`: once one agent has ended, SLURM ends all of them."""
        with self._lock:
            if self._is_closed or self._order is None or self._srun is None:
                return False
            if self._srun.poll() is not None:
                self._run(self._order)
        return True

    def give_up(self, name: str) -> None:
        """See `Launcher`: with it end the others, as when it had ended by itself."""
        del name
        with self._lock:
            if self._srun is not None and self._srun.poll() is None:
                self._srun.terminate()

    def trouble(self) -> str:
        """See `Launcher`."""
        srun = self._srun
        if srun is None or srun.poll() is None:
            return ""
        lines = [line for line in log_tail(self._log).splitlines() if line.strip()]
        said = next(
            (line for line in lines if line.startswith("error: ")), lines[-1] if lines else ""
        )
        return f"srun has ended with code {srun.returncode}: {clean(said)}"

    def close(self) -> None:
        """See `Launcher`."""
        with self._lock:
            self._is_closed = True
            srun = self._srun
        if srun is None:
            return
        for end, limit_s in ((None, _GOODBYE_S), (srun.terminate, _END_S), (srun.kill, _END_S)):
            if end is not None:
                end()
            try:
                srun.wait(limit_s)
            except subprocess.TimeoutExpired:
                continue
            return

    @property
    def pid(self) -> int:
        """Of srun."""
        return self._srun.pid if self._srun is not None else 0

    @property
    def _log(self) -> Path:
        return self._folder / f"srun-{self._started}.log"

    def _run(self, order: Order) -> None:
        variables = {**self._environ, TOKEN: order.token}
        variables.pop(TOKEN_FILE, None)
        self._started += 1
        try:
            with open_log(self._log) as log:
                self._srun = subprocess.Popen(
                    command_of(order, self._environ),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C is for the search, which then ends the agents.
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"srun could not be started: {error}", hint="free some memory"
            ) from None


@contextmanager
def slurm_launcher() -> Generator[SlurmLauncher]:
    """A launcher whose agents are gone when the body ends."""
    with temporary_folder("slurm") as folder:
        launcher = SlurmLauncher(folder, dict(os.environ))
        try:
            yield launcher
        finally:
            launcher.close()
