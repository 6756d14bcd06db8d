"""Visits, the race's driver and the confirmation, against a pool that plays a machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failed, Failure, OutOfMemory, TimedOut
from automesh.program.nouns import Entry, StepRef, VisitAnswer
from automesh.program.script.sources import hash_of_file
from automesh.tuner.measure.fresh_processes import (
    MOST_PASSES,
    ProcessRun,
    passes_of,
    process_s_of,
    run_process,
)
from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.racing import RaceReport, run_race
from automesh.tuner.measure.schedule import (
    Calibration,
    Course,
    Subject,
    VisitRules,
    calibrate,
    record_losses,
    visit,
    visit_job,
)
from automesh.tuner.study.retrace import OTHER_PROGRAM
from automesh.worker.messages import VisitJob

SUBJECT = Subject(
    step=StepRef(
        entry=Entry(kind="script", location="/train.py"),
        axis_types=("auto",),
        facts=(("batch", 8),),
    ),
    cache_dir="/cache",
)
RULES = VisitRules()
CRASH = Failed(stage="run", reason="the worker died of signal 11")
REFUSED = Failed(stage="build", reason="ValueError: no")
NO_MEMORY = OutOfMemory(stage="run", needed_bytes=2, limit_bytes=1, detail="")


def plan(size: int) -> Plan:
    return Plan(axes=(MeshAxis(name="dp", ici=size),))


A, B, C = plan(1), plan(2), plan(4)


@dataclass(kw_only=True)
class FakePool:
    """Plays a machine on a clock of its own.

    Attributes:
      step_s: true seconds per step of each plan.
      overhead_s: what each sample costs beyond its steps.
      setup_s: what each visit costs before its first sample: its state.
      compile_s: what comes on top at the first visit in a process.
      load_s: what a process needs once before that, for the script and what it imports.
      script: failures or odd answers by plan and number of the visit to it, from 0.
      hangs: visits by plan and number that end only with their timeout.
      slowness: what all steps take at a time on the clock, relative.
      kept: plans whose states are there.
      most_kept: of these, so many fit into the memory.
    """

    step_s: dict[Plan, float]
    overhead_s: float = 0.0
    setup_s: float = 0.1
    compile_s: float = 2.0
    load_s: float = 0.0
    noise: float = 0.005
    script: dict[tuple[Plan, int], Failure | VisitAnswer] = field(default_factory=dict)
    hangs: set[tuple[Plan, int]] = field(default_factory=set)
    now_s: float = 0.0
    jobs: list[VisitJob] = field(default_factory=list)
    processes: int = 1
    built: set[Plan] = field(default_factory=set)
    fingerprint: str = "f"
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    slowness: Callable[[float], float] = lambda _: 1.0
    kept: set[Plan] = field(default_factory=set)
    most_kept: int = 1000

    def clock(self) -> float:
        return self.now_s

    def visits_to(self, plan: Plan) -> int:
        return sum(job.plan == plan for job in self.jobs)

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        key = (job.plan, self.visits_to(job.plan))
        self.jobs.append(job)
        if key in self.hangs:
            self.now_s += timeout_s
            return TimedOut(stage="run", limit_s=timeout_s)
        is_kept = job.plan in self.kept
        if not is_kept and not job.keep:
            self.kept.clear()
        setup_s = 0.0 if is_kept else self.setup_s
        setup_s += 0.0 if job.plan in self.built else self.compile_s
        load_s = 0.0 if self.built else self.load_s
        if load_s > timeout_s:
            self.now_s += timeout_s
            return TimedOut(stage="build", limit_s=timeout_s)
        self.built.add(job.plan)
        self.now_s += load_s + setup_s
        if len(self.kept | {job.plan}) > self.most_kept:
            return NO_MEMORY
        (self.kept.add if job.keep else self.kept.discard)(job.plan)
        if key in self.script:
            return self.script[key]
        step_s = self.step_s[job.plan] * self.slowness(self.now_s)
        samples: list[float] = []
        for _ in range(job.samples):
            noisy_s = step_s * (1 + self.luck.uniform(-self.noise, self.noise))
            samples.append(noisy_s + self.overhead_s / job.steps)
            self.now_s += samples[-1] * job.steps
        return VisitAnswer(
            samples_s=tuple(samples),
            losses=tuple(3.0 - 0.1 * step for step in range(job.loss_steps)),
            loss_dtype="float32",
            values="synthetic",
            setup_s=setup_s,
            state_s=0.0 if is_kept else self.setup_s,
            start_s=self.load_s,
            peak_bytes=0,
            fingerprint=self.fingerprint,
        )

    def recycle(self) -> None:
        self.processes += 1
        self.built.clear()
        self.kept.clear()


def calibrated(pool: FakePool, *plans: Plan) -> dict[Plan, Calibration]:
    found: dict[Plan, Calibration] = {}
    for one in plans:
        calibration = calibrate(pool, SUBJECT, one, rules=RULES, clock=pool.clock)
        assert isinstance(calibration, Calibration)
        found[one] = calibration
    return found


def race_of(
    pool: FakePool,
    race: Race[Plan],
    calibrations: dict[Plan, Calibration],
    *,
    deadline_s: float = 1e9,
    first_round_s: float = 0.0,
    on_round: Callable[[Plan, int, float], None] = lambda plan, index, value_s: None,
    subject: Subject = SUBJECT,
) -> RaceReport:
    return run_race(
        pool,
        subject,
        race,
        calibrations,
        rules=RULES,
        deadline_s=deadline_s,
        first_round_s=first_round_s,
        clock=pool.clock,
        on_round=on_round,
        on_failure=lambda plan, failure: None,
    )


def verdicts(report: RaceReport) -> list[str]:
    return [standing.state for standing in report.standings]


@pytest.mark.parametrize(
    ("step_s", "overhead_s", "samples"),
    [(2.5e-3, 5e-3, 3), (5e-3, 1e-4, 3), (0.02, 1e-4, 3), (0.3, 0.0, 3), (4.0, 0.0, 1)],
)
def test_a_sample_lasts_long_enough(step_s: float, overhead_s: float, samples: int) -> None:
    pool = FakePool(step_s={A: step_s}, overhead_s=overhead_s)
    found = calibrated(pool, A)[A]
    sample_s = found.steps * step_s + overhead_s
    assert sample_s >= 0.75 * RULES.sample_s
    assert found.steps == 1 or sample_s <= 2 * RULES.sample_s
    assert found.samples == samples
    assert found.first.losses == (3.0, 2.9, 2.8)
    assert [job.loss_steps for job in pool.jobs] == [3] + [0] * (len(pool.jobs) - 1)
    assert all(job.step == SUBJECT.step and job.cache_dir == "/cache" for job in pool.jobs)


def test_a_visit_is_expected_to_take_what_it_takes_without_compiling() -> None:
    short = calibrated(FakePool(step_s={A: 5e-3}, noise=0.0), A)[A]
    assert short.visit_s == pytest.approx(0.1 + 3 * 0.05)
    # Known after the first visit, and so is not how long the next takes to set up.
    long = calibrated(FakePool(step_s={A: 0.3}, noise=0.0), A)[A]
    assert long.visit_s == pytest.approx(3 * 0.3)
    longest = calibrated(FakePool(step_s={A: 4.0}, noise=0.0), A)[A]
    assert longest.visit_s == pytest.approx(4.0)


def test_calibrating_what_fails_gives_the_failure() -> None:
    pool = FakePool(step_s={A: 1.0}, script={(A, 0): REFUSED})
    assert calibrate(pool, SUBJECT, A, rules=RULES, clock=pool.clock) == REFUSED
    assert len(pool.jobs) == 1


def test_losses_are_recorded_without_timing() -> None:
    pool = FakePool(step_s={A: 1.0})
    answer = record_losses(pool, SUBJECT, A, rules=RULES)
    assert isinstance(answer, VisitAnswer)
    assert answer.losses == (3.0, 2.9, 2.8)
    assert answer.samples_s == ()
    assert (pool.jobs[0].steps, pool.jobs[0].samples) == (0, 0)


@pytest.mark.parametrize(
    ("first", "visits", "processes"),
    [(CRASH, 2, 2), (NO_MEMORY, 2, 2), (REFUSED, 1, 1), (TimedOut(stage="run", limit_s=1), 1, 1)],
)
def test_what_may_pass_is_tried_again_in_a_fresh_process(
    first: Failure, visits: int, processes: int
) -> None:
    pool = FakePool(step_s={A: 0.1}, script={(A, 0): first})
    job = visit_job(SUBJECT, A, steps=1, samples=1, loss_steps=0, warmup_s=0.0)
    answer = visit(pool, job, 10.0)
    assert len(pool.jobs) == visits
    assert pool.processes == processes
    assert isinstance(answer, VisitAnswer) if visits == 2 else answer == first


@pytest.mark.parametrize("samples_s", [(), (0.0, 1.0, 1.0), (float("nan"),) * 3])
def test_impossible_times_are_a_failure(samples_s: tuple[float, ...]) -> None:
    pool = FakePool(step_s={A: 0.1})
    honest = pool.run(visit_job(SUBJECT, A, steps=1, samples=3, loss_steps=0, warmup_s=0), 1.0)
    assert isinstance(honest, VisitAnswer)
    odd = VisitAnswer(
        samples_s=samples_s,
        losses=(),
        loss_dtype="float32",
        values="user",
        setup_s=0.0,
        peak_bytes=0,
        fingerprint="f",
    )
    pool.script = {(A, 1): odd, (A, 2): odd}
    answer = calibrate(pool, SUBJECT, A, rules=RULES, clock=pool.clock)
    assert isinstance(answer, Failed)
    assert answer.reason.startswith("3 step times were asked for, and ")


def test_a_race_finds_the_slower_one_and_stores_every_round() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.011, C: 0.01})
    stored: dict[Plan, list[float]] = {A: [], B: [], C: []}

    def store(plan: Plan, index: int, value_s: float) -> None:
        assert index == len(stored[plan])
        stored[plan].append(value_s)

    race = Race((A, B, C), rules=RaceRules(), seed=0)
    report = race_of(pool, race, calibrated(pool, A, B, C), on_round=store)
    assert report.ended == "equivalent"
    assert report.sentence == "all that were left are equally fast"
    assert verdicts(report)[1] == "slower"
    assert sorted(verdicts(report)) == ["open", "slower", "winner"]
    assert {one.finalist: list(one.rounds_s) for one in report.standings} == stored
    assert report.winner is not None
    assert report.winner.step_s == pytest.approx(0.01, rel=0.01)
    assert report.failures == ()


def test_a_crash_costs_one_visit_and_two_in_a_row_the_place() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.01, C: 0.01})
    calibrations = calibrated(pool, A, B, C)
    pool.script = {
        (B, pool.visits_to(B) + 2): CRASH,
        (C, pool.visits_to(C) + 1): CRASH,
        (C, pool.visits_to(C) + 2): NO_MEMORY,
    }
    report = race_of(pool, Race((A, B, C), rules=RaceRules(), seed=0), calibrations)
    assert verdicts(report)[2] == "left"
    assert len(report.standings[2].rounds_s) == 1
    assert report.failures == ((C, NO_MEMORY),)
    assert sorted(verdicts(report)[:2]) == ["open", "winner"]
    assert pool.processes == 3


def test_when_all_fail_there_is_no_winner() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.01})
    calibrations = calibrated(pool, A, B)
    pool.script = {(one, number): REFUSED for one in (A, B) for number in range(9)}
    report = race_of(pool, Race((A, B), rules=RaceRules(), seed=0), calibrations)
    assert report.ended == "none left"
    assert report.winner is None
    assert len(report.failures) == 2


def test_a_program_that_changes_in_the_middle_is_noticed() -> None:
    pool = FakePool(step_s={A: 0.01})
    calibrations = calibrated(pool, A)
    pool.fingerprint = "g"
    report = race_of(pool, Race((A,), rules=RaceRules(), seed=0), calibrations)
    ((_, failure),) = report.failures
    assert failure == OTHER_PROGRAM


def test_a_script_that_was_edited_ends_the_race(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    subject = replace(SUBJECT, sources=((str(script), hash_of_file(script)),))
    pool = FakePool(step_s={A: 0.01})
    calibrations = calibrated(pool, A)
    pool.fingerprint = "g"
    script.write_text("# edited\n")
    course = Course(pool=pool, subject=subject, rules=RULES, clock=pool.clock, deadline_s=1e9)
    course.visit_s[A] = 1.0
    with pytest.raises(UsageError, match="was changed while it was searched"):
        course.value_of(calibrations[A])


def test_no_round_begins_that_would_not_end_in_time() -> None:
    pool = FakePool(step_s={A: 0.3, B: 0.3}, noise=0.05)
    calibrations = calibrated(pool, A, B)
    deadline_s = pool.now_s + 7.5  # a visit takes 1 s
    race = Race((A, B), rules=RaceRules(), seed=0)
    report = race_of(pool, race, calibrations, deadline_s=deadline_s)
    assert report.ended == "deadline"
    assert report.sentence == "the time was used up before the race was decided"
    assert pool.now_s <= deadline_s
    assert [len(one.rounds_s) for one in report.standings] == [3, 3]
    assert sorted(verdicts(report)) == ["open", "winner"]


def test_a_visit_that_hangs_at_the_deadline_is_not_the_finalists_fault() -> None:
    pool = FakePool(step_s={A: 1.0, B: 1.0})
    calibrations = calibrated(pool, A, B)
    pool.hangs = {(A, pool.visits_to(A) + 1)}
    race = Race((A, B), rules=RaceRules(), seed=0)
    deadline_s = pool.now_s + 20.0
    report = race_of(pool, race, calibrations, deadline_s=deadline_s)
    assert report.ended == "deadline"
    assert report.failures == ()
    assert pool.now_s <= deadline_s + 1e-6
    assert race.survivors == (A, B)


@pytest.mark.parametrize(("first_round_s", "winners"), [(0.0, 0), (60.0, 1)])
def test_a_worker_that_dies_in_the_first_round_costs_time_and_not_the_race(
    first_round_s: float, winners: int
) -> None:
    """Before, its start used up the time that short visits let a round expect."""
    pool = FakePool(step_s={A: 0.01, B: 0.01, C: 0.01}, compile_s=4.0)
    calibrations = calibrated(pool, A, B, C)
    pool.script = {(one, pool.visits_to(one)): CRASH for one in (A, B, C)}
    report = race_of(
        pool,
        Race((A, B, C), rules=RaceRules(), seed=0),
        calibrations,
        deadline_s=pool.now_s + 1.5,
        first_round_s=pool.now_s + first_round_s,
    )
    assert report.ended == "deadline"
    assert report.failures == ()
    assert verdicts(report).count("winner") == winners
    assert [len(one.rounds_s) for one in report.standings] == [winners] * 3 or not winners


def test_a_visit_that_was_slow_for_once_says_little_of_the_next() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.01}, compile_s=4.0)
    calibrations = calibrated(pool, A, B)
    pool.script = {(A, pool.visits_to(A)): CRASH}
    report = race_of(
        pool,
        Race((A, B), rules=RaceRules(), seed=0),
        calibrations,
        deadline_s=pool.now_s + 14.0,
    )
    # Both are set up anew, in 8 s; what is left is enough for many rounds.
    assert all(len(one.rounds_s) > 4 for one in report.standings)


def test_a_visit_that_hangs_with_time_to_spare_is() -> None:
    pool = FakePool(step_s={A: 1.0, B: 1.0})
    calibrations = calibrated(pool, A, B)
    pool.hangs = {(A, pool.visits_to(A) + 1)}
    report = race_of(pool, Race((A, B), rules=RaceRules(), seed=0), calibrations)
    assert report.failures == ((A, TimedOut(stage="run", limit_s=RULES.timeout_s)),)
    assert verdicts(report) == ["left", "winner"]


def test_a_stopped_race_is_resumed_from_what_was_stored() -> None:
    def fresh() -> tuple[FakePool, dict[Plan, Calibration]]:
        pool = FakePool(step_s={A: 1.0, B: 1.3, C: 1.0}, noise=0.0)
        return pool, calibrated(pool, A, B, C)

    pool, calibrations = fresh()
    whole = race_of(pool, Race((A, B, C), rules=RaceRules(), seed=5), calibrations)
    pool, calibrations = fresh()
    stored: dict[Plan, list[float]] = {A: [], B: [], C: []}

    def store(plan: Plan, index: int, value_s: float) -> None:
        stored[plan].append(value_s)
        if sum(map(len, stored.values())) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race_of(pool, Race((A, B, C), rules=RaceRules(), seed=5), calibrations, on_round=store)
    before = len(pool.jobs)
    resumed = Race((A, B, C), rules=RaceRules(), seed=5, rounds=stored)
    report = race_of(pool, resumed, calibrations)
    total = sum(len(one.rounds_s) for one in report.standings)
    assert len(pool.jobs) - before == total - 5
    assert verdicts(report) == verdicts(whole)
    assert report.ended == whole.ended


# Plans that fit into the memory side by side.

TOGETHER = replace(SUBJECT, fits=lambda _: True)


def course_of(pool: FakePool, calibrations: dict[Plan, Calibration], **more: float) -> Course:
    visit_s = {plan: one.visit_s for plan, one in calibrations.items()}
    return Course(
        pool=pool,
        subject=TOGETHER,
        rules=RULES,
        clock=pool.clock,
        deadline_s=more.get("deadline_s", 1e9),
        visit_s=visit_s,
    )


def test_visits_that_end_exactly_at_the_deadline_have_time() -> None:
    pool = FakePool(step_s={plan(1): 1.0, plan(2): 2.0})
    calibrations = calibrated(pool, plan(1), plan(2))
    both_s = sum(one.visit_s for one in calibrations.values())
    course = course_of(pool, calibrations)
    course.deadline_s = pool.clock() + both_s
    assert course.has_time_for(list(calibrations))
    course.deadline_s -= 0.5
    assert not course.has_time_for(list(calibrations))
    course.deadline_s, course.start_s = pool.clock() + both_s, 0.01
    assert not course.has_time_for(list(calibrations))


def test_plans_that_fit_together_are_sampled_in_short_turns() -> None:
    pool = FakePool(step_s={A: 0.001, B: 0.0011, C: 0.03})
    calibrations = calibrated(pool, A, B, C)
    before = len(pool.jobs)
    found = course_of(pool, calibrations).round_of(list(calibrations.values()))
    jobs = pool.jobs[before:]
    assert all(job.samples == 1 and job.loss_steps == 0 for job in jobs)
    turns = [[job.plan for job in jobs[first : first + 3]] for first in range(0, len(jobs), 3)]
    assert turns == [[A, B, C] if turn % 2 == 0 else [C, B, A] for turn in range(len(turns))]
    # As much timed work as visits of their own, after a turn that makes the states.
    for one in (A, B):
        steps = sum(job.steps for job in jobs[3:] if job.plan == one)
        whole = calibrations[one].steps * calibrations[one].samples
        assert whole <= steps <= 1.3 * whole
    assert {job.steps for job in jobs if job.plan == C} == {1}
    # All stay until their last turn, and nothing stays after it.
    assert [job.keep for job in jobs] == [True] * (len(jobs) - 3) + [False] * 3
    assert pool.kept == set()
    assert found == {one: pytest.approx(pool.step_s[one], rel=0.005) for one in (A, B, C)}


def test_a_machine_that_changes_hits_plans_in_turns_alike() -> None:
    """Every 0.3 s it is fast or slow by chance, by a tenth in the mean."""

    def slowness(now_s: float) -> float:
        return 1 + random.Random(int(now_s / 0.3)).expovariate(10.0)

    def error_of(subject: Subject) -> float:
        pool = FakePool(step_s={A: 0.001, B: 0.00105}, slowness=slowness, setup_s=0.2)
        calibrations = calibrated(pool, A, B)
        errors: list[float] = []
        for _ in range(40):
            course = replace(course_of(pool, calibrations), subject=subject)
            values = course.round_of(list(calibrations.values()))
            ratio = values[B] / values[A]  # type: ignore[operator]
            errors.append(abs(ratio / 1.05 - 1))
        return sorted(errors)[20]

    apart, together = error_of(SUBJECT), error_of(TOGETHER)
    assert together < 0.01 and together < apart / 4


def test_plans_that_do_not_fit_after_all_are_visited_one_by_one_and_not_blamed() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.012}, most_kept=1)
    calibrations = calibrated(pool, A, B)
    course = course_of(pool, calibrations)
    for _ in range(2):
        before = len(pool.jobs)
        found = course.round_of(list(calibrations.values()))
        assert found == {A: pytest.approx(0.01, rel=0.01), B: pytest.approx(0.012, rel=0.01)}
    assert [job.keep for job in pool.jobs[before:]] == [False, False]


def test_who_fails_side_by_side_and_alone_is_blamed() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.01})
    calibrations = calibrated(pool, A, B)
    pool.script = {(B, number): NO_MEMORY for number in range(1, 50)}
    found = course_of(pool, calibrations).round_of(list(calibrations.values()))
    assert found == {A: pytest.approx(0.01, rel=0.01), B: NO_MEMORY}


def test_turns_that_the_deadline_cuts_have_no_value() -> None:
    pool = FakePool(step_s={A: 0.01, B: 0.01})
    calibrations = calibrated(pool, A, B)
    pool.hangs = {(B, pool.visits_to(B) + 3)}
    course = course_of(pool, calibrations, deadline_s=pool.now_s + 5.0)
    assert course.round_of(list(calibrations.values())) == {}


def test_a_race_in_turns_finds_what_one_by_one_takes_many_rounds_for() -> None:
    def slowness(now_s: float) -> float:
        return 1 + random.Random(int(now_s / 0.3)).expovariate(10.0)

    rounds: dict[bool, int] = {}
    for is_together in (True, False):
        pool = FakePool(step_s={A: 0.001, B: 0.00105}, slowness=slowness)
        calibrations = calibrated(pool, A, B)
        race = Race((A, B), rules=RaceRules(), seed=0)
        subject = TOGETHER if is_together else SUBJECT
        report = race_of(pool, race, calibrations, subject=subject)
        rounds[is_together] = len(report.standings[0].rounds_s)
        if is_together:
            assert verdicts(report) == ["winner", "slower"]
    assert rounds[True] * 3 < rounds[False]


def test_a_process_samples_its_plans_in_turns() -> None:
    pool = FakePool(step_s={A: 0.1, B: 0.13})
    calibrations = calibrated(pool, A, B)
    before = len(pool.jobs)
    ran = process_of(pool, calibrations, subject=TOGETHER)
    assert ran.is_whole and pool.kept == set()
    assert dict(ran.seconds)[B] / dict(ran.seconds)[A] == pytest.approx(1.3, rel=0.01)
    jobs = pool.jobs[before:]
    # The setup of a process is paid once for each pass, as when they are visited apart.
    assert sum(not job.keep for job in jobs) == 2 * passes_of(list(calibrations.values()))


def process_of(
    pool: FakePool,
    calibrations: dict[Plan, Calibration],
    *,
    deadline_s: float = 1e9,
    subject: Subject = SUBJECT,
) -> ProcessRun:
    return run_process(
        pool,
        subject,
        list(calibrations.values()),
        rules=RULES,
        number=0,
        passes=MOST_PASSES,
        deadline_s=deadline_s,
        clock=pool.clock,
    )


def test_entrants_are_visited_in_turns_in_a_fresh_process() -> None:
    pool = FakePool(step_s={A: 0.1, B: 0.13, C: 0.11})
    calibrations = calibrated(pool, A, B, C)
    before, begun_s = len(pool.jobs), pool.now_s
    ran = process_of(pool, calibrations)
    assert ran.is_whole and not ran.failures
    assert pool.processes == 2
    assert ran.took_s == pool.now_s - begun_s
    seconds = dict(ran.seconds)
    assert seconds[B] / seconds[A] == pytest.approx(1.3, rel=0.01)
    # In turns, nobody earlier than the others on the whole.
    places: dict[Plan, list[int]] = {A: [], B: [], C: []}
    for place, job in enumerate(pool.jobs[before:]):
        places[job.plan].append(place)
    counts = {len(found) for found in places.values()}
    assert len(counts) == 1 and counts.pop() % 2 == 0
    assert len({sum(found) for found in places.values()}) == 1


def test_a_process_measures_for_as_long_as_it_takes_to_start() -> None:
    pool = FakePool(step_s={A: 0.1, B: 3.0})
    calibrations = calibrated(pool, A, B)
    assert passes_of([calibrations[A]]) == 8
    assert passes_of([calibrations[A], calibrations[B]]) == 2
    slow = replace(calibrations[B], visit_s=600.0)
    assert passes_of([slow]) == 1
    assert process_s_of([slow]) > 600.0
    # Once as much as the start; no more than three times that, for plans of any length.
    for visit_s in (0.1, 1.0, 5.0, 20.0):
        one = replace(calibrations[A], visit_s=visit_s)
        start_s = process_s_of([one]) - passes_of([one]) * visit_s
        assert passes_of([one]) == 1 or passes_of([one]) * visit_s <= 3 * start_s


def test_what_fails_leaves_the_others_their_figures() -> None:
    pool = FakePool(step_s={A: 0.1, B: 0.1}, script={(B, n): CRASH for n in range(1, 20)})
    ran = process_of(pool, calibrated(pool, A, B))
    assert dict(ran.failures) == {B: CRASH}
    assert [plan for plan, _ in ran.seconds] == [A]
    assert ran.is_whole


def test_a_pass_that_is_cut_short_does_not_count() -> None:
    pool = FakePool(step_s={A: 1.0, B: 1.0}, noise=0.0)
    calibrations = calibrated(pool, A, B)
    # Both are set up anew in 2.1 s, and a visit takes 1 s: time for a pass and a half.
    pool.hangs = {(plan, pool.visits_to(plan) + 1) for plan in (A, B)}
    ran = process_of(pool, calibrations, deadline_s=pool.now_s + 8.0)
    assert ran.is_whole
    assert dict(ran.seconds) == {A: pytest.approx(1.0), B: pytest.approx(1.0)}


def test_a_process_that_hangs_has_no_figures() -> None:
    pool = FakePool(step_s={A: 1.0, B: 1.0}, noise=0.0)
    calibrations = calibrated(pool, A, B)
    pool.hangs = {(plan, pool.visits_to(plan)) for plan in (A, B)}
    ran = process_of(pool, calibrations, deadline_s=pool.now_s + 8.0)
    assert not ran.is_whole and ran.seconds == () and ran.failures == ()
