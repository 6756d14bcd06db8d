"""The measure rung: finalists and baseline raced on the devices, the winner confirmed afresh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from automesh.ladder.confirm import Confirmation, Figure, confirm
from automesh.ladder.live_pool import LivePool
from automesh.ladder.measure import run_race
from automesh.ladder.notebook import Notebook
from automesh.ladder.preparation import Preparation
from automesh.ladder.racing import Race, RaceRules, Standing
from automesh.ladder.ranking import may_be_exported, promising
from automesh.ladder.reference import Checks, Reference, check, find_reference
from automesh.ladder.study import Study, Trial
from automesh.ladder.verdict import Decision, RaceVerdict, comparison_of, kept_or_beaten
from automesh.ladder.visits import Calibration, Subject, VisitRules, calibrate
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failure, Measured, Outcome
from automesh.results.progress import Progress
from automesh.results.result import Verification
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

    def run(self) -> None:
        """Measures what is not measured yet, and stores everything; the study is the result."""
        finalists = promising(self.compiled, first=self.preparation.baseline, limit=self.top)
        if not finalists or not self._wait_for_lease():
            return
        self._reload()
        decision = self.notebook.decision()
        todo = [plan for plan in finalists if plan not in self._done]
        # All may be finished and nothing decided, where the winner failed in its confirmation.
        undecided = [] if todo or decision is not None else self._eligible(finalists)
        if not todo and not undecided:
            return
        entrants = list(dict.fromkeys([*todo, *undecided, *self._anchors(decision)]))
        self._open_trials(todo)
        if self._calibrate(entrants):
            self._race([plan for plan in entrants if plan in self._calibrations])

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
                self.progress.notice(
                    "another search on this storage is measuring; run the command again later"
                )
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
        if isinstance(found, Calibration):
            self._calibrations[plan] = found
        else:
            self._finish(plan, found)

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
        self._finish(plan, self._measured(plan, samples, sorted(samples)[len(samples) // 2], span))
        del self._calibrations[plan]

    def _race(self, entrants: Sequence[Plan]) -> None:
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
            return
        others = [one for one in report.standings if one.finalist != winner.finalist]
        verdict = RaceVerdict(
            winner=winner.finalist,
            comparisons=tuple(comparison_of(one) for one in others if one.to_winner is not None),
            sentence=report.sentence,
        )
        self._confirm(verdict, {one.finalist: one for one in report.standings})

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

    def _confirm(self, verdict: RaceVerdict, standings: Mapping[Plan, Standing[Plan]]) -> None:
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
            # Three processes are the least evidence: they are granted even past the budget.
            deadline_s=max(self.deadline_s, self.clock() + self._confirmation_s([verdict.winner])),
            clock=self.clock,
            on_round=on_round,
        )
        self._store(verdict, standings, confirmation)

    def _store(
        self,
        verdict: RaceVerdict,
        standings: Mapping[Plan, Standing[Plan]],
        confirmation: Confirmation,
    ) -> None:
        figures: dict[Plan, Figure | Failure] = {}
        for plan, figure in (
            (verdict.winner, confirmation.winner),
            *((plan, confirmation.baseline) for plan in self.preparation.baseline),
        ):
            if plan in standings and figure is not None:
                figures.setdefault(plan, figure)
        if verdict.winner not in figures:
            # The trials stay open with their rounds: the same command goes on from here.
            self.progress.notice("there was no time to confirm the winner; run the command again")
            return
        final = {
            plan: self._final(plan, standing, figures.get(plan))
            for plan, standing in standings.items()
            if plan not in self._done or isinstance(figures.get(plan), Figure)
        }
        confirmed = {plan: final[plan] for plan, one in figures.items() if isinstance(one, Figure)}
        if verdict.winner in confirmed:
            self._decide(verdict, confirmation, confirmed)
        # After the decision: whoever is killed here finds it, and only has trials to close.
        for plan, outcome in final.items():
            self._finish(plan, outcome)

    def _decide(
        self, verdict: RaceVerdict, confirmation: Confirmation, confirmed: Mapping[Plan, Outcome]
    ) -> None:
        ratio = confirmation.to_winner
        rivals = [one for one in verdict.comparisons if one.plan in self.preparation.baseline]
        verification = Verification(
            processes=CONFIRMATIONS,
            speedup=ratio.value if ratio else 1.0,
            speedup_interval=(ratio.low, ratio.high) if ratio else (1.0, 1.0),
            is_tie=ratio is not None
            and (ratio.low <= 1.0 or any(one.verdict != "slower" for one in rivals)),
        )
        kept = kept_or_beaten(
            verdict.winner, self.preparation.baseline, verification, {**self._done, **confirmed}
        )
        self.notebook.note_decision(
            Decision(
                winner=kept,
                verification=verification,
                race=verdict,
                confirmed=tuple(
                    (plan, outcome)
                    for plan, outcome in confirmed.items()
                    if isinstance(outcome, Measured)
                ),
                made=datetime.now(UTC).isoformat(timespec="seconds"),
            )
        )

    def _final(
        self, plan: Plan, standing: Standing[Plan], figure: Figure | Failure | None
    ) -> Outcome:
        if isinstance(figure, Figure):
            return self._measured(
                plan, figure.rounds_s, figure.step_s, figure.interval_s, confirmed=True
            )
        if figure is not None:
            return figure
        return self._measured(
            plan,
            standing.rounds_s,
            standing.step_s,
            standing.interval_s,
            raced_out=standing.verdict == "slower",
        )

    def _measured(
        self,
        plan: Plan,
        rounds_s: Sequence[float],
        step_s: float,
        interval_s: tuple[float, float],
        *,
        raced_out: bool = False,
        confirmed: bool = False,
    ) -> Measured:
        numerics, detail = self._checks.of(plan)
        first = self._calibrations[plan].first
        compiled = self.compiled.get(plan)
        peak = first.peak_bytes
        if not peak and isinstance(compiled, Compiled):
            peak = compiled.memory.peak_bytes
        # A single round bounds nothing; its own value stands for both ends.
        span = interval_s if interval_s[1] != float("inf") else (step_s, step_s)
        return Measured(
            step_s=step_s,
            interval_s=span,
            rounds_s=tuple(rounds_s),
            losses=first.losses,
            numerics=numerics,
            numerics_detail=detail,
            values=first.values,
            raced_out=raced_out,
            confirmed=confirmed,
            peak_bytes=peak,
        )

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
        pair = [*entrants[:1], *self.preparation.baseline]
        return CONFIRMATIONS * (_PROCESS_START_S + 2 * self._round_s(pair))
