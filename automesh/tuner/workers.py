"""The workers of a search: their environment, number and memory; and functions that send them
jobs."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import psutil

from automesh.errors import UsageError
from automesh.hardware import Target, running_under_several_processes
from automesh.hardware.compilers import absent_devices_of
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.processes import usable_cores
from automesh.outcomes import Failure
from automesh.report.progress import Progress, Silent
from automesh.report.words import count as count_of
from automesh.units import format_bytes
from automesh.worker.environment import surroundings_for
from automesh.worker.messages import Job, LayoutJob, Surroundings
from automesh.worker.pool import OnEvent, Pool
from automesh.worker.process import Process, StartWorker
from automesh.worker.temporary import temporary_folder

_T = TypeVar("_T")
NEEDED_BYTES = 2 * 2**30
"""Memory for a compile of a medium step, which decides how many run at the same time."""


def surroundings_of(target: Target) -> Surroundings:
    """Returns the environment in which workers serve a target."""
    if target.absent is not None:
        return surroundings_for(absent_devices_of(target.absent), cpu_devices=target.cpu_devices)
    return Surroundings(platforms=target.platforms, cpu_devices=target.cpu_devices)


def memory_share_bytes(workers: int) -> int:
    """Returns the memory that each of several workers may use: together nine tenths of the free
    memory."""
    return max(int(0.9 * psutil.virtual_memory().available / workers), 2**28)


def count_workers(target: Target, wanted: int) -> int:
    """Returns how many programs to compile at the same time: one per core, as far as the memory
    allows; one on an accelerator.

    Args:
      wanted: the user's number, see `bounded_workers`; 0 for as many as fit.
    """
    if target.platforms != "cpu" or target.processes > 1:
        return 1
    return wanted or count_lowering()


def count_lowering() -> int:
    """Returns how many programs to lower at the same time, which needs no accelerator: one per
    core, as far as the memory allows."""
    fitting = int(psutil.virtual_memory().available // NEEDED_BYTES)
    return max(1, min(usable_cores(), fitting))


def bounded_workers(target: Target, wanted: int, *, memory_limit_bytes: int = 0) -> tuple[int, str]:
    """Limits the number of workers that a user wants to what fits on this machine.

    Each is a process that imports jax; more workers than cores only wait for each other.

    Args:
      memory_limit_bytes: the user's limit for one worker; 0 for the usual need.

    Returns:
      The number, and a sentence for the user if it is not `wanted`, else an empty text.
    """
    cores, each = usable_cores(), memory_limit_bytes or NEEDED_BYTES
    free = psutil.virtual_memory().available
    room = f"{format_bytes(free)} of memory are free, {format_bytes(each)} for each"
    limits = [
        (cores, f"there {'is' if cores == 1 else 'are'} {count_of(cores, 'core')}"),
        (max(1, int(free // each)), room),
    ]
    if target.platforms != "cpu":
        limits.append((1, "an attached accelerator serves one"))
    if target.processes > 1:
        limits.append((1, "its processes run one program at a time"))
    count, why = min(limits, key=lambda one: one[0])
    return (wanted, "") if wanted <= count else (count, fewer_workers(wanted, count, why))


def fewer_workers(wanted: int, count: int, why: str) -> str:
    """Returns the sentence for a user who gets fewer workers than wanted."""
    return f"of {wanted} workers {count} {'is' if count == 1 else 'are'} started: {why}"


def refuse_launcher(what: str, *, hint: str) -> None:
    """Checks that no launcher has started this program several times.

    Args:
      what: the thing that runs in one process: `a search`.

    Raises:
      UsageError: a launcher has.
    """
    several = running_under_several_processes(os.environ)
    if several:
        raise UsageError(
            f"this is one of several processes ({several}), but {what} runs in a single one",
            hint=hint,
        )


def refuse_gang(target: Target, what: str) -> None:
    """Checks that the devices of a target belong to one process.

    Args:
      what: the thing that runs in one process: `a calibration`.

    Raises:
      UsageError: they belong to several processes.
    """
    if target.processes > 1:
        raise UsageError(
            f"target `{target.name}` is of {target.processes} processes, and {what} runs in one",
            hint=f"use `cpu:{target.cpu_devices * target.processes}`, or `automesh search`",
        )


def refuse_several_processes(count: int, what: str, *, hint: str) -> None:
    """Checks that jax, as a worker has started it, runs in one process.

    Args:
      what: the thing that runs in one process: `a search`.

    Raises:
      UsageError: it runs in several processes.
    """
    if count > 1:
        raise UsageError(
            f"jax was started with {count} processes, but {what} runs in one", hint=hint
        )


@contextmanager
def one_worker(
    surroundings: Surroundings,
    *,
    memory_limit_bytes: int = 0,
    progress: Progress | None = None,
    start: StartWorker = Process,
) -> Generator[Pool]:
    """Opens a pool of one worker, for a few jobs; its logs are removed with it.

    Args:
      memory_limit_bytes: limit of the worker; 0 for the free memory.
      progress: shows what the worker does.
      start: starts the worker; see `Pool`.
    """
    with (
        temporary_folder("worker") as logs,
        Pool(
            size=1,
            surroundings=surroundings,
            log_dir=logs,
            memory_limit_bytes=memory_limit_bytes or memory_share_bytes(1),
            on_wait=(progress or Silent()).tick,
            start=start,
        ) as pool,
    ):
        yield pool


def ask(
    pool: Pool,
    job: Job,
    kind: type[_T],
    timeout_s: float,
    on_event: OnEvent | None = None,
    *,
    patient: bool = False,
) -> _T | Failure:
    """Has a worker do a job, and waits for the answer.

    Args:
      kind: the class of the answer; see `automesh.worker.messages`.
      on_event: as for `Pool.submit`, like `patient`.
    """
    return _checked(pool.run(job, timeout_s, on_event, patient=patient), job, kind)


def answer_to(pool: Pool, ticket: int, job: Job, kind: type[_T]) -> _T | Failure:
    """Waits for a submitted job while other jobs go on; returns as `ask`."""
    return _checked(pool.result_of(ticket), job, kind)


def _checked(answer: object, job: Job, kind: type[_T]) -> _T | Failure:
    if isinstance(answer, Failure):
        return answer
    if not isinstance(answer, kind):
        raise TypeError(f"a job of kind {job.kind} was answered with {type(answer).__name__}")
    return answer


def layout_job(
    fabric: Fabric, *, platform: str, device_kind: str, shapes: Sequence[tuple[int, ...]]
) -> LayoutJob:
    """Makes the job that finds the places of mesh axes on a granule of a torus; see `LayoutJob`."""
    return LayoutJob(
        platform=platform,
        device_kind=device_kind,
        torus=fabric.torus,
        devices_per_chip=fabric.devices_per_chip,
        shapes=tuple(shapes),
        wraps=fabric.wraps,
    )
