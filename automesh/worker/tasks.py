"""What a pool is given and what it gives back (no jax)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automesh.outcomes import Failure
from automesh.worker.messages import Job
from automesh.worker.protocol import Answer

OnEvent = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A job that is done, in whatever way.

    Attributes:
      ticket: what `submit` gave for it.
      job: the job.
      result: the noun that its kind of job is answered with, or why there is none.
      doubtful: True if the process ended by itself and the job need not be to blame: it had done
        other jobs before, or somebody killed it.
    """

    ticket: int
    job: Job
    result: Answer | Failure
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job that waits or runs; what `Pool.submit` was given, with its ticket."""

    ticket: int
    job: Job
    timeout_s: float
    on_event: OnEvent | None
    fresh: bool
