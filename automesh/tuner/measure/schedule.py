"""Visits to finalists through a pool of workers: how one is made, and how long it should be."""

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
# Of plans that are sampled in turns: long beside the message to the worker, and short beside what
# other work on the machine changes (`python -m benchmarks.race_errors`, with and without --apart).
TURN_S = 0.01
_MOST_TURNS = 24


class VisitPool(Protocol):
    """What measuring needs of the workers."""

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
    """Workers of a search that must be over at some time: nothing runs longer, whatever it is.

    Attributes:
      until_s: that time, on `clock`.
    """

    pool: VisitPool
    until_s: float
    clock: Callable[[], float]

    @property
    def is_over(self) -> bool:
        """Whether a visit that timed out had less time than it may take."""
        return self.clock() >= self.until_s

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        """As the pool does it, within what is left of the time."""
        left_s = self.until_s - self.clock()
        if left_s <= 0.0:
            return TimedOut(stage="start", limit_s=0.0)
        return self.pool.run(job, min(timeout_s, left_s))

    def recycle(self) -> None:
        """Lets the next job start in a fresh process."""
        self.pool.recycle()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What all visits of one search have in common; the other attributes are those of `VisitJob`.

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
    """How a visit is made, the same for every finalist.

    Attributes:
      sample_s: a sample chains enough steps to last this long. Starting a chain and waiting for its
        end costs 0.1 to 1 ms, the same for all, and should vanish in it.
      samples: samples per visit, of which the median counts; of three, one may be disturbed.
      long_step_s: from this length of a step on, one sample is enough: the step itself averages.
      warmup_s: steps are run for so long, at least one, before the first sample of a visit.
      loss_steps: first steps of which the scalars are recorded when calibrating.
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
    """How a plan is to be visited, found by visiting it.

    Attributes:
      steps: chained steps per sample.
      samples: samples per visit.
      visit_s: seconds that one visit takes, the worker being warm.
      first: answer of the first visit: the losses, and where the values came from.
      state_s: seconds for making the state that `visit_s` leaves out; until the plan was raced, at
        most, since the first time may compile.
    """

    plan: Plan
    steps: int
    samples: int
    visit_s: float
    first: VisitAnswer
    state_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """What a visit takes that finds no state."""
        return self.visit_s + self.state_s

    def having_taken(self, took_s: float) -> Calibration:
        """With what a later visit took."""
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
    """Makes one visit, and again in a fresh process if the first died of something that may pass.

    A crash or lack of memory can be the fault of what the process did before; a refusal by the
    user's code or the compiler is repeated word for word, and a timeout has had its time.

    Args:
      is_first: nothing is known of the plan yet. Then what it died of says more than that there was
        no time left for another try; one that ran before is not judged without that.
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
    """Runs only the first steps of a reference, for its losses and updates: nothing is timed."""
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
    """Visits a plan for the first time: records losses, and finds how many steps make a sample.

    Args:
      clock: monotonic seconds.
      is_reference: others are compared with it.
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
        # The first visit may start a process and compiles, which none of the race's visits does.
        visit_s = clock() - started_s if answers else steps * sum(answer.samples_s)
        step_s = statistics.median(answer.samples_s)
        answers.append(answer)
        # A sample of one short step is mostly overhead, so the first guess falls short: look again.
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
    """Visits one after the other under a deadline.

    Attributes:
      deadline_s: when to stop, on `clock`.
      visit_s: seconds that the next visit to each plan should take.
      start_s: what the process needs before its first visit; 0 once that was made.
      is_apart: True once plans failed side by side: whose fault it is, is only seen one by one.
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
        """Whether these plans are visited side by side."""
        return not self.is_apart and len(plans) > 1 and self.subject.fits(plans)

    def has_time_for(self, plans: Sequence[Plan]) -> bool:
        """Whether visits to all of them should end before the deadline."""
        visits_s = sum(self.visit_s[plan] for plan in plans)
        return self.clock() + self.start_s + visits_s <= self.deadline_s

    def value_of(self, calibration: Calibration) -> float | Failure | None:
        """Visits a plan: the median of its samples, seconds per step; None past the deadline.

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
        """Visits some plans side by side: one value for each, seconds per step.

        Other work on the machine, and the machine itself, change from one tenth of a second to the
        next. Plans that fit into the memory together are therefore sampled in turns of a hundredth
        of a second, forwards and backwards, so that every change hits all of them; those that do
        not are visited one after the other.

        Returns:
          Nothing of a plan that the deadline has left out; nothing at all where it cut the turns.

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
        """Values of plans that are sampled in turns; None if one of them failed."""
        share = min(TURN_S / self.rules.sample_s, 1.0)
        steps = {one.plan: max(1, round(one.steps * share)) for one in entrants}
        turns = min(
            max(math.ceil(one.samples * one.steps / steps[one.plan]) for one in entrants),
            _MOST_TURNS,
        )
        samples_s: dict[Plan, list[float]] = {one.plan: [] for one in entrants}
        spent_s = dict.fromkeys(samples_s, 0.0)
        # The first turn makes the states, each while the others wait: where it is one of many, it
        # does not count.
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
        # Of one whose worker had to be started again, only a part is expected the next time.
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
        """One visit; None past the deadline.

        Args:
          make: makes it within so many seconds.
        """
        plan = calibration.plan
        started_s = self.clock()
        # A visit that was slow for once may overrun the deadline a little; a hanging one may not.
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
    # The script shares its process with the clock, and may have replaced it.
    seconds = ", ".join(f"{sample_s:g}" for sample_s in answer.samples_s)
    reason = f"{job.samples} step times were asked for, and {seconds or 'none'} came back"
    return Failed(stage="run", reason=reason)
