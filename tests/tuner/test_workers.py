"""How many workers a search starts: as many as the machine has room for, and the user is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from automesh.hardware import parse_target
from automesh.report.progress import Silent
from automesh.tuner import run, start, workers
from automesh.tuner.request import SearchRequest, read_request
from automesh.tuner.workers import bounded_workers, count_workers
from tests.support.paths import SCRIPTS

GIBIBYTE = 2**30
CPU = parse_target("cpu:8", {})
TPU = parse_target("local", {"JAX_PLATFORMS": "tpu,cpu"})


class Heard(Silent):
    """A progress that keeps its notices."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this machine one of so many cores and so many free GiB."""

    def become(cores: int, free_gibibytes: float) -> None:
        memory = SimpleNamespace(available=int(free_gibibytes * GIBIBYTE))
        monkeypatch.setattr(workers, "usable_cores", lambda: cores)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return become


@pytest.mark.parametrize(
    ("cores", "free", "limit", "wanted", "count", "why"),
    [
        (8, 64, 0, 300, 8, "of 300 workers 8 are started: there are 8 cores"),
        (1, 64, 0, 300, 1, "of 300 workers 1 is started: there is 1 core"),
        (
            *(64, 6.5, 0, 300, 3),
            "of 300 workers 3 are started: 6.50 GiB of memory are free, 2.00 GiB for each",
        ),
        (
            *(64, 32, 16 * GIBIBYTE, 4, 2),
            "of 4 workers 2 are started: 32.0 GiB of memory are free, 16.0 GiB for each",
        ),
        (
            64,
            0.5,
            0,
            2,
            1,
            "of 2 workers 1 is started: 512 MiB of memory are free, 2.00 GiB for each",
        ),
        (8, 64, 0, 8, 8, ""),
        (8, 64, 0, 0, 0, ""),
    ],
)
def test_workers_are_bounded_by_cores_and_memory(
    machine: Any, cores: int, free: float, limit: int, wanted: int, count: int, why: str
) -> None:
    machine(cores, free)
    assert bounded_workers(CPU, wanted, memory_limit_bytes=limit) == (count, why)


def test_an_accelerator_serves_one(machine: Any) -> None:
    machine(64, 256)
    said = "of 300 workers 1 is started: an attached accelerator serves one"
    assert bounded_workers(TPU, 300) == (1, said)
    assert count_workers(TPU, 300) == 1


def test_a_search_is_told_and_starts_no_more(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before, `--workers 300` started 300 processes with jax in each."""
    machine(4, 256)
    seen: list[SearchRequest] = []
    monkeypatch.setattr(run, "run_search", lambda request, *_: seen.append(request))
    progress = Heard()
    options = {"workers": 300, "results": tmp_path / "results", "rules": tmp_path / "rules.toml"}
    start.start(read_request(SCRIPTS / "adamw.py", options, targets=("cpu:8",)), progress)
    (request,) = seen
    assert request.workers == 4
    said = "of 300 workers 4 are started: there are 4 cores"
    assert progress.notices == [said]
    assert request.notices == (said,)
