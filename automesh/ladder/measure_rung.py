"""The measure rung: finalists and baseline raced on the devices, the winner confirmed afresh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from automesh.ladder.closing import decide, figures_of, final_outcome, measured_outcome
from automesh.ladder.confirm import Confirmation, Figure, confirm, process_s_of
from automesh.ladder.live_pool import LivePool, wait_for_lease
from automesh.ladder.measure import run_race
from automesh.ladder.notebook import Notebook
from automesh.ladder.preparation import Preparation
from automesh.ladder.racing import Race, RaceRules
from automesh.ladder.ranking import may_be_exported
from automesh.ladder.reference import Checks, Reference, check, find_reference
from automesh.ladder.retracing import OTHER_PROGRAM, explain_programs, other_program
from automesh.ladder.study import Study, Trial
from automesh.ladder.verdict import (
    Decision,
    Raced,
    RaceVerdict,
    comparison_of,
    is_compared,
    merged,
    undecided_of,
)
from automesh.ladder.visits import Calibration, Subject, VisitRules, calibrate
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Measured, Outcome
from automesh.results.progress import Progress
from automesh.units import format_seconds

CONFIRMATIONS = 5  # fresh processes, each of which visits winner and baseline
_OVERRUN_S = 120.0  # a search that began with this one may confirm its winner past the budget


@dataclass(slots=True, kw_only=True)
class MeasureRung:
    """Runs the measure rung of one search; only the holder of the study's lease measures.

    Attributes:
      compiled: outcomes of the compile rung; grows with the challengers.
      finalists: of the first race, the baseline among them.
      challenge: by what is measured, until a time on `clock`, compiles plans that may still win.
      deadline_s: when the race must be over, on `clock`; the confirmation follows in any case.
    """

    preparation: Preparation
    study: Study
    notebook: Notebook
    pool: LivePool
    progress: Progress
    compiled: Mapping[Plan, Outcome]
    finalists: Sequence[Plan]
    challenge: Callable[[Mapping[Plan, Outcome], float], Sequence[Plan]]
    deadline_s: float
    rules: VisitRules
    clock: Callable[[], float] = time.monotonic
    _done: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _trials: dict[Plan, Trial] = field(init=False, default_factory=dict[Plan, Trial])
    _calibrations: dict[Plan, Calibration] = field(
        init=False, default_factory=dict[Plan, Calibration]
    )
    _known_reference: Reference | None = field(init=False, default=None)
    _checks: Checks = field(init=False, default_factory=Checks)
    _rounds: int = field(init=False, default=0)
    _differing: dict[Plan, None] = field(init=False, default_factory=dict[Plan, None])

    def run(self) -> str:
        """Measures what is not measured yet, and stores everything; the study is the result.

        Returns:
          How it ended, a sentence; empty if there was nothing left to measure.

        Raises:
          LeaseLost: another search has taken over, as this one was silent for too long.
          UsageError: the machine, not a plan, failed; or the script was changed meanwhile.
        """
        ending = self._measure()
        self._explain_programs()
        return ending

    def _measure(self) -> str:
        for plan in self.preparation.baseline:
            if not isinstance(self.compiled.get(plan), Compiled):
                what = f"the baseline {plan} was not compiled, so nobody is raced with it"
                self.progress.notice(what)
        if not self.finalists:
            return "nothing compiled"
        until_s = self.deadline_s + _OVERRUN_S
        if not wait_for_lease(self.study, self.progress, until_s=until_s, clock=self.clock):
            return "another search on this storage is measuring; run the same command later"
        self._reload()
        decision = self.notebook.decision()
        wanted = dict.fromkeys([*self.finalists, *self._begun()])
        todo = [plan for plan in wanted if plan not in self._done]
        # All may be finished and nothing decided, where the winner failed in its confirmation or
        # the search was stopped before it.
        undecided = undecided_of(decision, self._done)
        rivals = self._eligible(self.preparation.baseline)
        if not todo and not undecided and is_compared(decision, rivals):
            todo = self._challengers(self._done)
            if not todo:
                return ""
        entrants = list(dict.fromkeys([*todo, *undecided, *self._anchors(decision)]))
        self._open_trials(todo)
        if not self._calibrate(entrants):
            return "no finalist could be measured"
        return self._contest([plan for plan in entrants if plan in self._calibrations])

    def _contest(self, entrants: Sequence[Plan]) -> str:
        """Races, and races the winner against plans that may still beat it, until none may."""
        raced = self._race(entrants)
        while isinstance(raced, Raced) and raced.was_decided:
            rivals = [plan for plan in self.preparation.baseline if plan in self._calibrations]
            kept = [raced.verdict.winner, *raced.kept(rivals)]
            newcomers = self._challengers(self._closed(raced, kept))
            self._open_trials(newcomers)
            if not newcomers or not self._calibrate(newcomers):
                break
            entrants = [plan for plan in newcomers if plan in self._calibrations]
            if not entrants:
                continue  # Every one of them failed: perhaps there are others.
            again = self._race([*entrants, *kept])
            if isinstance(again, str):
                break
            raced = merged(raced, again)
        return raced if isinstance(raced, str) else self._confirm(raced)

    def _closed(self, raced: Raced, kept: Sequence[Plan]) -> Mapping[Plan, Outcome]:
        """Stores the figures of those that leave a race.

        Returns:
          All that is measured by now, with the figures of those that stay.
        """
        known = dict(self._done)
        for plan, standing in raced.standings.items():
            if plan not in self._done:
                facts = (self._calibrations[plan], self.compiled.get(plan), self._checks.of(plan))
                known[plan] = final_outcome(*facts, standing, None)
                if plan not in kept:
                    self._finish(plan, known[plan])
        return known

    def _challengers(self, measured: Mapping[Plan, Outcome]) -> list[Plan]:
        """Plans that may still win, as long as there is time to race and confirm them."""
        known = [plan for plan in self.preparation.baseline if plan in self._calibrations]
        until_s = self.deadline_s - self._confirmation_s(known)
        if self.clock() >= until_s:
            return []
        # The workers are needed to compile, and an accelerator serves one process only.
        self.pool.recycle()
        return [plan for plan in self.challenge(measured, until_s) if plan not in measured]

    def _reload(self) -> None:
        self.study.measure.adopt_expired()
        for trial in self.study.measure.trials():
            if trial.outcome is not None and self.notebook.is_current(trial):
                self._done[trial.plan] = trial.outcome

    def _begun(self) -> list[Plan]:
        """Plans that an earlier run has raced and not finished."""
        plans = frozenset(self.preparation.plans)
        trials = [one for one in self.study.measure.trials() if one.plan in plans]
        return [one.plan for one in trials if one.is_open and self.notebook.is_current(one)]

    def _anchors(self, decision: Decision | None) -> list[Plan]:
        """Finished plans to race newcomers against: times of another run do not compare."""
        kept = [] if decision is None else [decision.winner]
        return self._eligible(list(dict.fromkeys([*kept, *self.preparation.baseline])))

    def _open_trials(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            trial = self.study.measure.begin(plan)
            if trial is not None:
                self._trials[plan] = trial

    def _calibrate(self, entrants: Sequence[Plan]) -> bool:
        """Visits every entrant once, drops those that fail or compute something else.

        Returns:
          False if nothing is left to race.
        """
        reference = self._known_reference or self._reference(entrants)
        self._known_reference = reference
        for number, plan in enumerate(entrants):
            if plan not in self._calibrations and plan not in self._done:
                self._visit_first(plan)
            elif plan not in self._calibrations and isinstance(self._done[plan], Measured):
                again = calibrate(
                    self.pool, self._subject, plan, rules=self.rules, clock=self.clock
                )
                if isinstance(again, Calibration):
                    self._calibrations[plan] = again
            calibration = self._calibrations.get(plan)
            if calibration is not None:
                self._checks.note(plan, *check(reference, plan, calibration.first))
                self._drop_unless_agreeing(plan, calibration)
            self.progress.phase(
                "measure", total=len(entrants), done=number + 1, note="first visits"
            )
        return bool(self._calibrations)

    def _visit_first(self, plan: Plan) -> None:
        self.progress.now(f"{plan}, first visit")
        found = calibrate(self.pool, self._subject, plan, rules=self.rules, clock=self.clock)
        if not isinstance(found, Calibration):
            self._finish(plan, found)
            return
        compiled = self.compiled.get(plan)
        if isinstance(compiled, Compiled) and compiled.fingerprint != found.first.fingerprint:
            self._finish(plan, other_program(self._subject.sources))
            return
        self._calibrations[plan] = found

    def _reference(self, entrants: Sequence[Plan]) -> Reference:
        baseline = [plan for plan in self.preparation.baseline if plan in entrants]
        for plan in baseline:
            self._visit_first(plan)
        reference = find_reference(
            self.pool,
            self._subject,
            baseline=[self._calibrations[plan] for plan in baseline if plan in self._calibrations],
            plans=self.preparation.plans,
            rules=self.rules,
        )
        self.notebook.note_reference(reference.name)
        return reference

    @property
    def _subject(self) -> Subject:
        inspection = self.preparation.inspection
        return Subject(
            entry=self.preparation.entry,
            axis_types=inspection.axis_types,
            facts=inspection.facts,
            cache_dir=str(self.preparation.cache_dir),
            sources=inspection.sources,
        )

    def _drop_unless_agreeing(self, plan: Plan, calibration: Calibration) -> None:
        if self._checks.agrees(plan):
            return
        samples = calibration.first.samples_s
        span = (min(samples), max(samples))
        outcome = measured_outcome(
            calibration,
            self.compiled.get(plan),
            self._checks.of(plan),
            samples,
            step_s=statistics.median(samples),
            interval_s=span,
        )
        self._finish(plan, outcome)
        del self._calibrations[plan]

    def _race(self, entrants: Sequence[Plan]) -> Raced | str:
        machine = self.study.owner.machine
        known = {plan: self._trials.get(plan) for plan in entrants}
        stored = {plan: one.medians_s(machine) if one else () for plan, one in known.items()}
        # An anchor has no rounds of this race, and without them the others' compare with nothing.
        resumable = all(plan in self._trials for plan in entrants)
        race = self._start_race(entrants, stored if resumable else {})
        race_deadline_s = self.deadline_s - self._confirmation_s(entrants)
        report = run_race(
            self.pool,
            self._subject,
            race,
            self._calibrations,
            rules=self.rules,
            deadline_s=max(race_deadline_s, self.clock() + self._round_s(entrants) * 4.5),
            clock=self.clock,
            on_round=lambda plan, number, value_s: self._on_round(race, plan, number, value_s),
            on_failure=self._finish,
        )
        winner = report.winner
        if winner is None:
            return "no finalist ran to the end of a round; run the same command to go on"
        others = [one for one in report.standings if one.finalist != winner.finalist]
        compared = tuple(comparison_of(one) for one in others if one.to_winner is not None)
        verdict = RaceVerdict(
            winner=winner.finalist, comparisons=compared, sentence=report.sentence
        )
        standings = {one.finalist: one for one in report.standings}
        return Raced(verdict=verdict, standings=standings, was_decided=report.ended != "deadline")

    def _start_race(
        self, entrants: Sequence[Plan], stored: Mapping[Plan, Sequence[float]]
    ) -> Race[Plan]:
        try:
            return Race(entrants, rules=RaceRules(), seed=0, rounds=stored)
        except ValueError:
            # Other finalists than last time: rounds that do not line up cannot be paired.
            self.progress.notice("the finalists have changed; the race starts again from round one")
            return Race(entrants, rules=RaceRules(), seed=0)

    def _on_round(self, race: Race[Plan], plan: Plan, number: int, value_s: float) -> None:
        trial = self._trials.get(plan)
        if trial is not None:
            self.study.measure.report(trial, number, [value_s])
        self._rounds = max(self._rounds, number + 1)
        left = len(race.survivors)
        self.progress.phase(
            "measure",
            total=race.rules.max_rounds,
            done=self._rounds,
            note=f"round {self._rounds}, {left} left",
        )
        self.progress.now(f"{plan}, {format_seconds(value_s)}")
        leader = race.leader
        if leader is not None:
            middle_s = statistics.median(race.values_of(leader))
            self.progress.best(f"{leader}, {format_seconds(middle_s)} measured")

    def _confirm(self, raced: Raced) -> str:
        verdict = raced.verdict
        winner = self._calibrations[verdict.winner]
        rivals = [plan for plan in self.preparation.baseline if plan in self._calibrations]
        rivals = [plan for plan in rivals if plan != verdict.winner]
        baseline = self._calibrations[rivals[0]] if rivals else None
        done = 0

        def on_round(plan: Plan, process: int, value_s: float) -> None:
            nonlocal done
            done = max(done, process + 1)
            self.progress.phase("confirm", total=CONFIRMATIONS, done=done, note="fresh processes")
            self.progress.now(f"{plan}, {format_seconds(value_s)} in fresh process {process + 1}")

        self.progress.phase("confirm", total=CONFIRMATIONS, done=0, note="fresh processes")
        confirmation = confirm(
            self.pool,
            self._subject,
            winner,
            baseline,
            rules=self.rules,
            processes=CONFIRMATIONS,
            seed=0,
            deadline_s=max(self.deadline_s, self.clock() + self._confirmation_s([verdict.winner])),
            clock=self.clock,
            on_round=on_round,
        )
        return self._store(raced, confirmation)

    def _store(self, raced: Raced, confirmation: Confirmation) -> str:
        verdict = raced.verdict
        figures = figures_of(confirmation, verdict.winner, self.preparation.baseline)
        if verdict.winner not in figures:
            # The trials stay open with their rounds: the same command goes on from here.
            return "there was no time to confirm the winner; run the same command to go on"
        final = {
            plan: final_outcome(
                self._calibrations[plan],
                self.compiled.get(plan),
                self._checks.of(plan),
                standing,
                figures.get(plan),
            )
            for plan, standing in raced.standings.items()
            if plan not in self._done or isinstance(figures.get(plan), Figure)
        }
        confirmed = {
            plan: outcome
            for plan, outcome in final.items()
            if isinstance(outcome, Measured) and outcome.confirmed
        }
        ending = "the winner failed when it was measured again; run the same command to go on"
        if verdict.winner in confirmed:
            ending = verdict.sentence
            decision = decide(
                verdict,
                confirmation,
                confirmed,
                baseline=self.preparation.baseline,
            )
            self.notebook.note_decision(decision)
        # After the decision: whoever is killed here finds it, and only has trials to close.
        for plan, outcome in final.items():
            self._finish(plan, outcome)
        return ending

    def _explain_programs(self) -> None:
        """Finishes the plans whose programs differed, once no process has anything ready."""
        if not self._differing:
            return
        self.progress.now("tracing steps again whose programs have changed")
        plans = tuple(self._differing)
        found = explain_programs(self.pool, self._subject, plans, self.rules.timeout_s)
        self._differing.clear()
        for plan, failed in found.items():
            self._finish(plan, failed)
            self.progress.notice(f"{plan} was not measured: {failed.reason}")

    def _finish(self, plan: Plan, outcome: Outcome) -> None:
        self._done[plan] = outcome
        if outcome == OTHER_PROGRAM:
            self._differing[plan] = None
            return
        trial = self._trials.pop(plan, None)
        if trial is not None:
            calibration = self._calibrations.get(plan)
            fingerprint = calibration.first.fingerprint if calibration else ""
            self.study.measure.finish(trial, outcome, fingerprint=fingerprint)

    def _eligible(self, plans: Sequence[Plan]) -> list[Plan]:
        return [plan for plan in plans if may_be_exported(self._done.get(plan))]

    def _round_s(self, plans: Sequence[Plan]) -> float:
        return sum(self._calibrations[plan].visit_s for plan in plans if plan in self._calibrations)

    def _confirmation_s(self, entrants: Sequence[Plan]) -> float:
        """What the confirmation may take: a fresh process sets up both plans anew."""
        pair = [*entrants[:1], *self.preparation.baseline]
        plans = [self._calibrations[plan] for plan in pair if plan in self._calibrations]
        return CONFIRMATIONS * process_s_of(plans)
