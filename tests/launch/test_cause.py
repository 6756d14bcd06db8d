"""Which of several failures of a gang was the first."""

from __future__ import annotations

import itertools

import pytest

from automesh.launch.cause import RankReport, cause_of, common_failure
from automesh.outcomes import Failed, Failure, OutOfMemory
from automesh.worker.process import Ending


def report(rank: int, failure: Failure, *, at_s: float = 0.0, code: int | None = 0) -> RankReport:
    """`code`: of a process that has ended; 0 for one that lives."""
    ending = None if code == 0 else Ending(code=code)
    return RankReport(rank=rank, host=f"host-{rank}", failure=failure, at_s=at_s, ending=ending)


def raised(text: str, stage: str = "run") -> Failed:
    return Failed(stage=stage, reason=f"the step raised {text}")


MEMORY = OutOfMemory(stage="run", needed_bytes=2, limit_bytes=1, detail="too much")
ORIGINS = {
    "out of memory": report(1, MEMORY, at_s=0.9),
    "killed": report(1, raised("nothing"), at_s=0.9, code=-9),
    "lost": report(1, raised("nothing"), at_s=0.9, code=None),
    "exited": report(1, raised("nothing"), at_s=0.9, code=3),
    "raised": report(1, raised("ValueError: 3 is not 4"), at_s=0.9),
}
ECHOES = {
    "gloo": report(0, raised("JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer")),
    "coordination": report(0, raised("XlaRuntimeError: UNAVAILABLE: heartbeat timeout")),
    "aborted": report(0, raised("nothing"), code=-6),
}


@pytest.mark.parametrize(("origin", "echo"), list(itertools.product(ORIGINS, ECHOES)))
def test_an_echo_is_not_the_cause_though_it_comes_first(origin: str, echo: str) -> None:
    cause = cause_of([ECHOES[echo], ORIGINS[origin]])
    assert cause is ORIGINS[origin]
    assert cause.where == "rank 1 on host-1"
    assert cause.named.where == "rank 1 on host-1"


def test_of_equals_the_first_in_time_counts() -> None:
    late, early = report(0, raised("A"), at_s=0.5), report(3, raised("B"), at_s=0.1)
    assert cause_of([late, early]) is early
    assert cause_of([ECHOES["gloo"]]) is ECHOES["gloo"]


def test_what_all_say_is_common() -> None:
    said = [report(rank, raised("ValueError: no")) for rank in range(3)]
    assert common_failure(said, 3) == raised("ValueError: no")
    assert common_failure(said, 4) is None
    assert common_failure([*said[:2], report(2, raised("ValueError: yes"))], 3) is None
    assert common_failure([*said[:2], report(2, raised("ValueError: no", "build"))], 3) is None
    assert common_failure([*said[:2], report(2, raised("ValueError: no"), code=1)], 3) is None
