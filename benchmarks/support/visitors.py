"""One worker process that is asked for visits, for benchmarks that drive races themselves."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.outcomes import Failure
from automesh.program.nouns import Inspection, VisitAnswer
from automesh.worker.messages import Job, VisitJob
from automesh.worker.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitors:
    """A pool that is only asked for visits."""

    pool: Pool

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        """See `VisitPool`."""
        answer = ask(self.pool, job, timeout_s)
        assert not isinstance(answer, Inspection)
        return answer

    def recycle(self) -> None:
        """See `VisitPool`."""
        self.pool.recycle()


def ask(pool: Pool, job: Job, timeout_s: float) -> Inspection | VisitAnswer | Failure:
    """One job; a kind of answer that was not asked for is a bug."""
    answer = pool.run(job, timeout_s)
    if not isinstance(answer, Inspection | VisitAnswer | Failure):
        raise TypeError(f"a {job.kind} job was answered with a {type(answer).__name__}")
    return answer
