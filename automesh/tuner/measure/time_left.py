"""Divides the remaining time among first visits, races and fresh processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.tuner.measure.final import FEWEST, LOOKS, Final, FinalRules
from automesh.tuner.measure.fresh_processes import FEWEST_PASSES, MOST_PASSES, process_s_of
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.likeliest import by_first_visit, leaders

RESERVED = 5  # fresh processes that a race leaves time for
_LEAST_RACE = 1 / 3  # of the time that remains after the fewest processes
# share of the budget, or seconds, whichever is more, that a search without a rule may be late
_GRACE = 0.05
_GRACE_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """The remaining time; points in time are on the search's clock."""

    known: Known

    @property
    def now_s(self) -> float:
        return self.known.search.clock()

    @property
    def end_s(self) -> float:
        return self.known.search.end_s

    @property
    def last_s(self) -> float:
        """The time at which everything ends, whatever is missing then."""
        return self.end_s + self._grace_s

    @property
    def _grace_s(self) -> float:
        return max(_GRACE * self.known.search.request.budget_s, _GRACE_S)

    # Fresh processes

    def process_s(self, entrants: Sequence[Plan] = (), most: int = MOST_PASSES) -> float:
        """Returns the seconds that a process takes: like the last one, or else what the first
        visits suggest.

        Args:
          most: the most passes over its plans.
        """
        known = self.known
        pair = list(dict.fromkeys([*known.baseline, *known.incumbent, *entrants]))
        visited = [known.calibrations[plan] for plan in pair if plan in known.calibrations]
        visited = visited[: FinalRules().entrants]
        expected_s = process_s_of(visited, most)
        if not visited or not known.records.processes:
            return expected_s
        last = known.records.processes[-1]
        # The next process may exceed the expected time as much as the last one did.
        return max(expected_s, last.took_s + expected_s - process_s_of(visited, last.passes))

    def least_process_s(self) -> float:
        """Returns the seconds of a process with only the likeliest plan and the baseline."""
        return self.process_s(leaders(self.known, self.known.final()), FEWEST_PASSES)

    def passes(self, final: Final, entrants: Sequence[Plan]) -> int:
        """Returns the passes in each process, at most so many that the next decision is reached in
        time.

        More passes do not reduce the error that a whole process has. So the processes up to the
        next look come before passes, and those that a rule needs come first of all.
        """
        count = final.count(*entrants)
        next_look = next((look for look in LOOKS if look > count), LOOKS[-1])
        left_s = self.end_s - self.now_s
        for processes in (max(next_look - count, 1), max(FEWEST - count, 1)):
            for passes in range(MOST_PASSES, FEWEST_PASSES - 1, -2):
                if processes * self.process_s(entrants, passes) <= left_s:
                    return passes
        return FEWEST_PASSES

    def has_time_for(self, final: Final, entrants: Sequence[Plan]) -> bool:
        """Whether one more process ends in time; while there is no rule, it may be late."""
        shortest_s = self.process_s(entrants, FEWEST_PASSES)
        late_s = self.now_s + shortest_s - self.end_s
        return late_s <= (0.0 if final.exported() else self._grace_s)

    def fewer_for_process(self, final: Final, entrants: Sequence[Plan]) -> Sequence[Plan]:
        """Returns fewer of the plans if the processes that a rule needs, or else a single one,
        would not end in time."""
        exported = final.exported()
        always = {*final.baseline, *exported} & {*entrants}
        fewest = len(always) + 1 if always else 1
        for count in range(len(entrants), fewest, -1):
            chosen = entrants[:count]
            more = 1 if exported else max(FEWEST - final.count(*chosen), 1)
            took_s = more * self.process_s(chosen, FEWEST_PASSES)
            if self.now_s + took_s <= self.end_s:
                return chosen
        return entrants[:fewest]

    def _missing_processes(self) -> int:
        """Returns how many more processes a rule needs. If there is a rule already: as many as
        another rule needs, or one while some finalists were not raced."""
        final = self.known.final()
        if final.exported():
            return 1 if self.known.unraced() else FEWEST
        likeliest = leaders(self.known, final)
        ran = final.count(*final.baseline, *likeliest) if likeliest else 0
        return max(FEWEST - ran, 1)

    # A race

    def race_deadline_s(self, entrants: Sequence[Plan]) -> float:
        """Returns when a race must end, so that its best can be measured in fresh processes.

        If there is a rule, finalists that were never raced come before further processes.
        """
        return self.end_s - self._missing_processes() * self.process_s(entrants, FEWEST_PASSES)

    def race_end_s(self, entrants: Sequence[Plan]) -> float:
        """Returns when a race should end, after one round at least. Fresh processes decide; the
        race only chooses their plans."""
        now_s, latest_s = self.now_s, self.race_deadline_s(entrants)
        early_s = self.end_s - RESERVED * self.process_s(entrants)
        return max(
            early_s, now_s + _LEAST_RACE * (latest_s - now_s), self._one_round_end_s(entrants)
        )

    def first_round_end_s(self, entrants: Sequence[Plan]) -> float:
        """Returns when the first round must end."""
        return max(self.race_deadline_s(entrants), self._one_round_end_s(entrants))

    def _one_round_end_s(self, entrants: Sequence[Plan]) -> float:
        """Returns when a single round should end: without a round, no plan gets to a fresh
        process."""
        return min(self.now_s + 1.5 * self._round_s(entrants), self.end_s)

    def _round_s(self, entrants: Sequence[Plan]) -> float:
        return sum(self.known.calibrations[plan].whole_s for plan in entrants)

    def fewer_for_race(self, newcomers: Sequence[Plan], anchors: Sequence[Plan]) -> list[Plan]:
        """Returns the plans that a single round has time for, beginning with the fastest of the
        first visits.

        An anchor must be among them: without one the times of the others cannot be compared.
        """
        final = self.known.final()
        likeliest = [plan for plan in by_first_visit(self.known, final) if plan in newcomers]
        own = [plan for plan in (*final.baseline, *final.exported()) if plan in newcomers]
        chosen = dict.fromkeys([*anchors, *own] or likeliest[:1])
        left_s = self.end_s - self.now_s
        for plan in likeliest:
            if plan not in chosen and self._round_s([*chosen, plan]) <= left_s:
                chosen[plan] = None
        return [plan for plan in (*newcomers, *anchors) if plan in chosen]

    def is_late_for_race(self, entrants: Sequence[Plan]) -> bool:
        """Whether there is time for the processes that a rule needs, but not for a round before
        them."""
        if self.known.final().exported():
            return False
        rule_s = self._missing_processes() * self.least_process_s()
        left_s = self.end_s - self.now_s
        is_possible = rule_s <= left_s + self._grace_s
        return is_possible and left_s < rule_s + self._round_s(entrants)
