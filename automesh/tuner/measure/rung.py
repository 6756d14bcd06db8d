"""The measure rung: finalists are raced on the devices, the best measured in fresh processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.jsonio import to_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Failure, Measured, Outcome, TimedOut
from automesh.report import words
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.context import SearchContext
from automesh.tuner.measure.decision import (
    Decision,
    ProcessRecord,
    RaceRecord,
    Records,
    decide,
    measured_outcome,
    raced_against,
    record_of,
)
from automesh.tuner.measure.final import FEWEST, LOOKS, Final, FinalRules
from automesh.tuner.measure.fresh_processes import (
    FEWEST_PASSES,
    MOST_PASSES,
    figures_of,
    process_s_of,
    run_process,
)
from automesh.tuner.measure.leased_pool import LivePool, wait_for_lease
from automesh.tuner.measure.numerics import Checks, Reference, check, find_reference
from automesh.tuner.measure.race import Race, RaceRules
from automesh.tuner.measure.schedule import (
    BoundedPool,
    Calibration,
    Subject,
    VisitRules,
    calibrate,
    run_race,
)
from automesh.tuner.measure.statistics import median_interval
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.retrace import OTHER_PROGRAM, explain_programs, other_program
from automesh.tuner.study.study import Trial
from automesh.tuner.workers import memory_share_bytes
from automesh.units import format_seconds, format_wait

RACE = RaceRules(max_rounds=12, keep=FinalRules().entrants)
EARLY = LOOKS[1]  # processes before other plans are compiled to challenge the best
RESERVED = 5  # processes that a race leaves time for
_LEAST_RACE = 1 / 3  # of the time that the fewest processes leave
_GRACE = 0.05  # of the budget, or so many seconds, whichever is more: for the third process alone
_GRACE_S = 12.0
_NO_REFERENCE = (
    "the time was used up before any step could be run whose losses the others are compared with; "
    "give it more --budget, or see with --timeout whether it hangs"
)
UNRACED = (
    "there was no time for a race, so what was fastest at its first visit was measured; "
    "run the same command, best with more --budget, to race all of them"
)
_NOTHING_YET = (
    "the time did not suffice to measure the best in three fresh processes; "
    "run the same command to go on"
)


def has_raced(notebook: Notebook) -> bool:
    """Whether a race was run on this machine, to its end or to the end of its time."""
    records: Records | None = notebook.read("records", Records)
    machine = notebook.study.owner.machine
    return records is not None and bool(records.of_machine(machine).races)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVisits:
    """First visits of one machine, so that a search that goes on need not make them again."""

    machine: str
    calibrations: tuple[Calibration, ...]
    references: tuple[Reference, ...]


@dataclass(slots=True, kw_only=True)
class MeasureRung:
    """Runs the measure rung of one search; only the holder of the study's lease measures.

    A race in one process leaves the best two or three; these and the baseline are timed side by
    side in fresh processes until they are told apart or the time is over. What stays undecided is
    where the next search goes on: no round and no process is ever repeated.

    Attributes:
      compiled: outcomes of the compile rung; grows with the challengers.
      finalists: of the first race, the baseline among them.
      challenge: by what is measured, until a time, compiles plans that may still win.
    """

    search: SearchContext
    pool: LivePool
    compiled: Mapping[Plan, Outcome]
    finalists: Sequence[Plan]
    challenge: Callable[[Mapping[Plan, Outcome], float], Sequence[Plan]]
    rules: VisitRules
    _done: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _trials: dict[Plan, Trial] = field(init=False, default_factory=dict[Plan, Trial])
    _calibrations: dict[Plan, Calibration] = field(
        init=False, default_factory=dict[Plan, Calibration]
    )
    _known_reference: Reference | None = field(init=False, default=None)
    _checks: Checks = field(init=False, default_factory=Checks)
    _rounds: int = field(init=False, default=0)
    _differing: dict[Plan, None] = field(init=False, default_factory=dict[Plan, None])
    _records: Records = field(init=False, default_factory=Records)
    _incumbent: tuple[Plan, ...] = field(init=False, default=())
    _decision: Decision | None = field(init=False, default=None)
    _is_told: bool = field(init=False, default=False)

    def run(self) -> str:
        """Measures what is not measured yet, and stores everything; the study is the result.

        Returns:
          How it ended, a sentence; empty if there was nothing left to measure.

        Raises:
          LeaseLost: another search has taken over, as this one was silent for too long.
          UsageError: the machine, not a plan, failed; or the script was changed meanwhile.
        """
        try:
            ending = self._measure()
        except KeyboardInterrupt:
            # What the processes said until now is a decision, too.
            self._store("it was interrupted")
            raise
        self._explain_programs()
        return ending

    def _measure(self) -> str:
        for plan in self.search.preparation.baseline:
            if not isinstance(self.compiled.get(plan), Compiled):
                what = f"the baseline {plan} was not compiled, so nobody is raced with it"
                self.search.progress.notice(what)
        if not self.finalists:
            return "nothing compiled"
        if not wait_for_lease(
            self.search.study,
            self.search.progress,
            until_s=self.search.end_s,
            clock=self.search.clock,
        ):
            return "another search on this storage is measuring; run the same command later"
        self._reload()
        raced = self._raced_plans()
        wanted = dict.fromkeys([*self.finalists, *self._begun()])
        todo = [plan for plan in wanted if plan not in raced and self._is_to_race(plan, raced)]
        if todo:
            self._run_race(todo)
        elif self._is_settled() and not self._challenge_until_none(RESERVED):
            return ""
        if not self._raced_plans():
            return self._measure_unraced()
        self._measure_afresh(EARLY)
        while (waiting := self._unraced()) and self._run_race(waiting):
            pass
        self._challenge_until_none(RESERVED)
        is_decided = self._measure_afresh(LOOKS[-1]) and not self._unraced()
        return self._store("all of them are decided" if is_decided else "")

    def _measure_unraced(self) -> str:
        """Measures what was fastest at the first visits: there was no time for a race."""
        is_decided = self._decision is not None and not self._records.processes  # elsewhere
        if is_decided or not self._by_first_visit(self._final()):
            return self._why_no_race()
        before = len(self._records.processes)
        self._measure_afresh(EARLY)
        if len(self._records.processes) == before:
            return self._why_no_race()
        return self._store(UNRACED)

    def _unraced(self) -> list[Plan]:
        """Finalists of which nobody knows yet whether they run."""
        raced = self._raced_plans()
        return [plan for plan in self.finalists if plan not in raced and plan not in self._done]

    def _is_to_race(self, plan: Plan, raced: Collection[Plan]) -> bool:
        """Whether a plan that was not raced on this machine is raced now.

        One that was measured on another, or before this one was started anew, is so only if
        nothing was decided there and nothing was raced here: seconds of the two do not compare.
        """
        if plan not in self._done:
            return True
        is_open = self._decision is None or bool(self._decision.undecided)
        return not raced and is_open and may_be_exported(self._done[plan])

    def _why_no_race(self) -> str:
        if self._decision is not None:
            return self._decision.sentence or _NOTHING_YET
        if self._calibrations:
            return (
                f"there was no time for a race, whose {FEWEST} fresh processes would take about "
                f"{format_wait(FEWEST * self._least_process_s())}; run the same command to go on"
            )
        has_failed = all(plan in self._done for plan in self.finalists)
        if not has_failed and self.search.clock() > self._race_deadline_s(()):
            return "there was no time to measure anything; run the same command to go on"
        return "no finalist could be measured"

    def _is_settled(self) -> bool:
        """Whether an earlier search has decided all that it has raced."""
        if self._known_reference is None or self._decision is None:
            return False  # another baseline or space than before: what is known is put together
        final = self._final()
        return not final.entrants(self._contenders(final)) and bool(final.exported())

    def _challenge_until_none(self, reserved: int) -> bool:
        """Races plans that may still beat the best, while there is time.

        Args:
          reserved: fresh processes that time is left for.

        Returns:
          Whether anybody was raced.
        """
        has_raced = False
        while newcomers := self._challengers(reserved):
            has_raced = self._run_race(newcomers) or has_raced
        return has_raced

    # What earlier searches left

    def _reload(self) -> None:
        self.search.study.measure.adopt_expired()
        machine = self.search.study.owner.machine
        records: Records = self.search.notebook.read("records", Records) or Records()
        self._records = records.of_machine(machine)
        stored: StoredVisits | None = self.search.notebook.read("visits", StoredVisits)
        if stored is not None and stored.machine == machine:
            self._take_over(stored)
        for trial in self.search.study.measure.trials():
            if trial.outcome is not None and self.search.notebook.is_current(trial):
                self._done[trial.plan] = trial.outcome
        for plan, failure in self._records.failed:
            self._done[plan] = failure
        if self._known_reference is not None:
            self._close_begun()
        self._decision = self.search.notebook.decision()
        self._incumbent = () if self._decision is None else (self._decision.winner,)

    def _close_begun(self) -> None:
        """Finishes trials of a search that was killed after a race and before it did so."""
        begun = self._begun()
        for race in self._records.races:
            for plan, _ in race.rounds:
                if plan in begun and plan not in self._done:
                    self._open_trials([plan])
                    self._close(race, plan)

    def _take_over(self, stored: StoredVisits) -> None:
        plans = frozenset(self.search.preparation.plans)
        for calibration in stored.calibrations:
            compiled = self.compiled.get(calibration.plan)
            is_same = isinstance(compiled, Compiled) and (
                compiled.fingerprint == calibration.first.fingerprint
            )
            if calibration.plan in plans and is_same:
                self._calibrations[calibration.plan] = calibration
        for reference in stored.references:
            if not self.search.preparation.baseline or set(reference.plan) & set(
                self.search.preparation.baseline
            ):
                self._known_reference = reference
                self.search.notebook.note_reference(reference.name)
        if self._known_reference is not None:
            self._check_all(self._known_reference)

    def _check_all(self, reference: Reference) -> None:
        """Compares every first visit with the reference, and drops what computes something else."""
        for plan, one in list(self._calibrations.items()):
            self._checks.note(plan, *check(reference, plan, one.first))
            self._drop_unless_agreeing(plan, one)

    def _ensure_reference(self, plans: Sequence[Plan]) -> Reference:
        """The reference; one for another baseline than before judges all first visits anew."""
        if self._known_reference is None:
            found = self._reference(plans)
            if not found.plan and self._bounded().is_over:
                if not self._is_told:
                    self.search.progress.notice(_NO_REFERENCE)
                self._is_told = True
                return found  # the next search has the time to find one
            self._known_reference = found
            self.search.notebook.note_reference(found.name)
            self._check_all(found)
            self._close_begun()
        return self._known_reference

    def _note_visits(self) -> None:
        reference = self._known_reference
        stored = StoredVisits(
            machine=self.search.study.owner.machine,
            calibrations=tuple(self._calibrations.values()),
            references=() if reference is None else (reference,),
        )
        self.search.notebook.note("visits", to_json(stored, StoredVisits))

    def _note_records(self) -> None:
        self.search.notebook.note("records", to_json(self._records, Records))

    def _begun(self) -> list[Plan]:
        """Plans that an earlier run has raced and not finished."""
        plans = frozenset(self.search.preparation.plans)
        trials = [trial for trial in self.search.study.measure.trials() if trial.plan in plans]
        return [
            trial.plan
            for trial in trials
            if trial.is_open and self.search.notebook.is_current(trial)
        ]

    def _raced_plans(self) -> set[Plan]:
        return {plan for race in self._records.races for plan, values in race.rounds if values}

    # The race

    def _run_race(self, plans: Sequence[Plan]) -> bool:
        """Calibrates and races plans against baseline and exported plan.

        Returns:
          Whether a race was run to its end, or to the end of its time.
        """
        self._open_trials(plans)
        anchors = [plan for plan in self._anchors() if plan not in plans]
        self._calibrate([*self._first(plans), *anchors])
        newcomers = [plan for plan in plans if plan in self._calibrations]
        if not newcomers or self._known_reference is None:
            return False
        anchors = [plan for plan in anchors if plan in self._calibrations]
        entrants = self._as_many_as_fit(newcomers, anchors)
        if not set(newcomers) & set(entrants) or self._is_late_for_race(entrants):
            return False
        return self._race(entrants)

    def _as_many_as_fit(self, newcomers: Sequence[Plan], anchors: Sequence[Plan]) -> list[Plan]:
        """Those that a single round has time for, the fastest of the first visits before others.

        Without a yardstick among them the others' times compare with nothing.
        """
        final = self._final()
        likeliest = [plan for plan in self._by_first_visit(final) if plan in newcomers]
        own = [plan for plan in (*final.baseline, *final.exported()) if plan in newcomers]
        chosen = dict.fromkeys([*anchors, *own] or likeliest[:1])
        left_s = self.search.end_s - self.search.clock()
        for plan in likeliest:
            if plan not in chosen and self._round_s([*chosen, plan]) <= left_s:
                chosen[plan] = None
        return [plan for plan in (*newcomers, *anchors) if plan in chosen]

    def _is_late_for_race(self, entrants: Sequence[Plan]) -> bool:
        """Whether there is time for the processes that a rule needs, but for no round before."""
        if self._final().exported():
            return False
        rule_s = self._missing_processes() * self._least_process_s()
        left_s = self.search.end_s - self.search.clock()
        is_possible = rule_s <= left_s + self._grace_s
        return is_possible and left_s < rule_s + self._round_s(entrants)

    def _first(self, plans: Sequence[Plan]) -> list[Plan]:
        """The baseline before the others: its losses are what they are compared with."""
        own = [plan for plan in self.search.preparation.baseline if plan in plans]
        return list(dict.fromkeys([*own, *plans]))

    def _anchors(self) -> list[Plan]:
        """Finished plans to race newcomers against: times of another race do not compare."""
        exported = self._final().exported()
        plans = dict.fromkeys([*self.search.preparation.baseline, *exported, *self._incumbent])
        anchors = [plan for plan in plans if may_be_exported(self._done.get(plan))]
        if anchors or not self._raced_plans():
            return anchors
        # There is no rule yet: what an earlier race has left links this one with it.
        leaders = self._leaders(self._final())
        return [plan for plan in leaders if may_be_exported(self._done.get(plan))]

    def _challengers(self, reserved: int) -> list[Plan]:
        """Plans that may still win, as long as there is time to race them and to measure them."""
        until_s = self.search.end_s - reserved * self._process_s()
        if self.search.clock() >= until_s:
            return []
        # The workers are needed to compile, and an accelerator serves one process only.
        self.pool.recycle()
        measured = self._measured()
        return [plan for plan in self.challenge(measured, until_s) if plan not in measured]

    def _measured(self) -> dict[Plan, Outcome]:
        """All that is known of the plans that were measured, the best figures first."""
        final = self._final()
        return {**self._done, **self._confirmed(final)}

    def _open_trials(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            trial = self.search.study.measure.begin(plan) if plan not in self._trials else None
            if trial is not None:
                self._trials[plan] = trial

    def _calibrate(self, entrants: Sequence[Plan]) -> None:
        """Visits every entrant once, drops those that fail or compute something else.

        The best come first; when the time for it is over, those left wait for the next search.
        """
        reference = self._ensure_reference(entrants)
        if self._known_reference is None:
            return  # time is used up, and nothing is known that says whether others are right
        for number, plan in enumerate(entrants):
            is_due = sum(entrant in self._calibrations for entrant in entrants) < 2
            if not is_due and self.search.clock() > self._race_deadline_s(entrants):
                break
            if plan not in self._calibrations:
                self._visit_first(plan)
            calibration = self._calibrations.get(plan)
            if calibration is not None:
                self._checks.note(plan, *check(reference, plan, calibration.first))
                self._drop_unless_agreeing(plan, calibration)
            self.search.progress.phase(
                "measure", total=len(entrants), done=number + 1, note="first visits"
            )
        self._note_visits()

    def _bounded(self) -> BoundedPool:
        """The workers, for visits of which nobody knows how long they take: the search must end."""
        return BoundedPool(pool=self.pool, until_s=self._last_s, clock=self.search.clock)

    @property
    def _last_s(self) -> float:
        """When all is over, whatever is missing."""
        return self.search.end_s + self._grace_s

    @property
    def _grace_s(self) -> float:
        return max(_GRACE * self.search.request.budget_s, _GRACE_S)

    def _visit_first(self, plan: Plan) -> None:
        """Visits a plan; its failure is noted, unless it is only that time was used up."""
        begun_s, bounded = self.search.clock(), self._bounded()
        if bounded.is_over:
            return
        self.search.progress.now(f"{plan}, first visit")
        found = calibrate(
            bounded,
            self._subject,
            plan,
            rules=self.rules,
            clock=self.search.clock,
            is_reference=plan in self.search.preparation.baseline,
        )
        if isinstance(found, TimedOut) and bounded.is_over:
            spent_s = self.search.clock() - begun_s
            self.search.progress.notice(
                f"{plan} was still in its first visit, for {format_wait(spent_s)}, when the time "
                "was used up; give it more --budget, or see with --timeout whether it hangs"
            )
            return
        if not isinstance(found, Calibration):
            self._finish(plan, found)
            return
        compiled = self.compiled.get(plan)
        if isinstance(compiled, Compiled) and compiled.fingerprint != found.first.fingerprint:
            self._finish(plan, other_program(self._subject.sources))
            return
        self._calibrations[plan] = found

    def _reference(self, entrants: Sequence[Plan]) -> Reference:
        baseline = [plan for plan in self.search.preparation.baseline if plan in entrants]
        for plan in baseline:
            if plan not in self._calibrations:
                self._visit_first(plan)
        return find_reference(
            self._bounded(),
            self._subject,
            baseline=[self._calibrations[plan] for plan in baseline if plan in self._calibrations],
            plans=self.search.preparation.plans,
            rules=self.rules,
        )

    @property
    def _subject(self) -> Subject:
        inspection = self.search.preparation.inspection
        return Subject(
            step=self.search.preparation.step,
            cache_dir=str(self.search.preparation.cache_dir or ""),
            sources=(*inspection.sources, *inspection.reads.files),
            fits=self._fit_together,
        )

    def _fit_together(self, plans: Sequence[Plan]) -> bool:
        """Whether the states of these plans, and a step of each, fit into the memory at once."""
        known = [self.compiled.get(plan) for plan in plans]
        peaks = [one.memory.peak_bytes for one in known if isinstance(one, Compiled)]
        return len(peaks) == len(known) and sum(peaks) <= self._room_bytes

    @property
    def _room_bytes(self) -> int:
        """Memory that plans may share on one device; of CPU devices half of what a worker has."""
        memory = self.search.preparation.device_memory
        if memory.limit_bytes:
            return memory.limit_bytes - memory.reserve_bytes
        worker_bytes = self.search.request.memory_limit_bytes or memory_share_bytes(1)
        return worker_bytes // (2 * self.search.preparation.aim.num_devices)

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

    def _race(self, entrants: Sequence[Plan]) -> bool:
        machine = self.search.study.owner.machine
        known = {plan: self._trials.get(plan) for plan in entrants}
        stored = {plan: one.medians_s(machine) if one else () for plan, one in known.items()}
        # An anchor has no rounds of this race, and without them the others' compare with nothing.
        resumable = all(plan in self._trials for plan in entrants)
        race = self._start_race(entrants, stored if resumable else {})
        report = run_race(
            self.pool,
            self._subject,
            race,
            self._calibrations,
            rules=self.rules,
            deadline_s=max(self._race_end_s(entrants), self._one_round_s(entrants)),
            first_round_s=max(self._race_deadline_s(entrants), self._one_round_s(entrants)),
            clock=self.search.clock,
            on_round=lambda plan, number, value_s: self._on_round(race, plan, number, value_s),
            on_failure=self._finish,
        )
        for plan, took_s in report.took_s:
            self._calibrations[plan] = self._calibrations[plan].having_taken(took_s)
        self._note_visits()
        if report.winner is None:
            return False
        record = record_of(report.standings, machine=machine, sentence=report.sentence)
        self._records = replace(self._records, races=(*self._records.races, record))
        self._note_records()
        # After the record: whoever is killed here finds it, and only has trials to close.
        for plan, _ in record.rounds:
            if plan not in self._done:
                self._close(record, plan)
        return True

    def _one_round_s(self, entrants: Sequence[Plan]) -> float:
        """When a single round should be over: without one, nobody ever gets to a fresh process."""
        return min(self.search.clock() + 1.5 * self._round_s(entrants), self.search.end_s)

    def _round_s(self, entrants: Sequence[Plan]) -> float:
        return sum(self._calibrations[plan].whole_s for plan in entrants)

    def _close(self, race: RaceRecord, plan: Plan) -> None:
        """Finishes the trial of a plan with what a race has said of it."""
        rounds_s = dict(race.rounds)[plan]
        if not rounds_s or plan not in self._calibrations:
            return
        outcome = measured_outcome(
            self._calibrations[plan],
            self.compiled.get(plan),
            self._checks.of(plan),
            rounds_s,
            step_s=statistics.median(rounds_s),
            interval_s=median_interval(rounds_s),
            raced_out=plan in race.beaten,
        )
        self._finish(plan, outcome)

    def _race_deadline_s(self, entrants: Sequence[Plan]) -> float:
        """When a race must be over so that its best can be measured in fresh processes.

        Where there is a rule, and finalists that were never raced, these come first.
        """
        needed_s = self._missing_processes() * self._process_s(entrants, FEWEST_PASSES)
        return self.search.end_s - needed_s

    def _missing_processes(self) -> int:
        """How many more a rule needs; as many for another one, once all finalists were raced."""
        final = self._final()
        if final.exported():
            return 1 if self._unraced() else FEWEST
        likeliest = self._leaders(final)
        ran = final.count(*final.baseline, *likeliest) if likeliest else 0
        return max(FEWEST - ran, 1)

    def _least_process_s(self) -> float:
        """What a process takes of the likeliest plan, beside the baseline."""
        return self._process_s(self._leaders(self._final()), FEWEST_PASSES)

    def _race_end_s(self, entrants: Sequence[Plan]) -> float:
        """When a race should be over: fresh processes decide, it only chooses who gets there."""
        now_s, latest_s = self.search.clock(), self._race_deadline_s(entrants)
        early_s = self.search.end_s - RESERVED * self._process_s(entrants)
        return max(early_s, now_s + _LEAST_RACE * (latest_s - now_s))

    def _start_race(
        self, entrants: Sequence[Plan], stored: Mapping[Plan, Sequence[float]]
    ) -> Race[Plan]:
        try:
            return Race(entrants, rules=RACE, seed=0, rounds=stored)
        except ValueError:
            # Other finalists than last time: rounds that do not line up cannot be paired.
            self.search.progress.notice(
                "the finalists have changed; the race starts again from round one"
            )
            return Race(entrants, rules=RACE, seed=0)

    def _on_round(self, race: Race[Plan], plan: Plan, number: int, value_s: float) -> None:
        trial = self._trials.get(plan)
        if trial is not None:
            self.search.study.measure.report(trial, number, [value_s])
        self._rounds = max(self._rounds, number + 1)
        left = len(race.survivors)
        self.search.progress.phase(
            "measure",
            total=race.rules.max_rounds,
            done=self._rounds,
            note=f"round {self._rounds}, {left} left",
        )
        self.search.progress.now(f"{plan}, {format_seconds(value_s)}")
        leader = race.leader
        if leader is not None:
            middle_s = statistics.median(race.values_of(leader))
            self.search.progress.best(f"{leader}, {format_seconds(middle_s)} measured")

    # Fresh processes

    def _final(self) -> Final:
        legal = frozenset(self.search.preparation.plans)
        excluded = {plan for plan, one in self._done.items() if not may_be_exported(one)}
        # Another search space than now had these, too.
        excluded |= {plan for plan in self._records.plans if plan not in legal}
        baseline = [plan for plan in self.search.preparation.baseline if self._is_known(plan)]
        return self._records.final(
            rules=FinalRules(),
            baseline=baseline,
            incumbent=self._incumbent,
            excluded=excluded,
        )

    def _is_known(self, plan: Plan) -> bool:
        return plan in self._calibrations or may_be_exported(self._done.get(plan))

    def _contenders(self, final: Final) -> list[Plan]:
        """Plans that races leave as possibly the fastest, the likeliest first."""
        own = [plan for plan in final.baseline if plan not in final.failed]
        reference = [*final.exported(at_look=True), *own, *self._leaders(final)]
        if not reference:
            return []
        if not self._raced_plans():
            return list(dict.fromkeys([*reference, *self._by_first_visit(final)]))
        raced = raced_against(self._records.races, final, reference[0])
        undecided = [one.plan for one in raced if one.verdict == "undecided"]
        # Races without a plan in common with the others say nothing beside them.
        known = {one.plan for one in raced}
        open_plans = self._raced_plans() - known - self._beaten()
        apart = [plan for plan in self._by_first_visit(final) if plan in open_plans]
        return list(dict.fromkeys([reference[0], *undecided, *apart]))

    def _beaten(self) -> set[Plan]:
        return {plan for race in self._records.races for plan in race.beaten}

    def _leaders(self, final: Final) -> list[Plan]:
        """The likeliest plan: one that fresh processes have begun with comes before others."""
        beaten = self._beaten()
        begun = [plan for row in final.rows for plan in row if plan not in beaten]
        likely = dict.fromkeys([*self._race_leaders(final), *begun])
        return sorted(likely, key=lambda plan: -final.count(plan))[:1]

    def _race_leaders(self, final: Final) -> list[Plan]:
        """The fastest of the last race in which anybody is left; without races, of first visits."""
        for race in reversed(self._records.races):
            alive = [
                (statistics.median(values), str(plan), plan)
                for plan, values in race.rounds
                if values and plan not in race.beaten and plan not in final.failed
            ]
            if alive:
                return [min(alive)[2]]
        return [] if self._raced_plans() else self._by_first_visit(final)[:1]

    def _by_first_visit(self, final: Final) -> list[Plan]:
        """All that were visited and may be exported, the fastest first."""
        seen = {
            plan: statistics.median(one.first.samples_s)
            for plan, one in self._calibrations.items()
            if plan not in final.failed
        }
        return sorted(seen, key=lambda plan: (seen[plan], str(plan)))

    def _measure_afresh(self, most: int) -> bool:
        """Runs fresh processes until nothing is left to decide or the time is over.

        Args:
          most: processes in which the exported plan runs at most.

        Returns:
          Whether all that was raced is decided.
        """
        self._ensure_reference(self.search.preparation.baseline)
        while self._known_reference is not None:
            final = self._final()
            entrants = final.entrants(self._contenders(final))
            if not entrants:
                return True
            if final.count(*entrants) >= most:
                return False
            entrants = self._as_time_allows(final, entrants)
            for plan in entrants:
                if plan not in self._calibrations:
                    self._visit_first(plan)
            unknown = [plan for plan in entrants if plan not in self._calibrations]
            if any(may_be_exported(self._done.get(plan)) for plan in unknown) or not all(
                plan in self._done for plan in unknown
            ):
                return False  # time was used up in a first visit, of which it is not to blame
            if unknown:
                self._fail(unknown)
                continue
            if not self._has_time(final, entrants) or not self._run_process(final, entrants):
                return False
        return False

    def _as_time_allows(self, final: Final, entrants: Sequence[Plan]) -> Sequence[Plan]:
        """Fewer of them where the processes that a rule needs, or else a single one, would not be
        over in time."""
        exported = final.exported()
        always = {*final.baseline, *exported} & {*entrants}
        fewest = len(always) + 1 if always else 1
        for count in range(len(entrants), fewest, -1):
            chosen = entrants[:count]
            more = 1 if exported else max(FEWEST - final.count(*chosen), 1)
            took_s = more * self._process_s(chosen, FEWEST_PASSES)
            if self.search.clock() + took_s <= self.search.end_s:
                return chosen
        return entrants[:fewest]

    def _has_time(self, final: Final, entrants: Sequence[Plan]) -> bool:
        shortest_s = self._process_s(entrants, FEWEST_PASSES)
        late_s = self.search.clock() + shortest_s - self.search.end_s
        return late_s <= (0.0 if final.exported() else self._grace_s)

    def _run_process(self, final: Final, entrants: Sequence[Plan]) -> bool:
        """Runs one process; False if the time was over before it had a figure."""
        count = final.count(entrants[0])
        self.search.progress.phase(
            "confirm",
            total=next((look for look in LOOKS if look > count), LOOKS[-1]),
            done=count,
            note=f"fresh processes of {words.count(len(entrants), 'mesh', 'meshes')}",
        )
        passes = self._passes(final, entrants)
        ran = run_process(
            self.pool,
            self._subject,
            [self._calibrations[plan] for plan in entrants],
            rules=self.rules,
            number=len(final.rows),
            passes=passes,
            deadline_s=self.search.end_s,
            clock=self.search.clock,
        )
        for plan, value_s in ran.seconds:
            self.search.progress.now(
                f"{plan}, {format_seconds(value_s)} in fresh process {count + 1}"
            )
        records = self._records
        if ran.seconds:
            machine = self.search.study.owner.machine
            record = ProcessRecord(
                machine=machine, seconds=ran.seconds, took_s=ran.took_s, passes=passes
            )
            records = replace(records, processes=(*records.processes, record))
        self._records = replace(records, failed=(*records.failed, *ran.failures))
        self._note_records()
        for plan, failure in ran.failures:
            self._finish(plan, failure)
            self.search.progress.notice(
                f"{plan} failed in a fresh process: {words.failure_reason(failure)}"
            )
        return ran.is_whole

    def _fail(self, plans: Sequence[Plan]) -> None:
        """Notes plans that ran before and could not be visited again."""
        failed = [(plan, self._done[plan]) for plan in plans]
        found = tuple((plan, one) for plan, one in failed if isinstance(one, Failure))
        self._records = replace(self._records, failed=(*self._records.failed, *found))
        self._note_records()

    def _passes(self, final: Final, entrants: Sequence[Plan]) -> int:
        """Passes in each process, at most so many that the next decision is reached in time.

        What one process is wrong by, many passes in it do not mend: processes up to the next look
        come before passes, and those that a rule needs before all else.
        """
        count = final.count(*entrants)
        next_look = next((look for look in LOOKS if look > count), LOOKS[-1])
        left_s = self.search.end_s - self.search.clock()
        for processes in (max(next_look - count, 1), max(FEWEST - count, 1)):
            for passes in range(MOST_PASSES, FEWEST_PASSES - 1, -2):
                if processes * self._process_s(entrants, passes) <= left_s:
                    return passes
        return FEWEST_PASSES

    def _process_s(self, entrants: Sequence[Plan] = (), most: int = MOST_PASSES) -> float:
        """What a process takes: as the last one did, or what the first visits let expect.

        Args:
          most: passes over its plans.
        """
        pair = list(dict.fromkeys([*self.search.preparation.baseline, *self._incumbent, *entrants]))
        known = [self._calibrations[plan] for plan in pair if plan in self._calibrations]
        known = known[: FinalRules().entrants]
        expected_s = process_s_of(known, most)
        if not known or not self._records.processes:
            return expected_s
        last = self._records.processes[-1]
        # What the last one took beyond what was expected of it, the next one may take, too.
        return max(expected_s, last.took_s + expected_s - process_s_of(known, last.passes))

    def _confirmed(self, final: Final) -> dict[Plan, Measured]:
        return {
            plan: measured_outcome(
                self._calibrations[plan],
                self.compiled.get(plan),
                self._checks.of(plan),
                figure.rounds_s,
                step_s=figure.step_s,
                interval_s=figure.interval_s,
                confirmed=True,
            )
            for plan, figure in figures_of(final).items()
            if plan in self._calibrations
        }

    def _store(self, ending: str) -> str:
        """Notes what is exported and how everything compares with it.

        Args:
          ending: how it ended; if empty, time was used up before all was decided.
        """
        if self._known_reference is None:
            return _NOTHING_YET
        final = self._final()
        exported = final.exported()
        confirmed = self._confirmed(final)
        if not exported or exported[0] not in confirmed:
            return _NOTHING_YET
        decision = decide(
            self._records,
            final,
            exported[0],
            confirmed,
            process_s=self._process_s([*exported, *self._contenders(final)]),
            sentence=ending,
            waiting=len(self._unraced()),
        )
        self.search.notebook.note_decision(decision)
        return decision.sentence

    def _explain_programs(self) -> None:
        """Finishes the plans whose programs differed, once no process has anything ready."""
        if not self._differing:
            return
        self.search.progress.now("tracing steps again whose programs have changed")
        plans = tuple(self._differing)
        found = explain_programs(self.pool, self._subject.step, plans, self.rules.timeout_s)
        self._differing.clear()
        for plan, failed in found.items():
            self._finish(plan, failed)
            self.search.progress.notice(f"{plan} was not measured: {failed.reason}")

    def _finish(self, plan: Plan, outcome: Outcome) -> None:
        self._done[plan] = outcome
        if outcome == OTHER_PROGRAM:
            self._differing[plan] = None
            return
        trial = self._trials.pop(plan, None)
        if trial is not None:
            calibration = self._calibrations.get(plan)
            fingerprint = calibration.first.fingerprint if calibration else ""
            self.search.study.measure.finish(trial, outcome, fingerprint=fingerprint)
