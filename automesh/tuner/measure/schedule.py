"""Visits finalists through a pool of workers, and finds how long a visit should be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, Failure, TimedOut
from automesh.program.nouns import StepRef, VisitAnswer
from automesh.program.script.sources import Sources
from automesh.tuner.measure.statistics import middle_mean
from automesh.tuner.study.retrace import other_program
from automesh.worker.messages import VisitJob

_REFUSALS = ("load", "build", "lower", "compile")
_CALIBRATIONS = 3
_LONG_ENOUGH = 0.8
_PATIENCE = 3.0
# Length of a sample of plans that are sampled in turns: long compared with the message to the
# worker, and short compared with the changes that other work on the machine causes (`python -m
# benchmarks.race_errors`, with and without --apart).
TURN_S = 0.01
_MOST_TURNS = 24


class VisitPool(Protocol):
    """The interface of the workers that measuring needs."""

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        """Does one job; a worker that dies or overruns is a failure of this job alone."""
        ...

    def recycle(self) -> None:
        """Lets the next job start in a fresh process."""
        ...


def _never(_: Sequence[Plan]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPool:
    """The workers of a search that must end at some time: no job runs longer than that.

    Attributes:
      until_s: when the search must end, on `clock`.
    """

    pool: VisitPool
    until_s: float
    clock: Callable[[], float]

    @property
    def is_over(self) -> bool:
        """Whether a visit that timed out had less time than it may take."""
        return self.clock() >= self.until_s

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        """Runs a job in the pool, within the remaining time."""
        left_s = self.until_s - self.clock()
        if left_s <= 0.0:
            return TimedOut(stage="start", limit_s=0.0)
        return self.pool.run(job, min(timeout_s, left_s))

    def recycle(self) -> None:
        """Lets the next job start in a fresh process."""
        self.pool.recycle()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The attributes that all visits of one search share; those without a description are as in
    `VisitJob`.

    Attributes:
      sources: the files of the script, as they were when it was inspected.
      fits: whether the states of some plans fit into the memory side by side.
    """

    step: StepRef
    cache_dir: str
    sources: Sources = ()
    fits: Callable[[Sequence[Plan]], bool] = _never


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitRules:
    """The rules for a visit, the same for every finalist.

    Attributes:
      sample_s: a sample chains enough steps to last this long. Starting a chain and waiting for its
        end costs 0.1 to 1 ms, the same for all, and should vanish in it.
      samples: samples per visit, of which the median counts; with three samples, one may be
        disturbed.
      long_step_s: from this length of a step on, one sample is enough: the step itself averages.
      warmup_s: seconds of steps, at least one step, before the first sample of a visit.
      loss_steps: number of first steps whose scalars are recorded by the first visit.
      timeout_s: the most that one visit may take, compilation included.
    """

    sample_s: float = 0.05
    samples: int = 3
    long_step_s: float = 1.0
    warmup_s: float = 0.05
    loss_steps: int = 3
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The settings for visits to a plan, as its first visit has found them.

    Attributes:
      steps: chained steps per sample.
      samples: samples per visit.
      visit_s: seconds that one visit takes, the worker being warm.
      first: the answer of the first visit: the losses, and the source of the values.
      state_s: seconds for making the state, which `visit_s` leaves out; an upper bound until the
        plan was raced, since the first time may compile.
    """

    plan: Plan
    steps: int
    samples: int
    visit_s: float
    first: VisitAnswer
    state_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """The seconds of a visit that must first make the state."""
        return self.visit_s + self.state_s

    def having_taken(self, took_s: float) -> Calibration:
        """Returns the calibration with the times of a later visit."""
        return replace(self, state_s=max(took_s - self.visit_s, 0.0))


def visit_job(
    subject: Subject,
    plan: Plan,
    *,
    steps: int,
    samples: int,
    loss_steps: int,
    warmup_s: float,
    sensitivity: bool = False,
    keep: bool = False,
) -> VisitJob:
    """Returns the message that asks a worker for one visit."""
    return VisitJob(
        step=subject.step,
        plan=plan,
        cache_dir=subject.cache_dir,
        steps=steps,
        samples=samples,
        loss_steps=loss_steps,
        warmup_s=warmup_s,
        sensitivity=sensitivity,
        keep=keep,
    )


def visit(
    pool: VisitPool, job: VisitJob, timeout_s: float, *, is_first: bool = False
) -> VisitAnswer | Failure:
    """Makes one visit, and repeats it in a fresh process if the first one died of something that
    may pass.

    A crash or lack of memory may be caused by earlier work of the process. A refusal by the user's
    code or the compiler would only be repeated, and a timeout has used its time, so neither is
    tried again.

    Args:
      is_first: whether nothing is known of the plan yet. If there is no time for another try, the
        failure of such a plan is returned. A plan that ran before is not judged without another
        try.
    """
    answer = _run(pool, job, timeout_s)
    if isinstance(answer, VisitAnswer | TimedOut) or answer.stage in _REFUSALS:
        return answer
    pool.recycle()
    again = _run(pool, job, timeout_s)
    return answer if is_first and isinstance(again, TimedOut) else again


def record_losses(
    pool: VisitPool, subject: Subject, plan: Plan, *, rules: VisitRules
) -> VisitAnswer | Failure:
    """Runs only the first steps of a reference, to record its losses and updates; times nothing."""
    job = visit_job(
        subject,
        plan,
        steps=0,
        samples=0,
        loss_steps=rules.loss_steps,
        warmup_s=0.0,
        sensitivity=True,
    )
    return visit(pool, job, rules.timeout_s)


def calibrate(
    pool: VisitPool,
    subject: Subject,
    plan: Plan,
    *,
    rules: VisitRules,
    clock: Callable[[], float],
    is_reference: bool = False,
) -> Calibration | Failure:
    """Visits a plan for the first time: records its losses, and finds how many steps make a sample.

    Args:
      clock: monotonic seconds.
      is_reference: whether the other plans are compared with it.
    """
    answers: list[VisitAnswer] = []
    steps, visit_s, step_s = 1, 0.0, 0.0
    for _ in range(_CALIBRATIONS):
        job = visit_job(
            subject,
            plan,
            steps=steps,
            samples=rules.samples,
            loss_steps=0 if answers else rules.loss_steps,
            warmup_s=rules.warmup_s,
            sensitivity=is_reference and not answers,
        )
        started_s = clock()
        answer = visit(pool, job, rules.timeout_s, is_first=True)
        if not isinstance(answer, VisitAnswer):
            return answer
        # The first visit may start a process and compile, which none of the visits of the race
        # does.
        visit_s = clock() - started_s if answers else steps * sum(answer.samples_s)
        step_s = statistics.median(answer.samples_s)
        answers.append(answer)
        # A sample of one short step is mostly overhead, so the first estimate is too low: it is
        # repeated.
        if steps * step_s >= _LONG_ENOUGH * rules.sample_s:
            break
        steps = math.ceil(rules.sample_s / step_s)
    samples = 1 if step_s >= rules.long_step_s else rules.samples
    return Calibration(
        plan=plan,
        steps=steps,
        samples=samples,
        visit_s=max(visit_s - (rules.samples - samples) * steps * step_s, 0.0),
        first=answers[0],
        state_s=answers[0].state_s if len(answers) == 1 else 0.0,
    )


@dataclass(slots=True, kw_only=True)
class Course:
    """Makes visits one after the other until a deadline.

    Attributes:
      deadline_s: when to stop, on `clock`.
      visit_s: seconds that the next visit to each plan should take.
      start_s: seconds that the process needs before its first visit; 0 after it.
      is_apart: whether plans have failed side by side: only single visits show which one is the
        cause.
    """

    pool: VisitPool
    subject: Subject
    rules: VisitRules
    clock: Callable[[], float]
    deadline_s: float
    visit_s: dict[Plan, float] = field(default_factory=dict[Plan, float])
    start_s: float = 0.0
    is_apart: bool = False

    def fits(self, plans: Sequence[Plan]) -> bool:
        """Whether these plans can be visited side by side."""
        return not self.is_apart and len(plans) > 1 and self.subject.fits(plans)

    def has_time_for(self, plans: Sequence[Plan]) -> bool:
        """Whether visits to all of them should end before the deadline."""
        visits_s = sum(self.visit_s[plan] for plan in plans)
        return self.clock() + self.start_s + visits_s <= self.deadline_s

    def value_of(self, calibration: Calibration) -> float | Failure | None:
        """Visits a plan: returns the median of its samples, in seconds per step; None past the
        deadline.

        Raises:
          UsageError: the script was edited meanwhile.
        """
        started_s = self.clock()
        job = self._job(calibration, steps=calibration.steps, samples=calibration.samples)
        answer = self._answer(calibration, job, visit)
        if not isinstance(answer, VisitAnswer):
            return answer
        self._note_time(calibration.plan, self.clock() - started_s)
        return statistics.median(answer.samples_s)

    def round_of(self, entrants: Sequence[Calibration]) -> dict[Plan, float | Failure]:
        """Visits some plans side by side: returns one value for each, in seconds per step.

        The load and the speed of a machine change within tenths of a second. Plans that fit into
        the memory together are therefore sampled in turns of a hundredth of a second, forwards and
        backwards, so that each change affects all of them. Other plans are visited one after the
        other.

        Returns:
          The values; without plans that were not visited before the deadline, and empty if the
          deadline interrupted the turns.

        Raises:
          UsageError: the script was edited meanwhile.
        """
        if self.fits([one.plan for one in entrants]):
            together = self._in_turns(entrants)
            if together is not None:
                return together
            self.is_apart = True
        found: dict[Plan, float | Failure] = {}
        for one in entrants:
            value_s = self.value_of(one)
            if value_s is None:
                break
            found[one.plan] = value_s
        return found

    def _in_turns(self, entrants: Sequence[Calibration]) -> dict[Plan, float | Failure] | None:
        """Returns the values of plans that are sampled in turns; None if one of them failed."""
        share = min(TURN_S / self.rules.sample_s, 1.0)
        steps = {one.plan: max(1, round(one.steps * share)) for one in entrants}
        turns = min(
            max(math.ceil(one.samples * one.steps / steps[one.plan]) for one in entrants),
            _MOST_TURNS,
        )
        samples_s: dict[Plan, list[float]] = {one.plan: [] for one in entrants}
        spent_s = dict.fromkeys(samples_s, 0.0)
        # The first turn makes the state of each plan while the others wait, so it does not count if
        # there are more.
        unused = 1 if turns > 2 else 0
        for turn in range(turns + unused):
            is_last = turn == turns + unused - 1
            for one in entrants if turn % 2 == 0 else reversed(entrants):
                job = self._job(one, steps=steps[one.plan], samples=1, keep=not is_last)
                started_s = self.clock()
                answer = self._answer(one, job, _run)
                if answer is None:
                    return {}
                if not isinstance(answer, VisitAnswer):
                    return None
                spent_s[one.plan] += self.clock() - started_s
                if turn >= unused:
                    samples_s[one.plan] += answer.samples_s
        for plan, seconds in spent_s.items():
            self._note_time(plan, seconds)
        return {plan: middle_mean(found) for plan, found in samples_s.items()}

    def _note_time(self, plan: Plan, seconds: float) -> None:
        # If the worker of a plan had to be started again, only a part of its time is expected the
        # next time.
        self.visit_s[plan] = min(seconds, _PATIENCE * self.visit_s[plan])

    def _job(
        self, calibration: Calibration, *, steps: int, samples: int, keep: bool = False
    ) -> VisitJob:
        return visit_job(
            self.subject,
            calibration.plan,
            steps=steps,
            samples=samples,
            loss_steps=0,
            warmup_s=self.rules.warmup_s,
            keep=keep,
        )

    def _answer(
        self,
        calibration: Calibration,
        job: VisitJob,
        make: Callable[[VisitPool, VisitJob, float], VisitAnswer | Failure],
    ) -> VisitAnswer | Failure | None:
        """Makes one visit; returns None past the deadline.

        Args:
          make: makes it within so many seconds.
        """
        plan = calibration.plan
        started_s = self.clock()
        # A visit that is slow once may overrun the deadline a little; one that hangs may not.
        usual_s = self.start_s + _PATIENCE * self.visit_s[plan]
        limit_s = min(self.rules.timeout_s, max(self.deadline_s - started_s, usual_s))
        answer = make(self.pool, job, limit_s)
        self.start_s = 0.0
        if isinstance(answer, TimedOut) and limit_s < self.rules.timeout_s:
            return None
        if not isinstance(answer, VisitAnswer):
            return answer
        if answer.fingerprint != calibration.first.fingerprint:
            return other_program(self.subject.sources)
        return answer


def _run(pool: VisitPool, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
    answer = pool.run(job, timeout_s)
    if not isinstance(answer, VisitAnswer):
        return answer
    taken = len(answer.samples_s)
    sane = all(0.0 < sample_s < math.inf for sample_s in answer.samples_s)
    if sane and (not job.steps or taken == job.samples):
        return answer
    # The script runs in the same process as the clock, and may have replaced it.
    seconds = ", ".join(f"{sample_s:g}" for sample_s in answer.samples_s)
    reason = f"{job.samples} step times were asked for, and {seconds or 'none'} came back"
    return Failed(stage="run", reason=reason)
