"""Finds why the step of a plan is traced to another program than before: was the script edited, or
does its trace depend on something else than its arguments?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from automesh.errors import UsageError
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, Failure
from automesh.program.lower.program_text import first_difference, read_text
from automesh.program.nouns import StepRef, Traced
from automesh.program.script.sources import Sources, edited_files
from automesh.worker.messages import TraceJob
from automesh.worker.temporary import temporary_folder

CURE = (
    "let the step depend on the arguments of `build` alone: no time, no random number and no order "
    "of a set while it is traced"
)


OTHER_PROGRAM = Failed(
    stage="lower",
    reason="the step is traced to another program in every process",
    hint=f"{CURE}; `automesh check-script` tells whether it does",
)


class TracePool(Protocol):
    """A pool of workers that can trace a plan again."""

    def trace(self, job: TraceJob, timeout_s: float) -> Traced | Failure:
        """Traces a plan, in the process that did the last job."""
        ...

    def recycle(self) -> None:
        """Lets the next job start in a fresh process."""
        ...


def other_program(sources: Sources) -> Failed:
    """Makes the failure of a plan that was traced to another program than before.

    Raises:
      UsageError: the script was edited meanwhile: that is no fault of the plan.
    """
    edited = edited_files(sources)
    if edited:
        raise UsageError(
            f"the script was changed while it was searched: `{edited[0]}` is not what it was",
            hint="run the same command again: what still holds is kept",
        )
    return OTHER_PROGRAM


def explain_programs(
    pool: TracePool, step: StepRef, plans: Sequence[Plan], timeout_s: float
) -> dict[Plan, Failed]:
    """Finds where the programs of plans with `OTHER_PROGRAM` differ.

    It traces each plan in two processes.

    The process that did the last job loses the programs that it has ready, so nothing should be
    left to measure.
    """
    with temporary_folder("trace") as folder:
        files = {
            plan: [folder / f"{number}-{process}.txt" for process in range(2)]
            for number, plan in enumerate(plans)
        }
        for process in range(2):
            if process:
                pool.recycle()
            for plan, texts in files.items():
                job = TraceJob(step=step, plan=plan, text_file=str(texts[process]))
                pool.trace(job, timeout_s)
        return {plan: _explained(*texts) for plan, texts in files.items()}


def _explained(one: Path, other: Path) -> Failed:
    # A trace that fails leaves no file.
    is_known = one.exists() and other.exists()
    difference = first_difference(read_text(one), read_text(other)) if is_known else None
    where = f": {difference}" if difference else ", at a place that two more traces do not show"
    return replace(OTHER_PROGRAM, reason=OTHER_PROGRAM.reason + where)
