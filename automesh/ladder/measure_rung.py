"""The measure rung: finalists and baseline raced on the devices, the winner confirmed afresh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from automesh.errors import UsageError
from automesh.ladder.closing import decide, figures_of, final_outcome, measured_outcome
from automesh.ladder.confirm import Confirmation, Figure, confirm
from automesh.ladder.live_pool import LivePool
from automesh.ladder.measure import run_race
from automesh.ladder.notebook import Notebook
from automesh.ladder.preparation import Preparation
from automesh.ladder.racing import Race, RaceRules, Standing
from automesh.ladder.ranking import may_be_exported, promising
from automesh.ladder.reference import Checks, Reference, check, find_reference
from automesh.ladder.study import Study, Trial
from automesh.ladder.verdict import Decision, RaceVerdict, comparison_of
from automesh.ladder.visits import Calibration, Subject, VisitRules, calibrate
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Measured, Outcome
from automesh.results.progress import Progress
from automesh.units import format_seconds

CONFIRMATIONS = 5  # fresh processes, each of which visits winner and baseline
_PROCESS_START_S = 4.0
_WAIT_S = 1.0
_OVERRUN_S = 120.0  # a search that began with this one may confirm its winner past the budget


@dataclass(slots=True, kw_only=True)
class MeasureRung:
    """Runs the measure rung of one search; only the holder of the study's lease measures.

    Attributes:
      compiled: outcomes of the compile rung.
      top: finalists besides the baseline.
      deadline_s: when the race must be over, on `clock`; the confirmation follows in any case.
    """

    preparation: Preparation
    study: Study
    notebook: Notebook
    pool: LivePool
    progress: Progress
    compiled: Mapping[Plan, Outcome]
    top: int
    deadline_s: float
    rules: VisitRules
    clock: Callable[[], float] = time.monotonic
    _done: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _trials: dict[Plan, Trial] = field(init=False, default_factory=dict[Plan, Trial])
    _calibrations: dict[Plan, Calibration] = field(
        init=False, default_factory=dict[Plan, Calibration]
    )
    _checks: Checks = field(init=False, default_factory=Checks)
    _rounds: int = field(init=False, default=0)

    def run(self) -> str:
        """Measures what is not measured yet, and stores everything; the study is the result.

        Returns:
          How it ended, a sentence; empty if there was nothing left to measure.

        Raises:
          LeaseLost: another search has taken over, as this one was silent for too long.
          UsageError: the machine, not a plan, failed; or the script was changed meanwhile.
        """
        for plan in self.preparation.baseline:
            if not isinstance(self.compiled.get(plan), Compiled):
                self.progress.notice(
                    f"the baseline {plan} was not compiled, so nobody is raced with it"
                )
        finalists = promising(self.compiled, first=self.preparation.baseline, limit=self.top)
        if not finalists:
            return "nothing compiled"
        if not self._wait_for_lease():
            return "another search on this storage is measuring; run the same command later"
        self._reload()
        decision = self.notebook.decision()
        todo = [plan for plan in finalists if plan not in self._done]
        # All may be finished and nothing decided, where the winner failed in its confirmation.
        undecided = [] if todo or decision is not None else self._eligible(finalists)
        if not todo and not undecided and self._is_compared(decision):
            return ""
        entrants = list(dict.fromkeys([*todo, *undecided, *self._anchors(decision)]))
        self._open_trials(todo)
        if not self._calibrate(entrants):
            return "no finalist could be measured"
        return self._race([plan for plan in entrants if plan in self._calibrations])

    def _is_compared(self, decision: Decision | None) -> bool:
        """Whether the decision compares with the baseline as it is now, if that can be raced."""
        able = self._eligible(self.preparation.baseline)
        known = {} if decision is None else dict(decision.confirmed)
        return all(plan in known for plan in able)

    def _wait_for_lease(self) -> bool:
        """Waits for another search on the same storage to finish measuring, or to die."""
        while not self.study.lead():
            holder = self.study.leader()
            if holder is not None:
                self.progress.now(f"waiting for {holder.host} (process {holder.pid}) to measure")
            self.progress.tick()
            self.study.heartbeat()
            time.sleep(_WAIT_S)
            if self.clock() > self.deadline_s + _OVERRUN_S:
                return False
        return True

    def _reload(self) -> None:
        self.study.measure.adopt_expired()
        for trial in self.study.measure.trials():
            if trial.outcome is not None and self.notebook.is_current(trial):
                self._done[trial.plan] = trial.outcome

    def _anchors(self, decision: Decision | None) -> list[Plan]:
        """Finished plans to race newcomers against: times of another run do not compare."""
        kept = [] if decision is None else [decision.winner]
        return [
            plan
            for plan in dict.fromkeys([*kept, *self.preparation.baseline])
            if may_be_exported(self._done.get(plan))
        ]

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
        reference = self._reference(entrants)
        for number, plan in enumerate(entrants):
            if plan not in self._calibrations and plan not in self._done:
                self._visit_first(plan)
            elif plan not in self._calibrations:
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
            raise UsageError(
                "the script was changed while it was searched",
                hint="run the same command again: what still holds is kept",
            )
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

    def _race(self, entrants: Sequence[Plan]) -> str:
        stored = {plan: self._stored_rounds(plan) for plan in entrants}
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
        verdict = RaceVerdict(
            winner=winner.finalist,
            comparisons=tuple(comparison_of(one) for one in others if one.to_winner is not None),
            sentence=report.sentence,
        )
        standings = {one.finalist: one for one in report.standings}
        return self._confirm(verdict, standings, race_was_decided=report.ended != "deadline")

    def _start_race(
        self, entrants: Sequence[Plan], stored: Mapping[Plan, Sequence[float]]
    ) -> Race[Plan]:
        try:
            return Race(entrants, rules=RaceRules(), seed=0, rounds=stored)
        except ValueError:
            # Other finalists than last time: rounds that do not line up cannot be paired.
            self.progress.notice("the finalists have changed; the race starts again from round one")
            return Race(entrants, rules=RaceRules(), seed=0)

    def _stored_rounds(self, plan: Plan) -> tuple[float, ...]:
        trial = self._trials.get(plan)
        if trial is None:
            return ()
        here = [one for one in trial.rounds if one.machine == self.study.owner.machine]
        return tuple(sorted(one.samples_s)[len(one.samples_s) // 2] for one in here)

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

    def _confirm(
        self,
        verdict: RaceVerdict,
        standings: Mapping[Plan, Standing[Plan]],
        *,
        race_was_decided: bool,
    ) -> str:
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
        return self._store(verdict, standings, confirmation, race_was_decided=race_was_decided)

    def _store(
        self,
        verdict: RaceVerdict,
        standings: Mapping[Plan, Standing[Plan]],
        confirmation: Confirmation,
        *,
        race_was_decided: bool,
    ) -> str:
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
            for plan, standing in standings.items()
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
                race_was_decided=race_was_decided,
            )
            self.notebook.note_decision(decision)
        # After the decision: whoever is killed here finds it, and only has trials to close.
        for plan, outcome in final.items():
            self._finish(plan, outcome)
        return ending

    def _finish(self, plan: Plan, outcome: Outcome) -> None:
        self._done[plan] = outcome
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
        each_s = sum(one.visit_s + one.first.setup_s for one in plans)
        return CONFIRMATIONS * (_PROCESS_START_S + each_s)
