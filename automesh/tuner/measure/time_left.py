"""How the time that is left is divided among first visits, races and fresh processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.tuner.measure.final import FEWEST, LOOKS, Final, FinalRules
from automesh.tuner.measure.fresh_processes import FEWEST_PASSES, MOST_PASSES, process_s_of
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.likeliest import by_first_visit, leaders

RESERVED = 5  # processes that a race leaves time for
_LEAST_RACE = 1 / 3  # of the time that the fewest processes leave
_GRACE = 0.05  # of the budget, or so many seconds, whichever is more: while there is no rule
_GRACE_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """What there is time for; points in time are on the search's clock."""

    known: Known

    @property
    def now_s(self) -> float:
        return self.known.search.clock()

    @property
    def end_s(self) -> float:
        return self.known.search.end_s

    @property
    def last_s(self) -> float:
        """When all is over, whatever is missing."""
        return self.end_s + self._grace_s

    @property
    def _grace_s(self) -> float:
        return max(_GRACE * self.known.search.request.budget_s, _GRACE_S)

    # Fresh processes

    def process_s(self, entrants: Sequence[Plan] = (), most: int = MOST_PASSES) -> float:
        """What a process takes: as the last one did, or what the first visits let expect.

        Args:
          most: passes over its plans.
        """
        known = self.known
        pair = list(dict.fromkeys([*known.baseline, *known.incumbent, *entrants]))
        visited = [known.calibrations[plan] for plan in pair if plan in known.calibrations]
        visited = visited[: FinalRules().entrants]
        expected_s = process_s_of(visited, most)
        if not visited or not known.records.processes:
            return expected_s
        last = known.records.processes[-1]
        # What the last one took beyond what was expected of it, the next one may take, too.
        return max(expected_s, last.took_s + expected_s - process_s_of(visited, last.passes))

    def least_process_s(self) -> float:
        """What a process takes of the likeliest plan, beside the baseline."""
        return self.process_s(leaders(self.known, self.known.final()), FEWEST_PASSES)

    def passes(self, final: Final, entrants: Sequence[Plan]) -> int:
        """Passes in each process, at most so many that the next decision is reached in time.

        What one process is wrong by, many passes in it do not mend: processes up to the next look
        come before passes, and those that a rule needs before all else.
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
        """Whether one more process is over in time; while there is no rule, it may be late."""
        shortest_s = self.process_s(entrants, FEWEST_PASSES)
        late_s = self.now_s + shortest_s - self.end_s
        return late_s <= (0.0 if final.exported() else self._grace_s)

    def fewer_for_process(self, final: Final, entrants: Sequence[Plan]) -> Sequence[Plan]:
        """Fewer of them where the processes that a rule needs, or else a single one, would not be
        over in time."""
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
        """How many more a rule needs; as many for another one, once all finalists were raced."""
        final = self.known.final()
        if final.exported():
            return 1 if self.known.unraced() else FEWEST
        likeliest = leaders(self.known, final)
        ran = final.count(*final.baseline, *likeliest) if likeliest else 0
        return max(FEWEST - ran, 1)

    # A race

    def race_deadline_s(self, entrants: Sequence[Plan]) -> float:
        """When a race must be over so that its best can be measured in fresh processes.

        Where there is a rule, and finalists that were never raced, these come first.
        """
        return self.end_s - self._missing_processes() * self.process_s(entrants, FEWEST_PASSES)

    def race_end_s(self, entrants: Sequence[Plan]) -> float:
        """When a race should be over, after one round at least: fresh processes decide, it only
        chooses who gets there."""
        now_s, latest_s = self.now_s, self.race_deadline_s(entrants)
        early_s = self.end_s - RESERVED * self.process_s(entrants)
        return max(
            early_s, now_s + _LEAST_RACE * (latest_s - now_s), self._one_round_end_s(entrants)
        )

    def first_round_end_s(self, entrants: Sequence[Plan]) -> float:
        """When the first round must be over."""
        return max(self.race_deadline_s(entrants), self._one_round_end_s(entrants))

    def _one_round_end_s(self, entrants: Sequence[Plan]) -> float:
        """When a single round should be over: without one, nobody ever gets to a fresh process."""
        return min(self.now_s + 1.5 * self._round_s(entrants), self.end_s)

    def _round_s(self, entrants: Sequence[Plan]) -> float:
        return sum(self.known.calibrations[plan].whole_s for plan in entrants)

    def fewer_for_race(self, newcomers: Sequence[Plan], anchors: Sequence[Plan]) -> list[Plan]:
        """Those that a single round has time for, the fastest of the first visits before others.

        Without a yardstick among them the others' times compare with nothing.
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
        """Whether there is time for the processes that a rule needs, but for no round before."""
        if self.known.final().exported():
            return False
        rule_s = self._missing_processes() * self.least_process_s()
        left_s = self.end_s - self.now_s
        is_possible = rule_s <= left_s + self._grace_s
        return is_possible and left_s < rule_s + self._round_s(entrants)
