"""The measure rung from the race to the decision, on a machine that is played."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from automesh.jsonio import from_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, Failure, Measured
from automesh.program.capture.nouns import Capture, ScriptMesh, ScriptStep, SourceLine
from automesh.program.infer.search.layout import Layout
from automesh.program.nouns import StepRef, VisitAnswer
from automesh.program.script.sources import NOTHING_READ
from automesh.report.estimates import Estimates
from automesh.report.progress import Silent
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.context import SearchContext
from automesh.tuner.measure.decision import Decision, Records
from automesh.tuner.measure.rung import UNRACED, MeasureRung
from automesh.tuner.measure.seen_once import StoredVisits, seen_once
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.study import Study, open_study, parse_storage
from automesh.worker.messages import VisitJob
from tests.tuner.choose.test_ranking import compiled
from tests.tuner.measure.test_schedule import CRASH, RULES, SUBJECT, FakePool, plan

BASE, A, B, C, D = (plan(size) for size in (1, 2, 4, 8, 16))
SOURCE, VERSIONS = "source", (("jax", "1"),)


@dataclass(kw_only=True)
class LuckyPool(FakePool):
    """A machine on which each process is good or bad for a plan by chance.

    Attributes:
      spread: of a process's luck, relative.
      start_s: what a process takes to start.
    """

    spread: float = 0.0
    start_s: float = 4.0
    lucky: dict[Plan, float] = field(default_factory=dict)
    truth: dict[Plan, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.truth = dict(self.step_s)

    def recycle(self) -> None:
        super().recycle()
        self.now_s += self.start_s
        for one, step_s in self.truth.items():
            self.step_s[one] = step_s * math.exp(self.luck.gauss(0.0, self.spread))

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        self.step_s.setdefault(job.plan, 0.2)
        return super().run(job, timeout_s)


@dataclass(kw_only=True)
class Scene:
    """A study in a folder, which several searches go on with.

    Attributes:
      room_bytes: of a device; with little, plans are visited one after the other.
      outside: plans that the space does not have any more.
      notices: what the user was told.
      step: that is searched.
      uncompiled: plans that this search has no time to compile.
    """

    folder: Path
    pool: LuckyPool
    room_bytes: int
    baseline: tuple[Plan, ...] = (BASE,)
    finalists: Sequence[Plan] = ()
    endings: list[str] = field(default_factory=list)
    outside: frozenset[str] = frozenset()
    notices: list[str] = field(default_factory=list)
    step: StepRef = SUBJECT.step
    uncompiled: frozenset[Plan] = frozenset()

    def search(self, budget_s: float, *, challengers: Sequence[Plan] = ()) -> Decision | None:
        plans = tuple(self.pool.truth)
        compiles = tuple(one for one in plans if one not in self.uncompiled)
        waiting = list(challengers)

        def challenge(*_: object) -> list[Plan]:
            found, waiting[:] = list(waiting), []
            return found

        with self.open() as study:
            notebook = self.notebook(study)
            preparation = SimpleNamespace(
                step=self.step,
                inspection=SimpleNamespace(sources=(), reads=NOTHING_READ),
                device_memory=DeviceMemory(limit_bytes=self.room_bytes, reserve_bytes=0),
            )
            rung = MeasureRung.of(
                SearchContext(
                    request=cast(Any, SimpleNamespace(budget_s=budget_s)),
                    preparation=cast(Any, preparation),
                    legal=cast(Any, SimpleNamespace(baseline=self.baseline, plans=plans)),
                    cache_dir=Path("/cache"),
                    estimates=Estimates(),
                    study=study,
                    notebook=notebook,
                    progress=_Listening(self.notices),
                    workers=1,
                    started_s=self.pool.now_s,
                    clock=self.pool.clock,
                ),
                cast(Any, self.pool),
                compiled={one: compiled(1.0, "f") for one in compiles},
                finalists=self.finalists or compiles,
                challenge=challenge,
                rules=RULES,
            )
            self.endings.append(rung.run())
            return notebook.decision()

    def open(self) -> Study:
        return open_study(
            parse_storage("", self.folder), "here", source_hash=SOURCE, versions=VERSIONS
        )

    def notebook(self, study: Study) -> Notebook:
        return Notebook(study=study, source_hash=SOURCE, versions=VERSIONS, outside=self.outside)

    def records(self) -> Records:
        with self.open() as study:
            noted = self.notebook(study).noted("records")
        return Records() if noted is None else from_json(noted, Records)

    def visits(self) -> set[Plan]:
        with self.open() as study:
            stored = self.notebook(study).read("visits", StoredVisits)
        return set() if stored is None else {one.plan for one in stored.calibrations}

    def outcomes(self) -> dict[Plan, object]:
        with self.open() as study:
            return {one.plan: one.outcome for one in study.measure.trials()}


class _Listening(Silent):
    def __init__(self, notices: list[str]) -> None:
        self._notices = notices

    def notice(self, text: str) -> None:
        self._notices.append(text)


@pytest.fixture(params=[2**50, 1], ids=["in turns", "one by one"])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Scene]:
    def make(step_s: dict[Plan, float], **machine: Any) -> Scene:
        pool = LuckyPool(step_s=step_s, **machine)
        return Scene(folder=tmp_path, pool=pool, room_bytes=request.param)

    return make


def test_the_fastest_is_adopted_and_everything_is_decided(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.12, C: 0.2, D: 0.3}, spread=0.01)
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert not found.undecided
    assert {plan: one.verdict for plan, one in found.comparisons} == dict.fromkeys(
        (BASE, B, C, D), "slower"
    )
    assert found.verification.speedup == pytest.approx(1.3, rel=0.03)
    assert here.endings == ["all of them are decided"]
    assert all(isinstance(one, Measured) for one in here.outcomes().values())
    # Nothing is left to do, and nothing is done.
    visits = len(here.pool.jobs)
    assert here.search(600.0) == found
    assert len(here.pool.jobs) == visits
    assert here.endings[-1] == ""


def test_a_script_without_a_mesh_is_compared_with_one_device_and_its_time_is_told(
    scene: Callable[..., Scene],
) -> None:
    here = scene({A: 0.2, B: 0.1, BASE: 0.15}, spread=0.01)
    line = SourceLine(file="train.py", line=1)
    capture = Capture(
        mesh=ScriptMesh(axes=(("device", 1),), axis_types=("auto",), made_at=line),
        step=ScriptStep(name="step", defined_at=line, called_at=line, argument_bytes=0),
        layout=Layout(axes=("dp",), slow=(), batch_axes=(), logical=(), arguments=()),
    )
    here.baseline, here.finalists = (A,), (A, B)
    here.step = replace(SUBJECT.step, entry=replace(SUBJECT.step.entry, capture=capture))
    assert here.search(600.0) is not None
    with here.open() as study:
        name = here.notebook(study).reference()
    said = (
        r"the step on one device, which takes 1\d\d ms \(one device is right: dp:2 takes 2\d\d ms\)"
    )
    assert re.fullmatch(said, name), name


@pytest.mark.slow
def test_a_search_that_is_cut_goes_on_where_it_was_and_decides(
    scene: Callable[..., Scene],
) -> None:
    """No round, no first visit and no process is made twice."""
    here = scene({BASE: 0.1, A: 0.095, B: 0.13, C: 0.14, D: 0.2}, spread=0.03)
    first = here.search(60.0)
    assert first is not None and first.undecided
    assert all(one.more_s > 0 for _, one in first.undecided)
    assert "the time was used up before" in here.endings[0]
    seen = [here.records()]
    raced = dict(first.comparisons).keys() | {first.winner}
    for _ in range(2):
        before = len(here.pool.jobs)
        found = here.search(300.0)
        assert found is not None
        seen.append(here.records())
        assert seen[-1].races == seen[-2].races
        assert seen[-1].processes[: len(seen[-2].processes)] == seen[-2].processes
        # Losses are recorded at first visits alone.
        assert not any(job.loss_steps for job in here.pool.jobs[before:])
    assert len(seen[2].processes) > len(seen[0].processes)
    assert found.winner == A
    assert not found.undecided
    assert dict(found.comparisons).keys() | {found.winner} == raced


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("budget_s", [30.0, 60.0, 90.0, 150.0, 400.0])
def test_the_budget_is_kept(scene: Callable[..., Scene], budget_s: float) -> None:
    here = scene({BASE: 0.1, A: 0.099, B: 0.098, C: 0.1, D: 0.1}, spread=0.03)
    here.search(budget_s)
    assert here.pool.now_s <= max(1.2 * budget_s, budget_s + 15.0)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("hanging", [BASE, A, C])
def test_a_plan_that_hangs_at_its_first_visit_does_not_outlast_the_budget(
    scene: Callable[..., Scene], hanging: Plan
) -> None:
    """The time that a visit may take is 600 s; a search of a minute does not wait for that."""
    here = scene({BASE: 0.1, A: 0.08, B: 0.1, C: 0.1, D: 0.1})
    here.pool.hangs = {(hanging, 0)}
    here.search(60.0)
    assert here.pool.now_s <= 80.0  # two others are run all the same
    # Nobody knows yet whether it hangs or is slow: it is visited again, and runs.
    assert here.outcomes()[hanging] is None
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert here.outcomes()[hanging] is not None


def test_without_a_baseline_a_reference_that_hangs_is_looked_for_again(
    scene: Callable[..., Scene],
) -> None:
    here = scene({A: 0.08, B: 0.1})
    here.baseline = ()
    single = replace(A, axes=tuple(replace(axis, ici=1) for axis in A.axes))
    here.pool.hangs = {(single, 0)}
    here.search(60.0)
    assert here.pool.now_s <= 80.0  # two others are run all the same
    here.search(600.0)
    assert here.outcomes().keys() >= {A, B}
    assert all(
        isinstance(one, Measured) and one.numerics == "agree" for one in here.outcomes().values()
    )


@pytest.mark.slow
def test_another_baseline_that_hangs_takes_nothing_from_what_is_known(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.1, A: 0.08, B: 0.1, C: 0.12})
    here.finalists = (BASE, A, B)
    first = here.search(600.0)
    assert first is not None and first.winner == A
    before = here.outcomes()
    here.baseline, here.finalists = (C,), (BASE, A, B, C)
    here.pool.hangs = {(C, here.pool.visits_to(C))}
    single = replace(BASE, axes=tuple(replace(axis, ici=1) for axis in BASE.axes))
    here.pool.hangs |= {(single, here.pool.visits_to(single)), (BASE, here.pool.visits_to(BASE))}
    begun_s = here.pool.now_s
    here.search(60.0)
    assert here.pool.now_s - begun_s <= 75.0
    assert {plan: here.outcomes()[plan] for plan in before} == before
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert {plan: one.verdict for plan, one in found.comparisons}[C] == "slower"


@pytest.mark.slow
def test_who_dies_and_has_no_time_for_another_try_has_died(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.1})
    here.pool.script = {(BASE, 0): CRASH}
    here.pool.compile_s = 80.0
    here.search(60.0)
    assert here.outcomes() == {BASE: CRASH}
    assert here.endings == ["no finalist could be measured"]


def test_a_budget_too_small_for_anything_is_told_and_nothing_is_lost(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.1, A: 0.08})
    for _ in range(12):
        found = here.search(12.0)
        if found is not None:
            break
        assert "run the same command to go on" in here.endings[-1]
    assert found is not None and found.winner == A


@pytest.mark.slow
def test_challengers_are_raced_with_the_time_that_is_left(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.12, B: 0.13, C: 0.1, D: 0.2}, spread=0.005)
    here.finalists = (BASE, A, B)
    found = here.search(900.0, challengers=[C, D])
    assert found is not None and found.winner == C
    assert dict(found.comparisons).keys() == {BASE, A, B, D}
    assert not found.undecided


def test_a_plan_that_fails_in_a_fresh_process_is_not_exported(
    scene: Callable[..., Scene],
) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.12}, spread=0.005)
    here.pool.script = {(A, number): CRASH for number in range(12, 99)}
    found = here.search(600.0)
    assert found is not None and found.winner == B
    assert dict(found.failed) == {A: CRASH}
    again = here.search(600.0)
    assert again == found


def test_a_baseline_that_fails_is_no_yardstick(scene: Callable[..., Scene]) -> None:
    refused = Failed(stage="build", reason="no")
    here = scene({C: 0.13, A: 0.1, B: 0.12}, spread=0.005)
    here.baseline = (C,)
    here.pool.script = {(C, number): refused for number in range(99)}
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert found.verification.baseline == ""


def test_without_a_baseline_the_best_is_measured_afresh(scene: Callable[..., Scene]) -> None:
    here = scene({A: 0.1, B: 0.12, C: 0.11}, spread=0.005)
    here.baseline = ()
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert {one.verdict for _, one in found.comparisons} == {"slower"}


def test_one_plan_alone_is_measured_in_five_processes(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.1})
    found = here.search(600.0)
    assert found is not None and found.winner == BASE
    assert found.verification.processes == 5
    assert found.verification.most_faster == (0.0,)


def test_another_baseline_is_raced_with_what_is_known(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1, B: 0.115}, spread=0.005)
    here.finalists = (BASE, A)
    assert here.search(600.0) is not None
    here.baseline, here.finalists = (B,), (B, BASE, A)
    found = here.search(600.0)
    assert found is not None and found.winner == A
    assert found.verification.baseline == str(B)
    assert found.verification.speedup == pytest.approx(1.15, rel=0.02)


@pytest.mark.slow
def test_an_interrupt_keeps_what_the_processes_have_said(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.13, A: 0.1}, spread=0.005)
    rest = here.pool.recycle
    ran = 0

    def recycle() -> None:
        nonlocal ran
        ran += 1
        if ran == 5:
            raise KeyboardInterrupt
        rest()

    here.pool.recycle = recycle  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        here.search(600.0)
    done = len(here.records().processes)
    assert done >= 3
    here.pool.recycle = rest  # type: ignore[method-assign]
    with here.open() as study:
        found = Notebook(study=study, source_hash=SOURCE, versions=VERSIONS).decision()
    assert found is not None and found.winner == A


@pytest.mark.slow
@pytest.mark.parametrize(("budget_s", "least", "most"), [(105.0, 2, 4), (600.0, 8, 8)])
def test_where_time_is_short_processes_are_shorter_and_enough(
    scene: Callable[..., Scene], budget_s: float, least: int, most: int
) -> None:
    """As on an H100, where a model of 100 million weights takes eight seconds to set up."""
    here = scene({BASE: 0.372, A: 0.345}, compile_s=8.0)
    found = here.search(budget_s)
    assert found is not None and found.winner == A
    passes = [one.passes for one in here.records().processes]
    assert len(passes) >= 3 and min(passes) == least and max(passes) <= most
    assert here.pool.now_s < 1.05 * budget_s


def test_a_process_that_was_slow_for_its_passes_is_expected_to_be_so_again(
    scene: Callable[..., Scene],
) -> None:
    """Its start takes six times as long as is known before it."""
    here = scene({BASE: 0.372, A: 0.345}, compile_s=8.0, start_s=24.0)
    assert here.search(180.0) is not None
    assert len({one.passes for one in here.records().processes[1:]}) == 1
    assert here.pool.now_s < 185.0


def test_no_time_for_a_race_says_how_much_it_would_take(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.372, A: 0.345}, compile_s=8.0)
    assert here.search(15.0) is None
    # Three times four seconds of a start, eight for each plan, and two passes over both.
    told = re.search(
        r"no time for a race, whose 3 fresh processes .* about (\d+) s", here.endings[0]
    )
    assert told is not None and 60 <= int(told[1]) <= 80
    assert f"(at its first visit {A} took 34" in here.endings[0]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("budget_s", [10.0, 40.0, 60.0, 90.0, 120.0, 150.0])
def test_a_script_that_is_slow_to_load_is_loaded_in_every_process(
    scene: Callable[..., Scene], budget_s: float
) -> None:
    """As MaxText on an H200: 18 s until its step is built for the first time. A process was said to
    take seven seconds, was begun, and was cut off before it had a figure."""
    here = scene({A: 0.23}, load_s=18.0, compile_s=1.0)
    here.baseline = ()
    found = here.search(budget_s)
    assert here.pool.processes in (1, 1 + len(here.records().processes))
    if told := re.search(r"3 fresh processes .* about (\d+) s", here.endings[0]):
        assert 60 <= int(told[1]) <= 80
    assert bool(told) == (not here.records().processes) == (budget_s == 10.0)
    assert (found is not None) == (budget_s >= 90.0)
    assert here.pool.now_s <= budget_s + 12.0


def test_a_process_after_those_that_a_rule_needs_is_no_longer_than_the_time_left(
    scene: Callable[..., Scene],
) -> None:
    """Nothing is needed any more, and the next look is out of reach."""
    here = scene({BASE: 0.372, A: 0.345}, compile_s=8.0, spread=0.03)
    assert here.search(244.0) is not None
    assert len(here.records().processes) >= 5
    assert here.pool.now_s <= 244.0


# As on an H200: a process takes six seconds to start, a plan eight to set up, and half of that each
# time that its state is made again, for which no two have room.
SLOW = {"setup_s": 4.0, "compile_s": 4.0, "start_s": 6.0}
REMATS = {A: 0.398, B: 0.42, C: 0.466, D: 0.48, BASE: 0.492}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("baseline", "budget_s"), [((), 80.0), ((BASE,), 130.0)])
def test_without_time_for_a_race_what_the_first_visits_saw_fastest_is_measured(
    scene: Callable[..., Scene], baseline: tuple[Plan, ...], budget_s: float
) -> None:
    here = scene(REMATS, **SLOW)
    here.baseline = baseline
    found = here.search(budget_s)
    assert found is not None and found.winner == A
    assert here.endings == [UNRACED]
    assert not here.records().races
    assert dict(found.comparisons).keys() == {*baseline}
    assert here.pool.now_s <= budget_s + 12.0
    # The same command races all of them, and repeats no process.
    processes = here.records().processes
    visits = {plan: here.pool.visits_to(plan) for plan in REMATS}
    found = here.search(900.0)
    assert found is not None and found.winner == A
    assert not found.undecided
    assert dict(found.comparisons).keys() == {*REMATS} - {A}
    assert here.records().processes[: len(processes)] == processes
    assert all(here.pool.visits_to(plan) > seen for plan, seen in visits.items())
    assert all(isinstance(one, Measured) for one in here.outcomes().values())
    assert here.endings[-1] == "all of them are decided"


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("budget_s", range(80, 260, 20))
def test_whatever_the_time_is_used_for_a_rule_comes_first(
    scene: Callable[..., Scene], budget_s: int
) -> None:
    here = scene(REMATS, **SLOW)
    here.baseline = ()
    found = here.search(float(budget_s))
    assert found is not None and found.winner == A
    assert here.pool.now_s <= budget_s + 15.0


def test_a_round_is_expected_to_take_as_long_as_making_all_states_does(
    scene: Callable[..., Scene],
) -> None:
    """A race that is begun has the time for a round: half of one is for nothing."""
    here = scene(REMATS, **SLOW)
    here.baseline = ()
    here.search(170.0)
    rounds = [values for race in here.records().races for _, values in race.rounds]
    with here.open() as study:
        begun = [trial.medians_s(study.owner.machine) for trial in study.measure.trials()]
    assert all(rounds) and bool(rounds) == any(begun)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("budget_s", [40.0, 80.0, 120.0])
def test_whatever_is_cut_short_the_same_command_finds_the_fastest_of_all(
    scene: Callable[..., Scene], budget_s: float
) -> None:
    """As where a plan takes longer to set up than a third of the budget: races of two at a time."""
    here = scene(REMATS, setup_s=20.0, compile_s=1.0, start_s=6.0)
    here.baseline = ()
    for _ in range(6):
        here.search(budget_s)
        assert "all of them are decided" not in here.endings[-1]
    found = here.search(3000.0)
    assert found is not None and found.winner == A
    assert dict(found.comparisons).keys() == {*REMATS} - {A}
    assert here.endings[-1] == "all of them are decided"


@pytest.mark.slow
def test_finalists_that_nobody_has_visited_are_not_said_to_be_decided(
    scene: Callable[..., Scene],
) -> None:
    here = scene({plan(2**n): 0.4 + 0.01 * n for n in range(10)}, **SLOW)
    here.baseline = (plan(512),)
    for _ in range(3):
        found = here.search(80.0)
        known = 0 if found is None else 1 + len(found.comparisons) - len(found.undecided)
        assert known == 10 or here.endings[-1] != "all of them are decided"


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [60.0, 80.0])
def test_every_search_gets_on_where_a_round_takes_longer_than_its_budget(
    scene: Callable[..., Scene], budget_s: float
) -> None:
    here = scene(
        {plan(2**n): 0.4 + 0.01 * n for n in range(10)}, setup_s=10.0, compile_s=2.0, start_s=4.0
    )
    here.baseline = ()
    for _ in range(8):
        before = len(here.pool.jobs)
        found = here.search(budget_s)
        assert len(here.pool.jobs) > before
    assert found is not None and found.winner == plan(1)


def test_that_no_finalist_runs_is_not_put_down_to_the_time(scene: Callable[..., Scene]) -> None:
    here = scene({A: 0.1, B: 0.12})
    here.baseline = ()
    here.pool.script = {(one, number): CRASH for one in (A, B) for number in range(99)}
    for _ in range(2):
        assert here.search(600.0) is None
        assert here.endings[-1] == "no finalist could be measured"


def test_who_fails_in_a_process_without_a_race_has_failed(scene: Callable[..., Scene]) -> None:
    here = scene(REMATS, **SLOW)
    here.baseline = ()
    here.pool.script = {(A, number): CRASH for number in range(1, 99)}
    here.search(80.0)
    assert not here.records().races
    assert here.outcomes()[A] == CRASH


@pytest.mark.parametrize(("setup_s", "ran"), [(10.0, [BASE, A]), (40.0, [BASE])])
def test_where_all_time_is_used_up_two_plans_are_run_once_all_the_same(
    scene: Callable[..., Scene], setup_s: float, ran: list[Plan]
) -> None:
    """One alone was run, which says nothing of the search's question: is another one faster."""
    here = scene({BASE: 0.1, A: 0.08, B: 0.09}, spread=0.0, setup_s=setup_s)
    here.pool.now_s = 1000.0
    assert here.search(-1000.0) is None
    assert here.pool.now_s < 1000.0 + 60.0
    with here.open() as study:
        visits = here.notebook(study).read("visits", StoredVisits)
    assert [visited.plan for visited in visits.calibrations] == ran
    said = [notice for notice in here.notices if "is run once all the same" in notice]
    assert len(said) == len(ran)
    programs = {one: compiled(1.0, "f") for one in ran}
    found, comparisons = seen_once(visits, programs, {})
    assert set(found) == set(ran) and len(comparisons) == len(ran) - 1
    measured = [one for one in found.values() if isinstance(one, Measured)]
    assert len(measured) == len(ran)
    assert {one.numerics for one in measured} <= {"reference", "agree"}


