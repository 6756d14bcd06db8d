"""A real SLURM of two nodes on this host: started and stopped by whoever uses it.

Debian's packages slurmctld, slurmd and slurm-client are enough; what it needs lies in one folder.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.worker_jobs import TEST_MARK

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
WHY_NOT = f"SLURM is not installed here: {', '.join(MISSING)}"
_START_S = 60.0
_CONFIGURATION = """
ClusterName=automesh
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@contextmanager
def slurm_cluster(folder: Path) -> Generator[dict[str, str]]:
    """While the body runs, SLURM does; gives the environment in which its commands find it."""
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    text = _CONFIGURATION.format(
        host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=_free_ports(3)
    )
    configuration.write_text(text)
    own = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != TEST_MARK}
    # Its own processes are not those of a test, which looks for what it has left behind.
    daemon = {**own, "SLURM_CONF": str(configuration), "PATH": _PATH}
    environ = {**daemon, TEST_MARK: os.environ[TEST_MARK]}
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    [*command, "-f", str(configuration)],
                    env=daemon,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        _wait_for_nodes(environ, folder)
        yield environ
    finally:
        _stop(running, environ)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for_nodes(environ: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        said = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if said.stdout.split() == ["idle", "idle"]:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
            raise TimeoutError(f"SLURM does not start: {said.stdout}{said.stderr}\n{logs}")
        time.sleep(0.3)


def _stop(running: list[subprocess.Popen[bytes]], environ: dict[str, str]) -> None:
    subprocess.run(
        ["scancel", "--quiet", "--state=RUNNING,PENDING", "--user", getpass.getuser()],
        env=environ,
        check=False,
        timeout=20,
        capture_output=True,
    )
    for one in reversed(running):
        one.send_signal(signal.SIGTERM)
    for one in running:
        try:
            one.wait(10)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
