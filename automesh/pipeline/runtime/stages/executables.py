"""Compiles lowered programs: several at a time, or by a function of the caller's (jax)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

# (a lowered program, its stage, what it does: an action's kind, or `zeros`, `finish`, `norm`,
# `init`, `update`) -> what is called to run it
CompileOne = Callable[[jax.stages.Lowered, int | None, str], Any]


class Job(NamedTuple):
    """A program to be compiled.

    Attributes:
      stage: None for what belongs to no stage.
      what: see `CompileOne`.
    """

    lowered: jax.stages.Lowered
    stage: int | None
    what: str


def compile_jobs(jobs: Iterable[Job], compile_one: CompileOne | None) -> tuple[Any, ...]:
    """The executables of some programs, in their order.

    Args:
      compile_one: called for one after the other, so that it can keep account of them; None
        compiles several at a time, since XLA does not hold Python's lock.
    """
    listed = tuple(jobs)
    if compile_one is not None:
        return tuple(compile_one(*job) for job in listed)
    if not listed:
        return ()
    with ThreadPoolExecutor(min(len(listed), os.cpu_count() or 1)) as pool:
        return tuple(pool.map(lambda job: job.lowered.compile(), listed))
