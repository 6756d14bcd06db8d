"""What the tests of workers share: jobs, and finding the processes that a test started."""

from __future__ import annotations

import os

import psutil

from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed
from automesh.program.nouns import Entry, StepRef, VisitAnswer
from automesh.worker.messages import Surroundings, VisitJob
from tests.support import paths

ROOT = str(paths.ROOT)
MEBIBYTE = 2**20
# Unique to this test process, and inherited: other tests may run on the machine at the same time.
TEST_MARK = "AUTOMESH_TEST_PROCESS"
os.environ.setdefault(TEST_MARK, str(os.getpid()))
# What other tests of the same run leave behind until its end: servers, and helpers of Python's own.
_OTHERS = ("multiprocessing", "postgres")
# A job's daemon may have an empty environment: then its argument must be unique.
SLEEP_S = f"1000.{os.environ[TEST_MARK]}"


def job(function: str, *argv: str) -> VisitJob:
    """A job whose `function` of `tests.support.handlers.misbehaving` is called with `argv`."""
    entry = Entry(kind="script", location="/train.py", function=function, argv=argv)
    return VisitJob(
        step=StepRef(entry=entry),
        plan=Plan(axes=(MeshAxis(name="dp", ici=2),)),
        cache_dir="",
        steps=1,
        samples=1,
        loss_steps=1,
    )


def surroundings(*variables: tuple[str, str], cpu_devices: int = 0) -> Surroundings:
    own = (("PYTHONPATH", ROOT), *variables)
    return Surroundings(platforms="cpu", cpu_devices=cpu_devices, variables=own)


def living() -> list[psutil.Process]:
    """Every process that a worker of this test process started, however it got away."""
    mark, found = os.environ[TEST_MARK], []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = process.cmdline()
            if any(other in " ".join(command) for other in _OTHERS):
                continue
            if process.environ().get(TEST_MARK) == mark or command == ["sleep", SLEEP_S]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def answer_of(result: object) -> VisitAnswer:
    assert isinstance(result, VisitAnswer), result
    return result


def failure_of(result: object) -> Failed:
    assert isinstance(result, Failed), result
    return result
