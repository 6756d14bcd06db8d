"""What is said while plans are compiled."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.report.progress import Silent
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.compile.rung import CompileRung
from tests.support.fakes.compile_rung import Clock, Memory, Slow
from tests.support.samples.results_samples import GIB, compiled

LARGE, SMALL = (Plan(axes=parse_mesh(text)) for text in ("dp:8", "tp:8"))


class Heard(Silent):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.bests: list[str] = []
        self.notes: list[str] = []

    def best(self, text: str) -> None:
        self.bests.append(text)

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        self.notes.append(note)


def heard(reserve_bytes: int) -> Heard:
    """What is heard of two plans that are compiled, the faster of which needs 3 GiB of 4 GiB."""
    memory, progress, clock = Memory(), Heard(), Clock()
    memory.enqueue([LARGE, SMALL], {})
    outcomes = (compiled(1.0, peak_bytes=3 * GIB), compiled(2.0, peak_bytes=GIB))
    for trial, outcome in zip(memory.trials(), outcomes, strict=True):
        memory.finish(replace(trial, state="finished"), outcome, fingerprint="")
    room = DeviceMemory(limit_bytes=4 * GIB, reserve_bytes=reserve_bytes)
    rung: Any = CompileRung(
        search=SimpleNamespace(  # pyright: ignore
            preparation=SimpleNamespace(timeout_s=1e9, provenance=(), device_memory=room),  # pyright: ignore
            notebook=SimpleNamespace(is_current=lambda _: True),  # pyright: ignore
            study=SimpleNamespace(lead=lambda: True, heartbeat=lambda: True),  # pyright: ignore
            progress=progress,
            estimates=SimpleNamespace(found={}),
            workers=1,
            clock=clock,
        ),
        pool=Slow(clock=clock, seconds=1.0),  # pyright: ignore
        rung=memory,  # pyright: ignore
        compiling=SimpleNamespace(),  # pyright: ignore
        choose=lambda _: [LARGE, SMALL],
        order=lambda plans, _: plans,
        deadline_s=60.0,
    )
    rung.run()
    return progress


@pytest.mark.parametrize(
    ("reserve_bytes", "best", "note"),
    [(0, "dp:8, 1.00 s predicted", ""), (2 * GIB, "tp:8, 2.00 s predicted", "1 failed")],
)
def test_what_leaves_less_free_than_the_reserve_is_not_the_best(
    reserve_bytes: int, best: str, note: str
) -> None:
    told = heard(reserve_bytes)
    assert set(told.bests) == {best}
    assert set(told.notes) == {note}
