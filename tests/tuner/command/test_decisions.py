"""What a search by a command decides, with runs that are made up and a clock that they move."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from automesh.outcomes import Failed, Measured
from automesh.report.progress import Silent
from automesh.report.result import SearchResult
from automesh.report.search_command import SearchCommand
from automesh.report.words import best_of
from automesh.tuner.command import search as search_module
from automesh.tuner.command.run import FinishedRun, Manner, Place, RunResult
from automesh.tuner.command.start import search_command
from automesh.tuner.command.step_times import SeenStep
from automesh.tuner.command.timed_command import read_command
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.study import open_study, parse_storage

STEP = SeenStep(name="step", file="/a/train.py", line=7, argument_bytes=2**20, devices=8)


@dataclass(slots=True, kw_only=True)
class World:
    """Runs that take a time, and plans whose steps take one.

    Attributes:
      step_s: by the words of the command.
      noise: of a run, relative.
      run_s: what a run takes.
    """

    step_s: Callable[[tuple[str, ...]], float]
    noise: float = 0.0
    run_s: float = 10.0
    step: SeenStep | None = STEP
    now_s: float = 1000.0
    ran: list[tuple[str, ...]] = field(default_factory=list)
    luck: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now_s

    def run(self, manner: Manner, place: Place, words: tuple[str, ...], **_: object) -> RunResult:
        self.now_s += self.run_s
        self.ran.append(words[1:])
        seconds = self.step_s(words[1:])
        if not math.isfinite(seconds):
            return Failed(stage="run", reason="exit code 1")
        seconds *= math.exp(self.luck.gauss(0.0, self.noise))
        return FinishedRun(
            samples_s=(seconds,) * manner.steps,
            losses=(3.0, 2.0, 1.0),
            loss_dtype="float32",
            step=self.step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A world and a folder in which searches happen."""

    world: World
    folder: Path

    def search(self, budget_s: float, *, baseline: str = "tp:8", top: int = 4) -> SearchResult:
        return search_command(
            self.request(budget_s, baseline, top), Silent(), clock=self.world.clock
        )

    def request(self, budget_s: float, baseline: str, top: int) -> SearchRequest:
        return SearchRequest(
            subject=read_command("python {fsdp} {tp}"),
            again=SearchCommand(options=(("command", "python {fsdp} {tp}"),)),
            target="cpu:8",
            space="",
            budget_s=budget_s,
            top=top,
            baseline=baseline,
            rules=str(self.folder / "rules.toml"),
            results=self.folder / "results",
            timeout_s=100.0,
            memory_limit_bytes=2**30,
        )

    def labels(self) -> Counter[str]:
        (study,) = (self.folder / "results").iterdir()
        with open_study(parse_storage("", study), study.name, create=False) as opened:
            return Counter(one.run.partition("-")[0] for one in opened.measure.trials())


def by_tp(*seconds: float) -> Callable[[tuple[str, ...]], float]:
    """Seconds for tp 1, 2, 4, 8."""
    return lambda words: seconds[int(words[1]).bit_length() - 1]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[World], Scene]:
    def make(world: World) -> Scene:
        monkeypatch.setattr(search_module, "run", world.run)
        monkeypatch.chdir(tmp_path)
        return Scene(world=world, folder=tmp_path)

    return make


def mesh_of(result: SearchResult) -> str:
    best = best_of(result)
    assert best is not None
    return best.plan.mesh


def test_the_fastest_of_many_wins_though_runs_are_noisy(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.00, 1.07, 1.3, 1.5), noise=0.02)
    here = scene(world)
    result = here.search(3600.0)
    assert mesh_of(result) == "fsdp:8"
    (verification,) = result.verifications
    assert verification.speedup == pytest.approx(1.5, rel=0.05) and not verification.is_tie
    assert "all that came near are decided" in result.footer.stop_reason
    # Whoever is shown to be slower is not run to the end of the race.
    rounds = Counter(world.ran)
    assert rounds["2", "4"] < rounds["8", "1"]


@pytest.mark.slow
def test_what_only_ties_with_the_baseline_does_not_replace_it(
    scene: Callable[[World], Scene],
) -> None:
    here = scene(World(step_s=by_tp(0.999, 1.0, 1.0, 1.0), noise=0.02))
    result = here.search(3600.0)
    assert mesh_of(result) == "tp:8"
    (verification,) = result.verifications
    assert verification.baseline == "tp:8" and verification.speedup == 1.0
    (most,) = verification.most_faster
    assert most < 0.05


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("budget_s", [60.0, 200.0, 400.0])
def test_a_budget_is_kept(scene: Callable[[World], Scene], budget_s: float) -> None:
    world = World(step_s=by_tp(1.0, 1.1, 1.2, 1.3), noise=0.01)
    here = scene(world)
    result = here.search(budget_s)
    spent_s = world.now_s - 1000.0
    assert spent_s <= max(1.2 * budget_s, budget_s + 15.0)
    assert best_of(result) is not None
    labels = here.labels()
    assert labels["first"] >= 2
    assert bool(result.verifications) == (labels["fresh"] >= 2 * 3)


