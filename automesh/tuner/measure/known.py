"""The data about the plans of one search while they are measured: figures, failures, records."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.jsonio import to_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failure, Measured, Outcome
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.context import SearchContext
from automesh.tuner.measure.decision import (
    Decision,
    ProcessRecord,
    RaceRecord,
    Records,
    measured_outcome,
)
from automesh.tuner.measure.final import Final, FinalRules
from automesh.tuner.measure.fresh_processes import ProcessRun, figures_of
from automesh.tuner.measure.numerics import Checks, Reference, check
from automesh.tuner.measure.schedule import Calibration
from automesh.tuner.measure.seen_once import StoredVisits
from automesh.tuner.measure.statistics import median_interval
from automesh.tuner.study.retrace import OTHER_PROGRAM
from automesh.tuner.study.study import Trial


@dataclass(slots=True, kw_only=True)
class Known:
    """The results of this search and earlier ones, which it also writes to the study.

    Attributes:
      compiled: outcomes of the compile rung; grows with the challengers.
      finalists: the plans of the first race, including the baseline.
      done: the outcomes of plans, in this search or an earlier one, on any machine.
      trials: the open trials of this search in the study.
      calibrations: first visits on this machine.
      reference: the losses that others are compared with, which may be empty; None until a search
        had the time to find them.
      checks: the checks of the numerics.
      records: records of races and of fresh processes on this machine, and of failures on any
        machine.
      decision: the decision of an earlier search; None without one.
      incumbent: the plan that it exports; at most one.
      differing: plans whose programs differ from the compiled ones.
    """

    search: SearchContext
    compiled: Mapping[Plan, Outcome]
    finalists: Sequence[Plan]
    done: dict[Plan, Outcome] = field(default_factory=dict[Plan, Outcome])
    trials: dict[Plan, Trial] = field(default_factory=dict[Plan, Trial])
    calibrations: dict[Plan, Calibration] = field(default_factory=dict[Plan, Calibration])
    reference: Reference | None = None
    checks: Checks = field(default_factory=Checks)
    records: Records = field(default_factory=Records)
    incumbent: tuple[Plan, ...] = ()
    decision: Decision | None = None
    differing: dict[Plan, None] = field(default_factory=dict[Plan, None])
    _waiting: dict[Plan, Calibration] = field(default_factory=dict[Plan, Calibration])

    @property
    def baseline(self) -> tuple[Plan, ...]:
        return self.search.legal.baseline

    @property
    def machine(self) -> str:
        return self.search.study.owner.machine

    # Results of earlier searches

    def reload(self) -> None:
        """Loads the results in the study, and finishes what a killed search has left open there."""
        self.search.study.measure.adopt_expired()
        records: Records = self.search.notebook.read("records", Records) or Records()
        self.records = records.of_machine(self.machine)
        stored: StoredVisits | None = self.search.notebook.read("visits", StoredVisits)
        if stored is not None and stored.machine == self.machine:
            self._take_over(stored)
        for trial in self.search.study.measure.trials():
            if trial.outcome is not None and self.search.notebook.is_current(trial):
                self.done[trial.plan] = trial.outcome
        for plan, failure in self.records.failed:
            self.done[plan] = failure
        if self.reference is not None:
            self._close_begun()
        self.decision = self.search.notebook.decision()
        self.incumbent = () if self.decision is None else (self.decision.winner,)

    def _take_over(self, stored: StoredVisits) -> None:
        plans = frozenset(self.search.legal.plans)
        for calibration in stored.calibrations:
            compiled = self.compiled.get(calibration.plan)
            if calibration.plan not in plans:
                continue
            if compiled is None:
                # This search had no time to compile it: a later one, and the report, may use it.
                self._waiting[calibration.plan] = calibration
            elif isinstance(compiled, Compiled) and (
                compiled.fingerprint == calibration.first.fingerprint
            ):
                self.calibrations[calibration.plan] = calibration
        for reference in stored.references:
            if not self.baseline or set(reference.plan) & set(self.baseline):
                self._adopt(reference)
        if self.reference is not None:
            self._check_all(self.reference)

    def _close_begun(self) -> None:
        """Finishes trials of a search that was killed between a race and the end of its trials."""
        begun = self.begun()
        for race in self.records.races:
            for plan, _ in race.rounds:
                if plan in begun and plan not in self.done:
                    self.open_trials([plan])
                    self.close(race, plan)

    def begun(self) -> list[Plan]:
        """Returns the plans with an open trial: this search or an earlier one has begun with
        them."""
        plans = frozenset(self.search.legal.plans)
        trials = [trial for trial in self.search.study.measure.trials() if trial.plan in plans]
        return [
            trial.plan
            for trial in trials
            if trial.is_open and self.search.notebook.is_current(trial)
        ]

    # New results

    def use_reference(self, found: Reference) -> None:
        """Sets the reference. If it is for another baseline than before, all first visits are
        judged anew."""
        self._adopt(found)
        self._check_all(found)
        self._close_begun()

    def _adopt(self, reference: Reference) -> None:
        self.reference = reference
        self.search.notebook.note_reference(reference.name)

    def _check_all(self, reference: Reference) -> None:
        for plan in list(self.calibrations):
            self.judge(plan, reference)

    def judge(self, plan: Plan, reference: Reference) -> None:
        """Compares a first visit with the reference, and drops the plan if it computes something
        else."""
        calibration = self.calibrations[plan]
        self.checks.note(plan, *check(reference, plan, calibration.first))
        if self.checks.agrees(plan):
            return
        samples = calibration.first.samples_s
        outcome = measured_outcome(
            calibration,
            self.compiled.get(plan),
            self.checks.of(plan),
            samples,
            step_s=statistics.median(samples),
            interval_s=(min(samples), max(samples)),
        )
        self.finish(plan, outcome)
        del self.calibrations[plan]

    def open_trials(self, plans: Sequence[Plan]) -> None:
        """Begins trials of those plans that have no open one."""
        for plan in plans:
            trial = self.search.study.measure.begin(plan) if plan not in self.trials else None
            if trial is not None:
                self.trials[plan] = trial

    def finish(self, plan: Plan, outcome: Outcome) -> None:
        """Records the outcome of a plan; a plan with another program stays open until the reason is
        known."""
        self.done[plan] = outcome
        if outcome == OTHER_PROGRAM:
            self.differing[plan] = None
            return
        trial = self.trials.pop(plan, None)
        if trial is not None:
            calibration = self.calibrations.get(plan)
            fingerprint = calibration.first.fingerprint if calibration else ""
            self.search.study.measure.finish(trial, outcome, fingerprint=fingerprint)

    def close(self, race: RaceRecord, plan: Plan) -> None:
        """Finishes the trial of a plan with its result in a race."""
        rounds_s = dict(race.rounds)[plan]
        if not rounds_s or plan not in self.calibrations:
            return
        outcome = measured_outcome(
            self.calibrations[plan],
            self.compiled.get(plan),
            self.checks.of(plan),
            rounds_s,
            step_s=statistics.median(rounds_s),
            interval_s=median_interval(rounds_s),
            raced_out=plan in race.beaten,
        )
        self.finish(plan, outcome)

    def note_visits(self) -> None:
        """Stores the first visits, also those of plans that only earlier searches compiled."""
        waiting = {
            plan: one
            for plan, one in self._waiting.items()
            if plan not in self.done or may_be_exported(self.done[plan])
        }
        visits = {**waiting, **self.calibrations}
        stored = StoredVisits(
            machine=self.machine,
            calibrations=tuple(visits.values()),
            references=() if self.reference is None else (self.reference,),
        )
        self.search.notebook.note("visits", to_json(stored, StoredVisits))

    def add_race(self, race: RaceRecord) -> None:
        """Stores a race, and finishes the trials of its plans."""
        self.records = replace(self.records, races=(*self.records.races, race))
        self._note_records()
        # After the record is stored: if the search is killed here, the next one only has to close
        # the trials.
        for plan, _ in race.rounds:
            if plan not in self.done:
                self.close(race, plan)

    def add_process(self, ran: ProcessRun, passes: int) -> None:
        """Stores a fresh process, and finishes the plans that failed in it."""
        records = self.records
        if ran.seconds:
            record = ProcessRecord(
                machine=self.machine, seconds=ran.seconds, took_s=ran.took_s, passes=passes
            )
            records = replace(records, processes=(*records.processes, record))
        self.records = replace(records, failed=(*records.failed, *ran.failures))
        self._note_records()
        for plan, failure in ran.failures:
            self.finish(plan, failure)

    def add_failures(self, plans: Sequence[Plan]) -> None:
        """Stores plans that ran before, and now failed."""
        failed = [(plan, self.done[plan]) for plan in plans]
        found = tuple((plan, one) for plan, one in failed if isinstance(one, Failure))
        self.records = replace(self.records, failed=(*self.records.failed, *found))
        self._note_records()

    def _note_records(self) -> None:
        self.search.notebook.note("records", to_json(self.records, Records))

    # Conclusions

    def raced(self) -> set[Plan]:
        """Returns the plans that have rounds of a race on this machine."""
        return {plan for race in self.records.races for plan, values in race.rounds if values}

    def unraced(self) -> list[Plan]:
        """Returns the finalists of which it is not known whether they run."""
        raced = self.raced()
        return [plan for plan in self.finalists if plan not in raced and plan not in self.done]

    def is_to_race(self, plan: Plan, raced: Collection[Plan]) -> bool:
        """Whether a plan that was not raced on this machine is raced now.

        A plan that was measured on another machine, or before this one was restarted, is raced only
        if nothing was decided there and nothing was raced here: seconds of the two cannot be
        compared.
        """
        if plan not in self.done:
            return True
        is_open = self.decision is None or bool(self.decision.undecided)
        return not raced and is_open and may_be_exported(self.done[plan])

    def final(self) -> Final:
        """Returns the final in fresh processes, as far as it was run."""
        legal = frozenset(self.search.legal.plans)
        excluded = {plan for plan, one in self.done.items() if not may_be_exported(one)}
        # These plans belong to a former search space.
        excluded |= {plan for plan in self.records.plans if plan not in legal}
        return self.records.final(
            rules=FinalRules(),
            baseline=[plan for plan in self.baseline if self._may_run(plan)],
            incumbent=self.incumbent,
            excluded=excluded,
        )

    def _may_run(self, plan: Plan) -> bool:
        return plan in self.calibrations or may_be_exported(self.done.get(plan))

    def confirmed(self, final: Final) -> dict[Plan, Measured]:
        """Returns the plans with figures from fresh processes."""
        return {
            plan: measured_outcome(
                self.calibrations[plan],
                self.compiled.get(plan),
                self.checks.of(plan),
                figure.rounds_s,
                step_s=figure.step_s,
                interval_s=figure.interval_s,
                confirmed=True,
            )
            for plan, figure in figures_of(final).items()
            if plan in self.calibrations
        }

    def measured(self) -> dict[Plan, Outcome]:
        """Returns the outcomes of the plans; figures from fresh processes replace those of
        races."""
        return {**self.done, **self.confirmed(self.final())}
