"""Several processes on one storage, some killed: nothing lost, nothing twice, no waiting."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from automesh.tuner.study.storage import Storage
from tests.support.samples.storage_cases import BACKENDS, opened, plans, work

# Opening takes a second or less on an idle machine; waiting for the dead would take 30 s or more.
STALE_S = 10.0

pytest_plugins = ("tests.support.storage_fixtures",)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes forked from one that has already imported Optuna."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["automesh.tuner.study.rung", "tests.support.samples.storage_cases"]
    )
    return context


def results(journal: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in journal.read_text().splitlines()]
    return [(int(line[0]), float(line[1])) for line in lines if line[0] != "open"]


def openings(journal: Path) -> list[tuple[float, str]]:
    lines = [line.split() for line in journal.read_text().splitlines()]
    return [(float(line[1]), line[2]) for line in lines if line[0] == "open"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [*BACKENDS[:2], pytest.param(BACKENDS[2], marks=pytest.mark.long)],
    indirect=True,
)
def test_four_processes_share_the_work(
    storage: Storage, processes: ForkServerContext, tmp_path: Path
) -> None:
    todo, journal = plans(200), tmp_path / "results"
    crew = [processes.Process(target=work, args=(storage, todo, journal, n)) for n in range(4)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(120)
    assert [process.exitcode for process in crew] == [0, 0, 0, 0]
    numbers = [number for number, _ in results(journal)]
    assert sorted(numbers) == list(range(200))
    with opened(storage) as study:
        trials = study.compile.trials()
    assert {one.plan for one in trials} == set(todo)
    assert [one.attempts for one in trials] == [1] * 200
    assert len({one.owner for one in trials}) > 1, "one process did everything"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", BACKENDS, indirect=True)
def test_twenty_kills(storage: Storage, processes: ForkServerContext, tmp_path: Path) -> None:
    # Enough that work is left at the last kill.
    todo, journal, dice = plans(200), tmp_path / "results", random.Random(0)
    journal.touch()
    for kill in range(20):
        before = len(openings(journal))
        process = processes.Process(target=work, args=(storage, todo, journal, kill))
        process.start()
        while kill % 4 and len(openings(journal)) == before:
            # Three in four are killed at work, one while it opens the storage or makes the tables.
            assert process.is_alive()
            time.sleep(0.005)
        process.join(dice.uniform(0.0, 0.25))
        process.kill()
        process.join()
    began = time.monotonic()
    with opened(storage) as study:
        assert study.lead(), "the lease of a killed process was still good"
        study.compile.adopt_expired()
        assert time.monotonic() - began < STALE_S
        kept = {one.number: one for one in study.compile.trials() if not one.is_open}
        assert not [one for one in study.compile.trials() if one.state == "running"]
    for number, step_s in results(journal):
        assert kept[number].outcome.step_s == step_s
    work(storage, todo, journal, 99)
    stored = results(journal)
    assert len(stored) == len({number for number, _ in stored}), "a finished trial was repeated"
    assert max(seconds for seconds, _ in openings(journal)) < STALE_S, "waited for a stale lock"
    assert {leads for _, leads in openings(journal)} == {"True"}
    with opened(storage) as study:
        trials = study.compile.trials()
        assert [one.plan for one in trials] == todo, "a plan is missing, or was enqueued twice"
        assert {one.state for one in trials} == {"done"}
        assert max(one.attempts for one in trials) > 1, "no kill hit a running trial"
        for number, step_s in stored:
            assert trials[number].outcome.step_s == step_s
