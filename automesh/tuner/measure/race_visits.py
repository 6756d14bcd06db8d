"""The measure rung: a race over finalists, run by visits through a pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from automesh.mesh.axes import Plan
from automesh.outcomes import Failure
from automesh.tuner.measure.race import Ending, Race, Standing
from automesh.tuner.measure.schedule import Calibration, Course, Subject, VisitPool, VisitRules


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceReport:
    """How a race ended.

    Attributes:
      ended: why, `deadline` if time ran out before the race was decided.
      standings: of all finalists, in their order.
      failures: what befell those that left on the way.
    """

    ended: Ending | Literal["deadline"]
    standings: tuple[Standing[Plan], ...]
    failures: tuple[tuple[Plan, Failure], ...]

    @property
    def winner(self) -> Standing[Plan] | None:
        """The fastest; None if everybody left or not a single round was completed."""
        return next((one for one in self.standings if one.verdict == "winner"), None)

    @property
    def sentence(self) -> str:
        """Why the race ended, in words."""
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
    clock: Callable[[], float],
    on_round: Callable[[Plan, int, float], None],
    on_failure: Callable[[Plan, Failure], None],
) -> RaceReport:
    """Runs a race to its end, or until `deadline_s`.

    A round begins only if there is time for all of it. A finalist whose visit fails leaves.

    Args:
      race: new, or built from stored rounds.
      calibrations: of all survivors of `race`.
      deadline_s: when to stop, on `clock`.
      clock: monotonic seconds.
      on_round: called with plan, round index and seconds per step after each visit, to be stored.
      on_failure: called when a finalist leaves.
    """
    course = Course(pool=pool, subject=subject, rules=rules, clock=clock, deadline_s=deadline_s)
    course.visit_s.update({plan: one.visit_s for plan, one in calibrations.items()})
    failures: list[tuple[Plan, Failure]] = []
    round_begun = -1
    while (upcoming := race.next_visit()) is not None:
        plan = upcoming.finalist
        begins = upcoming.round_index > round_begun
        if not course.has_time_for(race.survivors if begins else (plan,)):
            break
        round_begun = upcoming.round_index
        value_s = course.value_of(calibrations[plan])
        if value_s is None:
            break
        if isinstance(value_s, Failure):
            race.leave(plan)
            failures.append((plan, value_s))
            on_failure(plan, value_s)
        else:
            race.record(plan, value_s)
            on_round(plan, upcoming.round_index, value_s)
    return RaceReport(
        ended=race.ending or "deadline", standings=race.standings(), failures=tuple(failures)
    )
