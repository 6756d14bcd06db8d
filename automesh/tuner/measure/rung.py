"""The measure rung: races the finalists on the devices, and measures the best in fresh
processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Outcome
from automesh.report import words
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.context import SearchContext
from automesh.tuner.measure.decision import Records, decide
from automesh.tuner.measure.final import FEWEST, LOOKS, Final
from automesh.tuner.measure.first_visits import FirstVisits
from automesh.tuner.measure.fresh_processes import run_process, run_side_by_side, show_rows
from automesh.tuner.measure.known import Known
from automesh.tuner.measure.leased_pool import LivePool, wait_for_lease
from automesh.tuner.measure.likeliest import by_first_visit, contenders
from automesh.tuner.measure.racing import Racing
from automesh.tuner.measure.schedule import VisitRules
from automesh.tuner.measure.time_left import RESERVED, TimeLeft
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.retrace import explain_programs
from automesh.units import format_seconds, format_wait

EARLY = LOOKS[1]  # fresh processes before other plans are compiled to challenge the best
UNRACED = (
    "there was no time for a race, so what was fastest at its first visit was measured; "
    "run the same command, best with more --budget, to race all of them"
)
_NOTHING_YET = (
    "the time did not suffice to measure the best in three fresh processes; "
    "run the same command to go on"
)
Challenge = Callable[[Mapping[Plan, Outcome], float], Sequence[Plan]]


def has_raced(notebook: Notebook) -> bool:
    """Whether a race was run on this machine, to its end or to the end of its time."""
    records: Records | None = notebook.read("records", Records)
    machine = notebook.study.owner.machine
    return records is not None and bool(records.of_machine(machine).races)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRung:
    """Runs the measure rung of one search; only the holder of the study's lease measures.

    A race in one process selects the best two or three plans. These and the baseline are timed side
    by side in fresh processes until their order is decided or the time is over. The next search
    continues with what is undecided: no round and no process is ever repeated.

    Its parts share one `Known`; `of` makes them.

    Attributes:
      challenge: takes the measured plans and a time; compiles until then plans that may still win.
    """

    pool: LivePool
    challenge: Challenge
    known: Known
    time_left: TimeLeft
    visits: FirstVisits
    racing: Racing

    @classmethod
    def of(
        cls,
        search: SearchContext,
        pool: LivePool,
        *,
        compiled: Mapping[Plan, Outcome],
        finalists: Sequence[Plan],
        challenge: Challenge,
        rules: VisitRules,
    ) -> MeasureRung:
        """Makes the rung of a search, with nothing measured yet.

        Args:
          compiled: outcomes of the compile rung; grows with the challengers.
          finalists: the plans of the first race, including the baseline.
          challenge: takes the measured plans and a time; compiles until then plans that may still
            win.
        """
        known = Known(search=search, compiled=compiled, finalists=finalists)
        time_left = TimeLeft(known=known)
        visits = FirstVisits(known=known, time_left=time_left, pool=pool, rules=rules)
        return cls(
            pool=pool,
            challenge=challenge,
            known=known,
            time_left=time_left,
            visits=visits,
            racing=Racing(known=known, time_left=time_left, visits=visits),
        )

    @property
    def search(self) -> SearchContext:
        return self.known.search

    def run(self) -> str:
        """Measures what is not measured yet, and stores everything in the study.

        Returns:
          A sentence about how it ended; empty if there was nothing left to measure.

        Raises:
          LeaseLost: another search has taken over, because this one was silent for too long.
          UsageError: the machine, not a plan, failed; or the script was changed meanwhile.
        """
        try:
            ending = self._measure()
        except KeyboardInterrupt:
            # The figures of the processes until now are a decision, too.
            self._store("it was interrupted")
            raise
        self._explain_programs()
        return ending

    def _measure(self) -> str:
        known = self.known
        for plan in known.baseline:
            if not isinstance(known.compiled.get(plan), Compiled):
                what = f"the baseline {plan} was not compiled, so nobody is raced with it"
                self.search.progress.notice(what)
        if not known.finalists:
            return "nothing compiled"
        if not wait_for_lease(
            self.search.study,
            self.search.progress,
            until_s=self.search.end_s,
            clock=self.search.clock,
        ):
            return "another search on this storage is measuring; run the same command later"
        known.reload()
        raced = known.raced()
        wanted = dict.fromkeys([*known.finalists, *known.begun()])
        todo = [plan for plan in wanted if plan not in raced and known.is_to_race(plan, raced)]
        if todo:
            self.racing.race(todo)
        elif self._is_settled() and not self._challenge_until_none():
            return ""
        if not known.raced():
            return self._measure_unraced()
        self._measure_afresh(EARLY)
        while (waiting := known.unraced()) and self.racing.race(waiting):
            pass
        self._challenge_until_none()
        is_decided = self._measure_afresh(LOOKS[-1]) and not known.unraced()
        return self._store("all of them are decided" if is_decided else "")

    def _measure_unraced(self) -> str:
        """Measures the fastest of the first visits: there was no time for a race."""
        known = self.known
        # on another machine
        is_decided = known.decision is not None and not known.records.processes
        if is_decided or not by_first_visit(known, known.final()):
            return self._why_no_race()
        before = len(known.records.processes)
        self._measure_afresh(EARLY)
        if len(known.records.processes) == before:
            return self._why_no_race()
        return self._store(UNRACED)

    def _why_no_race(self) -> str:
        known = self.known
        if known.decision is not None:
            return known.decision.sentence or _NOTHING_YET
        if known.calibrations:
            took = format_wait(FEWEST * self.time_left.least_process_s())
            return (
                f"there was no time for a race, whose {FEWEST} fresh processes would take about "
                f"{took}{self._first_seen()}; run the same command to go on"
            )
        has_failed = all(plan in known.done for plan in known.finalists)
        if not has_failed and self.time_left.now_s > self.time_left.race_deadline_s(()):
            return "there was no time to measure anything; run the same command to go on"
        return "no finalist could be measured"

    def _first_seen(self) -> str:
        """Returns a sentence with what is known although there is no precise verdict."""
        fastest = by_first_visit(self.known, self.known.final())[:1]
        return "".join(
            f" (at its first visit {plan} took "
            f"{format_seconds(median(self.known.calibrations[plan].first.samples_s))})"
            for plan in fastest
        )

    def _is_settled(self) -> bool:
        """Whether an earlier search has decided everything that it has raced."""
        known = self.known
        if known.reference is None or known.decision is None:
            return False  # the baseline or the space has changed: the known figures are joined anew
        final = known.final()
        return not final.entrants(contenders(known, final)) and bool(final.exported())

    # Challengers

    def _challenge_until_none(self) -> bool:
        """Races plans that may still beat the best, while there is time; returns whether there were
        any."""
        has_raced = False
        while newcomers := self._challengers():
            has_raced = self.racing.race(newcomers) or has_raced
        return has_raced

    def _challengers(self) -> list[Plan]:
        """Compiles and returns plans that may still win, as long as there is time to race and
        measure them."""
        until_s = self.search.end_s - RESERVED * self.time_left.process_s()
        if self.search.clock() >= until_s:
            return []
        # The workers are needed to compile, and an accelerator serves only one process.
        self.pool.recycle()
        measured = self.known.measured()
        return [plan for plan in self.challenge(measured, until_s) if plan not in measured]

    # Fresh processes

    def _measure_afresh(self, most: int) -> bool:
        """Runs fresh processes until nothing is left to decide or the time is over.

        Args:
          most: the most processes in which the exported plan runs.

        Returns:
          Whether everything that was raced is decided.
        """
        self.visits.ensure_reference(self.known.baseline)
        if self.known.reference is None:
            return False
        ended = run_side_by_side(
            final=self.known.final,
            contenders=lambda final: contenders(self.known, final),
            run_row=self._run_row,
            most=most,
        )
        return ended == "decided"

    def _run_row(self, final: Final, entrants: Sequence[Plan]) -> bool:
        """Runs a fresh process; if entrants fail before it, stores that instead."""
        known = self.known
        entrants = self.time_left.fewer_for_process(final, entrants)
        for plan in entrants:
            if plan not in known.calibrations:
                self.visits.visit(plan)
                known.note_visits()
        unknown = [plan for plan in entrants if plan not in known.calibrations]
        if any(may_be_exported(known.done.get(plan)) for plan in unknown) or not all(
            plan in known.done for plan in unknown
        ):
            # The time was used up in a first visit, so nothing is known about the plan.
            return False
        if unknown:
            known.add_failures(unknown)
            return True
        return self.time_left.has_time_for(final, entrants) and self._run_process(final, entrants)

    def _run_process(self, final: Final, entrants: Sequence[Plan]) -> bool:
        """Runs one process; returns False if the time was over before it had a figure."""
        progress = self.search.progress
        count = final.count(entrants[0])
        show_rows(progress, count, f"fresh processes of {words.count(len(entrants), 'plan')}")
        passes = self.time_left.passes(final, entrants)
        ran = run_process(
            self.pool,
            self.visits.subject,
            [self.known.calibrations[plan] for plan in entrants],
            rules=self.visits.rules,
            number=len(final.rows),
            passes=passes,
            deadline_s=self.search.end_s,
            clock=self.search.clock,
        )
        for plan, value_s in ran.seconds:
            progress.now(f"{plan}, {format_seconds(value_s)} in fresh process {count + 1}")
        self.known.add_process(ran, passes)
        for plan, failure in ran.failures:
            progress.notice(f"{plan} failed in a fresh process: {words.failure_reason(failure)}")
        return ran.is_whole

    # The end

    def _store(self, ending: str) -> str:
        """Stores what is exported, and how everything compares with it.

        Args:
          ending: how it ended; if empty, the time was used up before everything was decided.
        """
        known = self.known
        if known.reference is None:
            return _NOTHING_YET
        final = known.final()
        exported = final.exported()
        confirmed = known.confirmed(final)
        if not exported or exported[0] not in confirmed:
            return _NOTHING_YET
        decision = decide(
            known.records,
            final,
            exported[0],
            confirmed,
            process_s=self.time_left.process_s([*exported, *contenders(known, final)]),
            sentence=ending,
            waiting=len(known.unraced()),
        )
        self.search.notebook.note_decision(decision)
        return decision.sentence

    def _explain_programs(self) -> None:
        """Finishes the plans whose programs differed, once the workers have dropped their
        programs."""
        known = self.known
        if not known.differing:
            return
        self.search.progress.now("tracing steps again whose programs have changed")
        found = explain_programs(
            self.pool,
            self.visits.subject.step,
            tuple(known.differing),
            self.visits.rules.timeout_s,
        )
        known.differing.clear()
        for plan, failed in found.items():
            known.finish(plan, failed)
            self.search.progress.notice(f"{plan} was not measured: {failed.reason}")