def test_a_race_without_time_goes_on_with_the_next_search(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.00, 1.02, 1.04, 1.3), noise=0.005)
    here = scene(world)
    first = here.search(200.0)
    assert "the time was used up before" in first.footer.stop_reason
    raced = here.labels()["race"]
    assert raced > 0
    second = here.search(3600.0)
    assert "the time was used up" not in second.footer.stop_reason
    assert here.labels()["race"] > raced
    assert mesh_of(second) == "fsdp:8"
    # Each plan was explored once, in both searches together.
    assert here.labels()["first"] == 4
    ran = len(world.ran)
    here.search(3600.0)
    assert len(world.ran) == ran


def test_a_plan_that_is_found_later_may_win(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.5, 1.0, 0.5, 1.6), noise=0.005)
    here = scene(world)
    first = here.search(30.0)
    assert first.funnel.waiting > 0
    assert mesh_of(first) != "fsdp:2,tp:4"
    second = here.search(3600.0)
    assert mesh_of(second) == "fsdp:2,tp:4"
    assert not second.funnel.waiting
    assert "fsdp = 2, tp = 4" in (here.folder / "rules.toml").read_text()


def test_a_baseline_that_fails_is_no_yardstick(scene: Callable[[World], Scene]) -> None:
    here = scene(World(step_s=by_tp(1.0, 1.3, 1.4, math.inf)))
    result = here.search(3600.0)
    assert mesh_of(result) == "fsdp:8"
    (verification,) = result.verifications
    assert verification.baseline == ""
    (failed,) = [one for one in result.candidates if one.is_baseline]
    assert isinstance(failed.outcome, Failed)


def test_a_winner_that_fails_later_is_not_exported(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.0, 3.0, 3.0, 2.0))
    here = scene(world)
    before = world.step_s
    # From its second run on, which is the first of the confirmation.
    world.step_s = lambda words: (
        math.inf if words == ("8", "1") and world.ran.count(words) > 1 else before(words)
    )
    result = here.search(3600.0, top=1)
    assert mesh_of(result) == "tp:8"
    (failed,) = [one for one in result.candidates if one.plan.mesh == "fsdp:8"]
    assert isinstance(failed.outcome, Failed)
    assert "tp = 8" in (here.folder / "rules.toml").read_text()


def test_a_single_run_has_the_interval_that_the_others_teach(
    scene: Callable[[World], Scene],
) -> None:
    here = scene(World(step_s=by_tp(1.0, 1.1, 9.0, 1.3), noise=0.03))
    result = here.search(3600.0, top=2)
    (far,) = [one for one in result.candidates if one.plan.mesh == "fsdp:2,tp:4"]
    assert isinstance(far.outcome, Measured) and len(far.outcome.rounds_s) == 1
    low, high = far.outcome.interval_s
    half = math.log(high / low) / 2
    # Two standard deviations of a run, and a little more as these are estimated.
    assert 0.02 < half < 0.15
    assert far.standing.verdict == "slower"


def test_what_was_timed_is_told_once(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.0, 2.0, 3.0, 4.0))
    here = scene(world)
    first = here.search(30.0)
    told = "timed is `step` (train.py:7), 1.00 MiB of arguments"
    assert first.notices.count(told) == 1


def test_a_command_that_ignores_its_mesh_is_told_of(scene: Callable[[World], Scene]) -> None:
    alone = SeenStep(name="step", argument_bytes=4, devices=1)
    here = scene(World(step_s=by_tp(1.0, 2.0, 3.0, 4.0), step=alone))
    result = here.search(30.0)
    notice = "tp:8: the step ran on 1 of 8 devices: does the command use its mesh?"
    assert notice in result.notices


def test_another_function_than_before_is_told_of(scene: Callable[[World], Scene]) -> None:
    world = World(step_s=by_tp(1.0, 2.0, 3.0, 4.0))
    here = scene(world)
    here.search(30.0)
    world.step = SeenStep(name="evaluate", argument_bytes=4, devices=8)
    result = here.search(30.0)
    assert any("timed is `evaluate`" in one and "another" in one for one in result.notices)
