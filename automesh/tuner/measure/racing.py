"""Races finalists and challengers against the baseline and the exported plan, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from automesh.mesh.axes import Plan
from automesh.outcomes import Failure
from automesh.report.progress import Progress
from automesh.tuner.measure.decision import record_of
from automesh.tuner.measure.final import FinalRules
from automesh.tuner.measure.first_visits import FirstVisits
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.likeliest import anchors
from automesh.tuner.measure.race import Ending, NextVisit, Race, RaceRules, Standing
from automesh.tuner.measure.schedule import Calibration, Course, Subject, VisitPool, VisitRules
from automesh.tuner.measure.time_left import TimeLeft
from automesh.units import format_seconds

RACE = RaceRules(max_rounds=12, keep=FinalRules().entrants)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceReport:
    """The result of a race.

    Attributes:
      ended: why it ended; `deadline` if the time ran out before the race was decided.
      standings: the standings of all finalists, in their order.
      failures: why finalists have left the race.
      took_s: seconds of the last visit of each finalist that had one.
    """

    ended: Ending | Literal["deadline"]
    standings: tuple[Standing[Plan], ...]
    failures: tuple[tuple[Plan, Failure], ...]
    took_s: tuple[tuple[Plan, float], ...] = ()

    @property
    def winner(self) -> Standing[Plan] | None:
        """The fastest; None if all have left or no round was completed."""
        return next((standing for standing in self.standings if standing.state == "winner"), None)

    @property
    def sentence(self) -> str:
        """The reason why the race ended, in words."""
        return _ENDINGS[self.ended]


_ENDINGS: dict[str, str] = {
    "few left": "all others were shown to be slower",
    "equivalent": "all that were left are equally fast",
    "all rounds": "all rounds were run; those left could not be told apart",
    "none left": "every finalist failed",
    "deadline": "the time was used up before the race was decided",
}


def run_race(
    pool: VisitPool,
    subject: Subject,
    race: Race[Plan],
    calibrations: Mapping[Plan, Calibration],
    *,
    rules: VisitRules,
    deadline_s: float,
    first_round_s: float,
    clock: Callable[[], float],
    on_round: Callable[[Plan, int, float], None],
    on_failure: Callable[[Plan, Failure], None],
) -> RaceReport:
    """Runs a race by visits in workers to its end, or until `deadline_s`.

    Without a round that all have run there is no winner, and the measurements are useless. So the
    first round may take longer: a worker that dies in it takes seconds to start again.

    Args:
      race: new, or built from stored rounds.
      calibrations: the calibrations of all survivors of `race`.
      deadline_s: when to stop, on `clock`.
      first_round_s: when to stop as long as no round is complete.
      clock: monotonic seconds.
      on_round: called with plan, round index and seconds per step after each visit, to be stored.
      on_failure: called when a finalist leaves.
    """
    course = Course(pool=pool, subject=subject, rules=rules, clock=clock, deadline_s=deadline_s)
    course.visit_s.update({plan: one.whole_s for plan, one in calibrations.items()})
    seen: dict[Plan, None] = {}

    def has_time(visit: NextVisit[Plan], begins_round: bool) -> bool:
        is_first = not race.rounds_completed
        course.deadline_s = max(first_round_s, deadline_s) if is_first else deadline_s
        return course.has_time_for(race.survivors if begins_round else (visit.finalist,))

    def make(visit: NextVisit[Plan]) -> dict[Plan, float | Failure]:
        rest = race.rest_of_round()
        # Visits that are made one after the other are also stored one by one.
        together = rest if course.fits(rest) else (visit.finalist,)
        return course.round_of([calibrations[one] for one in together])

    def note(plan: Plan, number: int, value_s: float) -> None:
        seen[plan] = None
        on_round(plan, number, value_s)

    report = run_rounds(race, has_time=has_time, make=make, on_round=note, on_failure=on_failure)
    return replace(report, took_s=tuple((plan, course.visit_s[plan]) for plan in seen))


def run_rounds(
    race: Race[Plan],
    *,
    has_time: Callable[[NextVisit[Plan], bool], bool],
    make: Callable[[NextVisit[Plan]], Mapping[Plan, float | Failure]],
    on_round: Callable[[Plan, int, float], None],
    on_failure: Callable[[Plan, Failure], None],
) -> RaceReport:
    """Runs the rounds of a race to its end, or until there is no time for more.

    A visit is made in a worker, or is a run of a command. A finalist whose visit fails leaves the
    race.

    Args:
      race: new, or built from stored rounds.
      has_time: whether there is time for a visit; for the first visit of a round, whether there is
        time for the whole round.
      make: makes a visit, with others of its round if they are made together; returns seconds per
        step, without plans for which the time was too short.
      on_round: called with plan, round index and seconds per step after each visit, to be stored.
      on_failure: called when a finalist leaves.
    """
    failures: list[tuple[Plan, Failure]] = []
    round_begun = -1
    values_s: dict[Plan, float | Failure] = {}
    while (visit := race.next_visit()) is not None:
        if not has_time(visit, visit.round_index > round_begun):
            break
        round_begun = visit.round_index
        plan = visit.finalist
        if plan not in values_s:
            values_s = dict(make(visit))
        value_s = values_s.pop(plan, None)
        if value_s is None:
            break
        if isinstance(value_s, Failure):
            race.leave(plan)
            failures.append((plan, value_s))
            on_failure(plan, value_s)
        else:
            race.record(plan, value_s)
            on_round(plan, visit.round_index, value_s)
    return RaceReport(
        ended=race.ending or "deadline",
        standings=race.standings(),
        failures=tuple(failures),
    )


@dataclass(slots=True, kw_only=True)
class Racing:
    """Runs the races of one search."""

    known: Known
    time_left: TimeLeft
    visits: FirstVisits
    _rounds: int = field(init=False, default=0)

    def race(self, plans: Sequence[Plan]) -> bool:
        """Visits plans and races them against baseline and exported plan.

        Returns:
          Whether a race was run to its end, or to the end of its time.
        """
        known = self.known
        known.open_trials(plans)
        anchored = [plan for plan in anchors(known) if plan not in plans]
        # The baseline comes before the others, because their losses are compared with its.
        own = [plan for plan in known.baseline if plan in plans]
        self.visits.visit_all([*dict.fromkeys([*own, *plans]), *anchored])
        newcomers = [plan for plan in plans if plan in known.calibrations]
        if not newcomers or known.reference is None:
            return False
        anchored = [plan for plan in anchored if plan in known.calibrations]
        entrants = self.time_left.fewer_for_race(newcomers, anchored)
        if not set(newcomers) & set(entrants) or self.time_left.is_late_for_race(entrants):
            return False
        return self._run(entrants)

    def _run(self, entrants: Sequence[Plan]) -> bool:
        known = self.known
        trials = {plan: known.trials.get(plan) for plan in entrants}
        stored = {plan: one.medians_s(known.machine) if one else () for plan, one in trials.items()}
        # An anchor has no rounds in this race; without its rounds those of the others cannot be
        # compared.
        resumable = all(plan in known.trials for plan in entrants)
        race = self._started(entrants, stored if resumable else {})
        report = run_race(
            self.visits.pool,
            self.visits.subject,
            race,
            known.calibrations,
            rules=self.visits.rules,
            deadline_s=self.time_left.race_end_s(entrants),
            first_round_s=self.time_left.first_round_end_s(entrants),
            clock=known.search.clock,
            on_round=lambda plan, number, value_s: self._on_round(race, plan, number, value_s),
            on_failure=known.finish,
        )
        for plan, took_s in report.took_s:
            known.calibrations[plan] = known.calibrations[plan].having_taken(took_s)
        known.note_visits()
        if report.winner is None:
            return False
        known.add_race(record_of(report.standings, machine=known.machine, sentence=report.sentence))
        return True

    def _started(
        self, entrants: Sequence[Plan], stored: Mapping[Plan, Sequence[float]]
    ) -> Race[Plan]:
        try:
            return Race(entrants, rules=RACE, seed=0, rounds=stored)
        except ValueError:
            # The finalists are not those of the last time: rounds that do not match cannot be
            # paired.
            self.known.search.progress.notice(
                "the finalists have changed; the race starts again from round one"
            )
            return Race(entrants, rules=RACE, seed=0)

    def _on_round(self, race: Race[Plan], plan: Plan, number: int, value_s: float) -> None:
        search = self.known.search
        trial = self.known.trials.get(plan)
        if trial is not None:
            search.study.measure.report(trial, number, [value_s])
        self._rounds = max(self._rounds, number + 1)
        show_round(search.progress, "measure", race, number=self._rounds, done=self._rounds)
        search.progress.now(f"{plan}, {format_seconds(value_s)}")


def show_round(progress: Progress, phase: str, race: Race[Plan], *, number: int, done: int) -> None:
    """Shows the round of a race, counted from 1, and its leader.

    Args:
      done: rounds that the display counts as done.
    """
    progress.phase(
        phase,
        total=race.rules.max_rounds,
        done=done,
        note=f"round {number}, {len(race.survivors)} left",
    )
    if race.leader is not None:
        middle_s = statistics.median(race.values_of(race.leader))
        progress.best(f"{race.leader}, {format_seconds(middle_s)} measured")
