"""How long compiles in progress are waited for when the time is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from automesh.ladder.compile_rung import CompileRung
from automesh.ladder.room import NO_LIMIT
from automesh.mesh.axes import Plan, parse_mesh
from automesh.results.progress import Silent
from tests.compile_fakes import Clock, Memory, Slow

PLANS = [Plan(axes=parse_mesh(text)) for text in ("dp:8", "dp:4,tp:2", "tp:8")]


def ended_s(seconds: float, *, is_first: bool) -> tuple[float, int]:
    """When the rung gives up, with 60 s until its deadline and 60 s of grace; compiles finished."""
    clock = Clock()
    rung: Any = CompileRung(
        preparation=SimpleNamespace(timeout_s=1e9, provenance=(), room=NO_LIMIT),  # pyright: ignore
        notebook=SimpleNamespace(is_current=lambda _: True),  # pyright: ignore
        study=SimpleNamespace(lead=lambda: True, heartbeat=lambda: True),  # pyright: ignore
        pool=Slow(clock=clock, seconds=seconds),  # pyright: ignore
        progress=Silent(),
        rung=Memory(),  # pyright: ignore
        compiling=SimpleNamespace(job=lambda plan: plan),  # pyright: ignore
        choose=lambda _: PLANS,
        order=lambda plans, _: plans,
        estimates={},
        workers=1,
        deadline_s=60.0,
        clock=clock,
        grace_s=60.0,
        is_first=is_first,
    )
    done = rung.run()
    return clock.now_s, len(done)


@pytest.mark.parametrize(
    ("seconds", "is_first", "expected"),
    [
        (20.0, True, (60.0, 3)),
        (100.0, True, (100.0, 1)),  # within the grace
        (400.0, True, (400.0, 1)),  # the first of all is waited for
        (400.0, False, (125.0, 0)),  # one that is not can be left for the next run
        (50.0, True, (100.0, 2)),
    ],
)
def test_what_is_waited_for(seconds: float, is_first: bool, expected: tuple[float, int]) -> None:
    assert ended_s(seconds, is_first=is_first) == expected
