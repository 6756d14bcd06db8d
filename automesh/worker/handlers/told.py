"""Jobs whose user code is told of accelerators that this process has not (jax)."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from automesh.program.notes import in_one_line, note
from automesh.worker.messages import BuildJob, PropagateJob

_Job = TypeVar("_Job", BuildJob, PropagateJob)
_Answer = TypeVar("_Answer")


def told_or_not(job: _Job, work: Callable[[_Job], _Answer]) -> tuple[_Answer, str]:
    """Does a job, and again without the user code being told if that fails.

    Of attached accelerators only: `build` may run kernels that these alone can run, as it did when
    the script was inspected, and gets virtual devices here. For those that are not here it must not
    run anything.

    Returns:
      The answer, and what the user should know of it, a sentence; empty if all went well.

    Raises:
      Exception: whatever the second try raises.
    """
    one = job.step.absent
    if one is None or not one.is_attached:
        return work(job), ""
    try:
        return work(job), ""
    except Exception as error:  # noqa: BLE001 - whatever user code raises
        traceback.print_exc()
        why = (
            f"the step could not be built as for {one.device_kind}, only with the kernels that it "
            f"has for CPUs: {in_one_line(error)}"
        )
    answer = work(replace(job, step=replace(job.step, absent=None)))
    note(why)
    return answer, why
