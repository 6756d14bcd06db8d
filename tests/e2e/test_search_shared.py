"""Two searches of one script on one storage: shared work, one that measures, one answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from automesh.tuner.study.storage import Storage
from automesh.tuner.study.study import Study, Trial, open_study
from benchmarks.kill_resume import SCRIPT
from benchmarks.support.search_process import SearchProcess

pytest_plugins = ("tests.support.storage_fixtures",)

# Slow enough for two searches to meet while they compile.
SLOW_SCRIPT = (
    SCRIPT.replace("import jax\n", "import time\n\nimport jax\n", 1)
    + """

fast = build


def build(mesh, layers=1):
    time.sleep(0.4)
    return fast(mesh, layers)
"""
)
SPACE = "[axes]\ndp = {}\ntp = {}\n[knobs]\nlayers = [1, 2, 3, 4]\n"
PLANS = 12
WAIT_S = 300.0


def start_two(folder: Path, storage: Storage) -> list[SearchProcess]:
    (folder / "train.py").write_text(SLOW_SCRIPT)
    (folder / "space.toml").write_text(SPACE)
    place = storage.location
    if storage.kind != "server":
        place = f"{storage.kind}:///{storage.location}"
    options = {
        "--target": "cpu:4",
        "--space": "space.toml",
        "--budget": "30s",
        "--top": str(PLANS),  # One race of all: whoever comes second has nothing left to do.
        "--workers": "1",
        "--results": str(folder / "results"),
        "--storage": place,
    }
    pairs = [part for pair in options.items() for part in pair]
    return [
        SearchProcess(["train.py", *pairs, "--json", "--rules", f"rules-{name}.toml"], folder)
        for name in "ab"
    ]


def study_name(folder: Path) -> str:
    (study,) = (folder / "results").glob("train-*")
    return study.name


def read(folder: Path, storage: Storage) -> Study:
    return open_study(storage, study_name(folder), create=False)


def leading(folder: Path, storage: Storage, searches: list[SearchProcess]) -> SearchProcess:
    """The one of the two that has the lease."""
    with read(folder, storage) as study:
        leader = study.leader()
    assert leader is not None
    (search,) = (one for one in searches if one.pid == leader.pid)
    return search


def until(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def check_trials(folder: Path, storage: Storage) -> tuple[list[Trial], list[Trial]]:
    """Every plan was compiled once, and none measured twice; all trials of both rungs."""
    with read(folder, storage) as study:
        compiled, measured = study.compile.trials(), study.measure.trials()
    assert len(compiled) == PLANS
    for trials in (compiled, measured):
        assert not [one for one in trials if one.is_open]
        assert max(Counter(one.plan for one in trials).values()) == 1
    return compiled, measured


def pids(trials: list[Trial]) -> set[int]:
    return {one.owner.pid for one in trials if one.owner is not None}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_two_searches_share_the_work(storage: Storage, tmp_path: Path) -> None:
    searches = start_two(tmp_path, storage)
    codes = [one.finish(WAIT_S) for one in searches]
    assert codes == [0, 0], [one.words for one in searches]
    results = [one.result() for one in searches]
    assert results[0]["best"] == results[1]["best"]
    rules = [(tmp_path / f"rules-{name}.toml").read_text() for name in "ab"]
    assert rules[0] == rules[1]
    assert 'kind = "measured"' in rules[0]

    compiled, measured = check_trials(tmp_path, storage)
    assert pids(compiled) == {one.pid for one in searches}
    assert {one.attempts for one in compiled} == {1}
    assert len(pids(measured)) == 1
    for search in searches:
        assert not search.survivors(2.0)[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["journal"], indirect=True)
def test_the_other_goes_on_if_the_leader_dies_compiling(storage: Storage, tmp_path: Path) -> None:
    searches = start_two(tmp_path, storage)
    for search in searches:
        assert search.wait_for("compile", WAIT_S), search.words

    def some_finished() -> bool:
        with read(tmp_path, storage) as study:
            return sum(not one.is_open for one in study.compile.trials()) >= 2

    until(some_finished)
    leader = leading(tmp_path, storage, searches)
    leader.kill()
    with read(tmp_path, storage) as study:
        before = {one.number: one for one in study.compile.trials() if not one.is_open}
    (other,) = (one for one in searches if one is not leader)
    assert other.finish(WAIT_S) == 0, other.words
    compiled, measured = check_trials(tmp_path, storage)
    assert {number: compiled[number] for number in before} == before
    assert pids(measured) == {other.pid}
    assert not leader.survivors(2.0)[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgres"], indirect=True)
def test_the_other_goes_on_if_the_leader_dies_measuring(storage: Storage, tmp_path: Path) -> None:
    searches = start_two(tmp_path, storage)
    until(lambda: any(one.said_at_s("measure") is not None for one in searches))
    leader = leading(tmp_path, storage, searches)
    assert leader.said_at_s("measure") is not None

    def some_rounds() -> bool:
        with read(tmp_path, storage) as study:
            return any(len(one.rounds) >= 2 for one in study.measure.trials())

    until(some_rounds)
    leader.kill()
    (other,) = (one for one in searches if one is not leader)
    assert other.said_at_s("measure") is None, "both were measuring"
    assert other.finish(WAIT_S) == 0, other.words
    assert other.result()["best"]["evidence"] == "measured"
    _, measured = check_trials(tmp_path, storage)
    # Those whose losses differ from the reference's were finished before the race.
    raced = [one for one in measured if one.rounds]
    assert pids(raced) == {other.pid}
    assert all(one.attempts == 2 for one in raced)
    assert not other.survivors(2.0)[0]
