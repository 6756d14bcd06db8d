"""A search by a command: runs plans one after the other, races the best of them, then compares
these.

Every run is a fresh process and a trial of the study; a finished run is never repeated.
1. Explore, for up to three fifths of the budget: each plan once, in the order of `order`.
2. Race: the best of them and the baseline in rounds, in shuffled order, until `measure.race` can
   tell them apart or the time is over; skipped if only one plan is fast. The time of a plan when it
   was explored does not count here: it is in the race because that time was short, which may be
   chance.
3. Side by side: the best two or three and the baseline in turn, again and again, until they are
   told apart or the time is over; only these figures are exported. The next search continues with
   what is undecided.
The remaining time is used for plans that were not tried, and for races of those that may be faster.
"""

from __future__ import annotations

import hashlib
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from automesh.errors import UsageError
from automesh.jsonio import to_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, Failure, Measured, Outcome
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.words import failure_reason
from automesh.texts.storage_url import masked_word
from automesh.tuner.command.order import PlanOrder
from automesh.tuner.command.results import (
    AGAIN,
    FIRST,
    Judged,
    Runs,
    fresh_label,
    judge,
    measured_of,
    outcome_of_run,
    race_label,
    runs_of,
)
from automesh.tuner.command.run import FinishedRun, Manner, Place, RunResult, Unseen, recovered, run
from automesh.tuner.command.step_times import SeenStep
from automesh.tuner.measure.decision import (
    ProcessRecord,
    Records,
    decide,
    raced_against,
    record_of,
)
from automesh.tuner.measure.final import FEWEST, Final, FinalRules
from automesh.tuner.measure.fresh_processes import figures_of, run_side_by_side, show_rows
from automesh.tuner.measure.leased_pool import LeaseLost, wait_for_lease
from automesh.tuner.measure.race import NextVisit, Race, RaceRules
from automesh.tuner.measure.racing import run_rounds, show_round
from automesh.tuner.paths import as_seen
from automesh.tuner.request import SearchRequest
from automesh.tuner.strategies.search_run import Strategy
from automesh.tuner.study.metadata import Footer, Header, Notebook, spent
from automesh.tuner.study.study import Study, Trial
from automesh.units import format_seconds

EXPLORE_SHARE = 0.6
# a round: one process for each finalist
RULES = RaceRules(max_rounds=12, keep=FinalRules().entrants)
WIDE = 1.5  # single runs of one plan may differ by a third: a plan slower than this is no finalist
NEAR = 1.1  # a later plan so close to the winner's time, when it was explored, may be faster
_MOST_FAILURES = 3  # failures before any success: then the command fails, not its plans
_RACE = "race"
_RACES = "all races"
_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRace:
    """A race that was begun; the study keeps it until it is decided.

    Attributes:
      key: its key in the labels of its runs.
      finalists: the finalists in the order of the race.
    """

    key: str
    finalists: tuple[Plan, ...]


