"""A pool for races: its blocking calls keep the study's lease and the display alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from automesh.outcomes import Failure
from automesh.program.nouns import Traced, VisitAnswer
from automesh.report.progress import Progress
from automesh.tuner.study.study import Study
from automesh.tuner.worker_errors import refuse_to_blame
from automesh.worker.messages import TraceJob, VisitJob
from automesh.worker.pool import Pool
from automesh.worker.protocol import Answer

_PULSE_S = 2.0
_WAIT_S = 1.0
# If a process dies in these stages, the plan is probably the cause.
_REFUSALS = ("start", "load", "build", "lower", "compile")


class LeaseLost(Exception):
    """This search was silent for so long that another one has taken over the measuring."""


def wait_for_lease(
    study: Study, progress: Progress, *, until_s: float, clock: Callable[[], float]
) -> bool:
    """Waits for another search on the same storage to finish measuring, or to die.

    Args:
      until_s: when to give up, on `clock`.
    """
    while not study.lead():
        holder = study.leader()
        if holder is not None:
            progress.now(f"waiting for {holder.host} (process {holder.pid}) to measure")
        progress.tick()
        study.heartbeat()
        time.sleep(_WAIT_S)
        if clock() > until_s:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePool:
    """Runs visits one at a time; a visit may take longer than a lease without a heartbeat lasts."""

    pool: Pool
    study: Study
    progress: Progress

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        """Does one visit; see `VisitPool`.

        Raises:
          LeaseLost: two searches must not measure at the same time.
          UsageError: the machine failed, so nothing is known about the plan.
        """
        result = self._run(job, timeout_s)
        if not isinstance(result, VisitAnswer | Failure):
            raise TypeError(f"a visit was answered with {type(result).__name__}")
        return result

    def trace(self, job: TraceJob, timeout_s: float) -> Traced | Failure:
        """Traces a plan; see `TracePool`.

        Raises:
          LeaseLost, UsageError: as for `run`.
        """
        result = self._run(job, timeout_s)
        if not isinstance(result, Traced | Failure):
            raise TypeError(f"a trace was answered with {type(result).__name__}")
        return result

    def _run(self, job: VisitJob | TraceJob, timeout_s: float) -> Answer | Failure:
        ticket, again = self.pool.submit(job, timeout_s), False
        while True:
            for finished in self.pool.wait(_PULSE_S):
                result = finished.result
                if finished.ticket != ticket:
                    continue
                if not isinstance(result, Failure):
                    return result
                if again or not finished.doubtful or result.stage not in _REFUSALS:
                    refuse_to_blame(result)
                    return result
                ticket, again = self.pool.submit(job, timeout_s, fresh=True), True
            if not self.study.heartbeat():
                raise LeaseLost
            self.progress.tick()

    def recycle(self) -> None:
        """Lets the next visit start in a fresh process."""
        self.pool.recycle()
