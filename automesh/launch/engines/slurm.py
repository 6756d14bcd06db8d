"""The SLURM launcher: one `srun` starts an agent on each node, in an allocation or in a new one.

Inside an allocation (`salloc`, a batch script) the agents are a job step of it. From a login node
`srun` asks for nodes, waits in the queue, and gives them back when the agents end. All other
settings come from SLURM's own environment variables, as with every `srun`: SLURM_PARTITION,
SLURM_ACCOUNT, SLURM_TIMELIMIT, SLURM_GPUS_PER_NODE, SLURM_CONSTRAINT, ... (`man srun`, INPUT
ENVIRONMENT VARIABLES).
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
from automesh.launch.launcher import AgentOrder, agent_command
from automesh.texts.terminal import clean
from automesh.worker.environment import TOKEN, TOKEN_FILE
from automesh.worker.process import log_tail
from automesh.worker.temporary import temporary_folder

_AGENT_WAIT_S = 120
_GOODBYE_S = 6.0  # The agents end when the search tells them to.
_END_S = 5.0
_JOB = "SLURM_JOB_ID"


def command_of(order: AgentOrder, environ: Mapping[str, str]) -> list[str]:
    """Returns the `srun` command that starts the agents, without the token.

    Each node runs one task, which gets all cores (`--cpu-bind=none`), all memory and, in an
    allocation, all GPUs of the node. If one task fails, SLURM ends the others
    (`--kill-on-bad-exit`), since a gang that has lost a host has to start again anyway.
    """
    hosts = order.hosts
    command = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1"]
    command += ["--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL", "--input=none"]
    if environ.get(_JOB):
        # The agents share the nodes with the step or batch script that this process runs in.
        command += ["--overlap"]
    else:
        command += ["--exclusive", "--mem=0", "--job-name=automesh"]
    return [*command, *agent_command(order, wait_s=_AGENT_WAIT_S)]


class SlurmLauncher:
    """See the module and `automesh.launch.launcher.Launcher`.

    Args:
      folder: where srun's output is kept.
      environ: environment of this process.
    """

    name = "slurm"

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        self._order: AgentOrder | None = None
        self._srun: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._lock = threading.Lock()  # A thread of its own starts each gang.
        self._is_closed = False

    def start(self, order: AgentOrder) -> None:
        """See `Launcher`."""
        if shutil.which("srun", path=self._environ.get("PATH")) is None:
            raise UsageError(
                "`srun` is not installed here",
                hint="run the search on a login node or in an allocation of the SLURM cluster",
            )
        self._order = order
        self._run(order)

    def refill(self) -> bool:
        """See `Launcher`. Once one agent has ended, SLURM ends all of them, so all are
        restarted."""
        with self._lock:
            if self._is_closed or self._order is None or self._srun is None:
                return False
            if self._srun.poll() is not None:
                self._run(self._order)
        return True

    def give_up(self, name: str) -> None:
        """See `Launcher`. The other agents end with it, as if it had ended by itself."""
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
        """Process id of srun."""
        return self._srun.pid if self._srun is not None else 0

    @property
    def _log(self) -> Path:
        return self._folder / f"srun-{self._started}.log"

    def _run(self, order: AgentOrder) -> None:
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
                    # Ctrl-C must only reach the search, which then ends the agents.
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"srun could not be started: {error}", hint="free some memory"
            ) from None


@contextmanager
def slurm_launcher() -> Generator[SlurmLauncher]:
    """Makes a launcher whose agents have ended when the body ends."""
    with temporary_folder("slurm") as folder:
        launcher = SlurmLauncher(folder, dict(os.environ))
        try:
            yield launcher
        finally:
            launcher.close()