@dataclass(slots=True, kw_only=True)
class CommandStrategy(Strategy):
    """Runs plans, races the best and runs them side by side; see `Strategy`.

    Attributes:
      plans: all plans, including the baseline.
      logs: folder of the study's logs.
      started_s: when the budget began, on `clock`.
    """

    request: SearchRequest
    manner: Manner
    plans: Sequence[Plan]
    baseline: tuple[Plan, ...]
    study: Study
    notebook: Notebook
    logs: Path
    progress: Progress
    started_s: float
    clock: Callable[[], float] = time.monotonic
    _order: PlanOrder = field(init=False)
    _runs: Runs = field(init=False, default_factory=Runs)
    _took_s: list[float] = field(init=False, default_factory=list[float])
    _failed_first: int = field(init=False, default=0)
    _notices: list[str] = field(init=False, default_factory=list[str])

    def __post_init__(self) -> None:
        self._order = PlanOrder(self.plans, self.baseline)

    @property
    def _deadline_s(self) -> float:
        return self.started_s + self.request.budget_s

    def climb(self) -> str:
        """Explores, races and confirms; see `Strategy`.

        Raises:
          LeaseLost: another search has taken over.
          UsageError: the command fails or shows no steps with every plan.
        """
        if not wait_for_lease(
            self.study, self.progress, until_s=self._deadline_s, clock=self.clock
        ):
            return "another search on this storage is measuring; run the same command later"
        self._reload()
        self._recover()
        until_s = self.started_s + EXPLORE_SHARE * self.request.budget_s
        while True:
            race = self._open_race()
            if race is None:
                self._explore(until_s)
                race = self._begin_race()
            if race is None:
                return self._without_race()
            ending, was_decided = self._decide(race)
            now_s = self.clock()
            until_s = now_s + EXPLORE_SHARE * (self._deadline_s - now_s)
            if not was_decided or not self._has_more() or not self._fits(1 + 2 * FEWEST):
                return ending

    # Runs

    def _reload(self) -> None:
        self._runs = runs_of(self.notebook)

    def _recover(self) -> None:
        """Records runs that had ended when an earlier search was killed."""
        # A second time: runs of another host were first seen at the start, and can be taken over
        # only now.
        self.study.measure.adopt_expired()
        held: set[str] = set()
        for trial in self.study.measure.trials():
            if trial.is_open and not trial.is_waiting:
                held |= {self._place(trial, one).name for one in range(1, trial.attempts + 1)}
            is_begun = trial.is_waiting and trial.attempts > 0 and bool(trial.run)
            if not is_begun or not self.notebook.is_current(trial):
                continue
            claimed = self.study.measure.begin(trial.plan, run=trial.run)
            if claimed is None:
                continue
            attempts = range(claimed.attempts - 1, 0, -1)
            left = (recovered(self.manner, self._place(claimed, one)) for one in attempts)
            result = next((one for one in left if one is not None), None)
            if result is None or isinstance(result, Unseen):
                self.study.measure.give_back(claimed)
            else:
                self._finish(claimed, result)
            for attempt in attempts:
                self._place(claimed, attempt).clear()
        for folder in self.logs.glob("run-*"):
            # The run was stored, but the search was killed before the run's folder was cleared.
            if folder.is_dir() and folder.name not in held:
                Place(logs=self.logs, name=folder.name).clear()

    def _run(self, plan: Plan, label: str) -> Outcome:
        """Makes a run, unless it was made before.

        Raises:
          LeaseLost: another search makes it.
        """
        known = self._runs.of(plan, label)
        if known is not None:
            return known
        trial = self.study.measure.begin(plan, run=label)
        if trial is None:
            raise LeaseLost
        place = self._place(trial, trial.attempts)
        words = self.request.command.template.for_plan(plan, run_dir=str(place.run_dir))
        shown = shlex.join(map(masked_word, words))
        self.progress.now(f"{plan}: {shown}")
        began_s = self.clock()
        result = run(
            self.manner,
            place,
            words,
            clock=self.clock,
            pulse=self._pulse,
            on_steps=lambda seen: self.progress.now(f"{plan}, step {seen}: {shown}"),
        )
        self._took_s.append(self.clock() - began_s)
        outcome = self._finish(trial, result)
        place.clear()
        return outcome

    def _pulse(self) -> None:
        if not self.study.heartbeat():
            raise LeaseLost
        self.progress.tick()

    def _finish(self, trial: Trial, result: RunResult) -> Outcome:
        outcome = self._outcome(trial, result)
        self.study.measure.finish(trial, outcome)
        self._runs.add(trial.plan, trial.run, outcome)
        if isinstance(outcome, Measured):
            self._failed_first = 0
        elif not self._has_figure():
            self._failed_first += 1
            if self._failed_first >= min(_MOST_FAILURES, len(self.plans)):
                raise self._hopeless(outcome)
        return outcome

    def _outcome(self, trial: Trial, result: RunResult) -> Outcome:
        match result:
            case FinishedRun(step=step):
                if step is not None:
                    self._look_at(trial.plan, step)
                return outcome_of_run(result)
            case Unseen(reason=reason, hint=hint, log=log):
                if not self._has_figure():
                    what = f"its output is in `{as_seen(log)}`"
                    raise UsageError(reason, hint=f"{hint}; {what}" if hint else what)
                return Failed(stage="run", reason=reason, hint=hint)
            case _:
                return result

    def _has_figure(self) -> bool:
        return any(self._runs.measured(plan) for plan in self._runs.found)

    def _hopeless(self, last: Outcome) -> UsageError:
        assert isinstance(last, Failure)
        return UsageError(
            f"the command failed for each of the {self._failed_first} plans that were tried: "
            f"{failure_reason(last)}",
            hint=f"the outputs are in `{as_seen(self.logs)}`; when it is mended, the same command "
            "goes on",
        )

    def _look_at(self, plan: Plan, step: SeenStep) -> None:
        """Reports once which step was timed, and again if it is another one or on too few
        devices."""
        known: SeenStep | None = self.notebook.read(_STEP, SeenStep)
        if known is None:
            self.notebook.note(_STEP, to_json(step, SeenStep))
            self._tell(f"timed is {step}")
        elif known.name != step.name:
            self._tell(f"{plan}: timed is {step}, another function than for the first plan")
        if 0 < step.devices < plan.num_devices:
            self._tell(
                f"{plan}: the step ran on {step.devices} of {plan.num_devices} devices: does the "
                "command use its mesh?"
            )

    def _tell(self, notice: str) -> None:
        if notice not in self._notices:
            self._notices.append(notice)
            self.progress.notice(notice)

    def _place(self, trial: Trial, attempt: int) -> Place:
        name = f"run-{trial.number:04d}"
        return Place(logs=self.logs, name=name if attempt == 1 else f"{name}-{attempt}")

    # Exploration

    def _explore(self, until_s: float) -> None:
        """Runs plans that were not tried until a given time; at least two."""
        tried = self._runs.first_s()
        begun = len(tried)
        self._show_explored(len(tried))
        while (plan := self._order.next(tried)) is not None:
            is_due = len(tried) < 2
            if not is_due and self.clock() + self._expected_s() > until_s:
                break
            outcome = self._run(plan, FIRST)
            tried = self._runs.first_s()
            self._show_explored(len(tried))
            if isinstance(outcome, Measured):
                self.progress.now(f"{plan}, {format_seconds(outcome.step_s)}")
        if len(tried) > begun:
            self._check_reference()

    def _check_reference(self) -> None:
        """Checks, before a plan is dropped for its losses, whether the reference gives the same
        losses again."""
        judged = self._judged()
        if judged.differing and judged.plan and len(self._runs.measured(judged.plan[0])) < 2:
            self._run(judged.plan[0], AGAIN)

    def _judged(self) -> Judged:
        return judge(self._runs, self.baseline)

    def _show_explored(self, done: int) -> None:
        failed = sum(self._runs.failure(plan) is not None for plan in self._runs.found)
        known = [(s, str(plan)) for plan, s in self._runs.first_s().items() if s is not None]
        self.progress.phase(
            "explore",
            total=len(self.plans),
            done=done,
            note=f"{failed} failed" if failed else "",
            took_s=self._took_s[-1] if self._took_s else 0.0,
        )
        if known:
            best_s, best = min(known)
            self.progress.best(f"{best}, {format_seconds(best_s)} in one run")

    def _has_more(self) -> bool:
        return self._order.next(self._runs.first_s()) is not None

    def _expected_s(self) -> float:
        return statistics.median(self._took_s) if self._took_s else 0.0

    def _fits(self, runs: int) -> bool:
        """Whether there is probably time for so many runs."""
        return self.clock() + runs * self._expected_s() <= self._deadline_s

    # Races

    def _open_race(self) -> OpenRace | None:
        """Returns the race that an earlier search has not decided, if all of its plans are still
        legal."""
        race: OpenRace | None = self.notebook.read(_RACE, OpenRace)
        if race is None or not set(race.finalists) <= set(self.plans):
            return None
        return race

    def _begin_race(self) -> OpenRace | None:
        finalists = self._finalists()
        if not finalists:
            return None
        races = self._races()
        race = OpenRace(key=_key(str(len(races)), *finalists), finalists=tuple(finalists))
        self.notebook.note(_RACES, to_json([*races, race], list[OpenRace]))
        self.notebook.note(_RACE, to_json(race, OpenRace))
        return race

    def _races(self) -> list[OpenRace]:
        """Returns all races that were begun, in order, without those of other spaces."""
        found: list[OpenRace] = self.notebook.read(_RACES, list[OpenRace]) or []
        plans = set(self.plans)
        return [one for one in found if set(one.finalists) <= plans]

    def _finalists(self) -> list[Plan]:
        """Returns the best explored plans and the baseline; empty if they are decided already."""
        judged = self._judged()
        excluded = set(judged.differing)
        seconds = {
            plan: one
            for plan, one in self._runs.first_s().items()
            if one is not None and plan not in excluded
        }
        if not seconds:
            return []
        fastest = sorted(seconds, key=lambda plan: (seconds[plan], str(plan)))
        best_s = seconds[fastest[0]]
        likely = [plan for plan in fastest if seconds[plan] <= WIDE * best_s]
        own = [plan for plan in self.baseline if plan in seconds]
        decision = self.notebook.decision()
        if decision is None or decision.winner not in seconds:
            others = [plan for plan in likely if plan not in own]
            return [*own, *others[: self.request.top]]
        settled = {decision.winner, *(plan for plan, _ in decision.comparisons)}
        limit_s = NEAR * seconds[decision.winner]
        newcomers = [plan for plan in likely if plan not in settled and seconds[plan] <= limit_s]
        newcomers = [plan for plan in newcomers if plan not in own]
        if not newcomers and all(plan in settled for plan in own):
            return []
        kept = dict.fromkeys([*own, decision.winner])
        return [*kept, *newcomers[: self.request.top]]

    def _decide(self, race: OpenRace) -> tuple[str, bool]:
        """Races and runs the best side by side; returns how it ended, and whether everything is
        decided."""
        self._race(race)
        if not self._left(race):
            self.notebook.note(_RACE, None)
            return "every finalist failed", True
        is_decided = self._run_afresh(race)
        ending = self._note_decision("all that came near are decided" if is_decided else "")
        if is_decided:
            self.notebook.note(_RACE, None)
        return ending, is_decided

    def _left(self, race: OpenRace) -> list[Plan]:
        return [plan for plan in race.finalists if self._runs.failure(plan) is None]

    def _race(self, race: OpenRace) -> None:
        """Runs rounds of all finalists until only as many are left as run side by side."""
        contest = self._contest(race)
        if len(contest.survivors) <= RULES.keep:
            return
        reserve = FEWEST * min(RULES.keep, len(race.finalists))

        def has_time(_: NextVisit[Plan], begins_round: bool) -> bool:
            return not begins_round or self._fits(len(contest.survivors) + reserve)

        def make(visit: NextVisit[Plan]) -> dict[Plan, float | Failure]:
            plan = visit.finalist
            outcome = self._run(plan, race_label(race.key, visit.round_index))
            if isinstance(outcome, Measured):
                return {plan: outcome.step_s}
            return {plan: outcome} if isinstance(outcome, Failure) else {}

        def show(plan: Plan, number: int, value_s: float) -> None:
            self.progress.now(f"{plan}, {format_seconds(value_s)}")
            show_round(
                self.progress, "race", contest, number=number + 1, done=contest.rounds_completed
            )

        run_rounds(
            contest,
            has_time=has_time,
            make=make,
            on_round=show,
            on_failure=lambda *_: None,
        )

    def _contest(self, race: OpenRace) -> Race[Plan]:
        """Returns the state of a race, from its runs in the study."""
        values = {
            plan: self._rounds(plan, lambda number: race_label(race.key, number))
            for plan in race.finalists
        }
        failed = [plan for plan in race.finalists if self._runs.failure(plan) is not None]
        return Race(race.finalists, rules=RULES, seed=0, rounds=values, left=failed)

    def _rounds(self, plan: Plan, label: Callable[[int], str]) -> list[float]:
        """Returns the seconds per step of the runs with consecutive labels."""
        found: list[float] = []
        while isinstance(one := self._runs.of(plan, label(len(found))), Measured):
            found.append(one.step_s)
        return found

    def _records(self) -> Records:
        """Returns all races and fresh runs side by side, from the trials."""
        machine = self.study.owner.machine
        raced = (
            record_of(self._contest(race).standings(), machine=machine, sentence="")
            for race in self._races()
        )
        races = tuple(one for one in raced if any(values for _, values in one.rounds))
        processes: list[ProcessRecord] = []
        while row := self._row(len(processes)):
            processes.append(ProcessRecord(machine=machine, seconds=row, took_s=0.0))
        failures = ((plan, self._runs.failure(plan)) for plan in self._runs.found)
        return Records(
            races=races,
            processes=tuple(processes),
            failed=tuple((plan, one) for plan, one in failures if one is not None),
        )

    def _row(self, number: int) -> tuple[tuple[Plan, float], ...]:
        label = fresh_label(number)
        found = ((plan, self._runs.of(plan, label)) for plan in self._runs.found)
        return tuple((plan, one.step_s) for plan, one in found if isinstance(one, Measured))

    # Fresh runs side by side

    def _final(self) -> Final:
        decision = self.notebook.decision()
        baseline = [plan for plan in self.baseline if plan in self._runs.found]
        return self._records().final(
            rules=FinalRules(),
            baseline=baseline,
            incumbent=() if decision is None else (decision.winner,),
            excluded=self._judged().differing,
        )

    def _contenders(self, race: OpenRace, final: Final) -> list[Plan]:
        """Returns the plans that may be the fastest: the survivors of the race, in the order of its
        figures."""
        seconds = self._runs.first_s()
        left = sorted(self._left(race), key=lambda plan: seconds.get(plan) or math.inf)
        own = [plan for plan in final.baseline if plan not in final.failed]
        reference = [*final.exported(at_look=True), *own, *left][:1]
        raced = raced_against(self._records().races, final, reference[0]) if reference else ()
        known = {plan for plan, _ in raced}
        undecided = [plan for plan, one in raced if one.verdict == "undecided"]
        unknown = [plan for plan in left if plan not in known]
        return list(dict.fromkeys([*reference, *undecided, *unknown]))

    def _run_afresh(self, race: OpenRace) -> bool:
        """Runs the best and the baseline in turn; returns whether nothing is left to decide."""
        ended = run_side_by_side(
            final=self._final,
            contenders=lambda final: self._contenders(race, final),
            run_row=self._run_row,
        )
        return ended != "no time"

    def _run_row(self, final: Final, entrants: Sequence[Plan]) -> bool:
        """Runs each entrant once; returns False if there is no time for all of them."""
        label = fresh_label(len(final.rows))
        # A row that was begun is completed: a part of a row cannot be compared.
        missing = [plan for plan in entrants if self._runs.of(plan, label) is None]
        if not self._fits(len(missing)):
            return False
        show_rows(self.progress, final.count(*entrants), f"{len(entrants)} meshes side by side")
        random.Random(label).shuffle(missing)
        for plan in missing:
            self._run(plan, label)
        return True

    def _note_decision(self, ending: str) -> str:
        final = self._final()
        exported = final.exported()
        if not exported:
            return (
                "the time did not suffice to run the best three times side by side; run the same "
                "command to go on"
            )
        judged = self._judged()
        confirmed = {
            plan: measured_of(self._runs, judged, plan, figure.rounds_s, confirmed=True)
            for plan, figure in figures_of(final).items()
        }
        decision = decide(
            self._records(),
            final,
            exported[0],
            confirmed,
            process_s=final.rules.entrants * self._expected_s(),
            sentence=ending,
        )
        self.notebook.note_decision(decision)
        return decision.sentence

    # The end

    def _without_race(self) -> str:
        """Returns a sentence about the end of a search without a race."""
        decision = self.notebook.decision()
        if decision is not None:
            return decision.sentence
        judged = self._judged()
        if judged.differing:
            return "no plan may become a rule"
        return "no plan could be run"

    def header(self, header: Header) -> Header:
        """Adds the notices about the runs to the header; see `Strategy`."""
        if not self._notices:
            return header
        facts = header.facts
        facts = replace(facts, notices=(*facts.notices, *self._notices))
        return replace(header, facts=facts)

    def footer(self, result: SearchResult, ending: str, *, interrupted: bool) -> Footer:
        """See `Strategy`."""
        del result
        reason = "interrupted" if interrupted else f"{self._extent()}; {ending}"
        return Footer(stop_reason=reason, rules_path="", interrupted=interrupted)

    def _extent(self) -> str:
        tried = len(self._runs.first_s())
        left = len(self.plans) - tried
        if not left:
            return "every plan was tried"
        if self.clock() < self.started_s + EXPLORE_SHARE * self.request.budget_s:
            return f"{left} of {len(self.plans)} plans were not tried"
        return f"{spent(self.request.budget_s)} before {left} of {len(self.plans)} plans were tried"


def _key(*parts: object) -> str:
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:8]
