"""Finds why a gang failed: which of the failures that its processes report came first.

When one process of a jax program is lost, the others fail as well, each with another error: gloo
reports a closed connection, the coordination service aborts the process. The first report to arrive
is often such an echo. So the gang collects reports for a second, and this module names the
likeliest origin.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from automesh.outcomes import Failed, Failure, OutOfMemory
from automesh.worker.process import Ending

# Errors of jax, gloo, NCCL and XLA's coordination service when a peer is gone.
_ECHO = re.compile(
    r"gloo|connection (?:closed|reset|refused)|coordination service|heartbeat|broken pipe"
    r"|barrier|socket closed|nccl|peer|DEADLINE_EXCEEDED|UNAVAILABLE",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one process of a gang, or of the search about a process that is gone.

    Attributes:
      host: the host that it runs on.
      failure: the outcome of the job for this process.
      ending: how the process ended; None if it lives, and has only failed in its job.
      retire: whether it asks for a new process before the next job.
      at_s: when the search received it, by the monotonic clock.
    """

    rank: int
    host: str
    failure: Failure
    at_s: float
    ending: Ending | None = None
    retire: bool = False

    @property
    def where(self) -> str:
        """`rank 3 on host-b`."""
        return f"rank {self.rank} on {self.host}"

    @property
    def named(self) -> Failure:
        """The failure with the name of the rank added."""
        return replace(self.failure, where=self.where)


def cause_of(reports: Sequence[RankReport]) -> RankReport:
    """Returns the report of the process that failed first, as far as the reports show it.

    Args:
      reports: at least one.
    """
    return min(reports, key=lambda one: (_echo_rank(one), one.at_s, one.rank))


def common_failure(reports: Sequence[RankReport], count: int) -> Failure | None:
    """Returns the failure of a job that all processes refuse alike, as a script that raises does.

    Args:
      count: processes of the gang.

    Returns:
      None if they differ, if a process has ended, or if one has reported nothing.
    """
    if len(reports) < count or any(one.ending is not None for one in reports):
        return None
    first = reports[0].failure
    said = {_said(one.failure) for one in reports}
    return first if len(said) == 1 else None


def _said(failure: Failure) -> tuple[str, str, str]:
    # Without the traceback, whose addresses and line ends differ between hosts.
    return failure.kind, failure.stage, failure.reason if isinstance(failure, Failed) else ""


def _echo_rank(report: RankReport) -> int:
    """Returns 0 for a failure that no other process can have caused, and 3 for one that is mostly
    an echo."""
    if isinstance(report.failure, OutOfMemory):
        return 0
    if report.ending is not None:
        return 3 if report.ending.code == -signal.SIGABRT else 1
    said = report.failure.reason if isinstance(report.failure, Failed) else ""
    return 3 if _ECHO.search(said) else 2
