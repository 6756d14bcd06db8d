"""Races: finalists and challengers against the baseline and what is exported, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automesh.mesh.axes import Plan
from automesh.tuner.measure.decision import record_of
from automesh.tuner.measure.final import FinalRules
from automesh.tuner.measure.first_visits import FirstVisits
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.likeliest import anchors
from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.schedule import run_race
from automesh.tuner.measure.time_left import TimeLeft
from automesh.units import format_seconds

RACE = RaceRules(max_rounds=12, keep=FinalRules().entrants)


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
        # The baseline before the others: its losses are what they are compared with.
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
        # An anchor has no rounds of this race, and without them the others' compare with nothing.
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
            # Other finalists than last time: rounds that do not line up cannot be paired.
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
        left = len(race.survivors)
        search.progress.phase(
            "measure",
            total=race.rules.max_rounds,
            done=self._rounds,
            note=f"round {self._rounds}, {left} left",
        )
        search.progress.now(f"{plan}, {format_seconds(value_s)}")
        leader = race.leader
        if leader is not None:
            middle_s = statistics.median(race.values_of(leader))
            search.progress.best(f"{leader}, {format_seconds(middle_s)} measured")