def test_who_is_run_alone_is_the_reference(scene: Callable[..., Scene]) -> None:
    here = scene({BASE: 0.1}, spread=0.0)
    here.pool.now_s = 1000.0
    assert here.search(-1000.0) is None
    with here.open() as study:
        visits = here.notebook(study).read("visits", StoredVisits)
    found, comparisons = seen_once(visits, {BASE: compiled(1.0, "f")}, {})
    (outcome,) = found.values()
    assert isinstance(outcome, Measured) and not outcome.confirmed
    assert outcome.numerics == "reference" and comparisons == ()
    alone = replace(visits, references=())
    (outcome,) = seen_once(alone, {BASE: compiled(1.0, "f")}, {})[0].values()
    assert isinstance(outcome, Measured) and outcome.numerics == "not_compared"


def test_first_visits_are_ranked_with_what_would_decide(scene: Callable[..., Scene]) -> None:
    """Before, they were a clause of the last sentence, and the table had predictions alone."""
    here = scene({BASE: 0.1, A: 0.08}, spread=0.0)
    here.search(600.0)
    with here.open() as study:
        visits = here.notebook(study).read("visits", StoredVisits)
    programs = {one: compiled(1.0, "f") for one in (BASE, A)}
    found, comparisons = seen_once(visits, programs, {})
    assert set(found) == {BASE, A}
    ((plan, other),) = comparisons
    assert (plan, other.verdict) == (BASE, "undecided")
    assert other.ratio == pytest.approx(1.25, rel=0.1) and other.more_s > 0.0
    assert seen_once(visits, programs, found)[0] == {}


def test_visits_beside_a_rule_are_ranked_by_the_visit_of_its_plan(
    scene: Callable[..., Scene],
) -> None:
    """Before, a plan that had run was shown as "predicted, not measured" beside the exported one.

    The processes of the exported plan ran at another time (here the machine was half as fast), so
    only the visits compare.
    """
    here = scene({BASE: 0.1, A: 0.08}, spread=0.0)
    here.search(600.0)
    with here.open() as study:
        visits = here.notebook(study).read("visits", StoredVisits)
    programs = {one: compiled(1.0, "f") for one in (BASE, A)}
    both, _ = seen_once(visits, programs, {})
    (exported,) = [one for plan, one in both.items() if plan == A]
    assert isinstance(exported, Measured)
    measured = {A: replace(exported, step_s=0.16, confirmed=True)}
    found, comparisons = seen_once(visits, programs, measured, winner=[A])
    assert set(found) == {BASE}
    ((plan, other),) = comparisons
    assert (plan, other.verdict, other.basis) == (BASE, "undecided", "first visits")
    assert other.ratio == pytest.approx(1.25, rel=0.1) and other.more_s > 0.0
    assert seen_once(visits, programs, measured, winner=[B]) == ({}, ())
