"""A search on the attached devices, or on virtual ones: compile, race, measure afresh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Measured, Outcome
from automesh.report.result import SearchResult
from automesh.tuner.choose.finalists import (
    COMPILES_PER_FINALIST,
    challengers,
    finalists,
    raceable,
    to_compile,
)
from automesh.tuner.choose.state import SearchState, state_of
from automesh.tuner.compile.jobs import CompilingHere
from automesh.tuner.compile.replay import Player, player_on
from automesh.tuner.compile.rung import CompileRung
from automesh.tuner.context import SearchContext
from automesh.tuner.measure.final import FinalRules
from automesh.tuner.measure.fresh_processes import process_s_of
from automesh.tuner.measure.leased_pool import LivePool
from automesh.tuner.measure.rung import MeasureRung, has_raced
from automesh.tuner.measure.schedule import Calibration, VisitRules
from automesh.tuner.measure.seen_once import StoredVisits
from automesh.tuner.measure.time_left import RESERVED
from automesh.tuner.strategies.search_run import Strategy
from automesh.tuner.study.assemble import outcomes_of
from automesh.tuner.study.metadata import Footer, spent
from automesh.worker.messages import Surroundings
from automesh.worker.process import Process

# Part of the remaining budget for compiles; what they do not use goes to the next rung.
COMPILE_SHARE = 0.4
MEASURE_S = 40.0  # for a race and three fresh processes, not for compiles
LEAST_COMPILE_SHARE = 0.25


@dataclass(slots=True, kw_only=True)
class AttachedStrategy(Strategy):
    """Compiles the most promising plans, races the best, and measures them in fresh processes.

    Attributes:
      surroundings: surroundings of the workers.
    """

    search: SearchContext
    surroundings: Surroundings
    _start: SearchState = field(init=False)
    _compiled: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _wanted: list[Plan] = field(init=False, default_factory=list[Plan])
    _has_compiled: bool = field(init=False, default=False)
    _player: Player | None = field(init=False)

    def __post_init__(self) -> None:
        search = self.search
        self._player = player_for(search)
        self._start = state_of(
            search.preparation, search.legal, search.estimates.found, top=search.request.top
        )

    def climb(self) -> str:
        """See `Strategy`."""
        search = self.search
        now_s = search.clock()
        left_s = max(search.end_s - now_s, 1e-9)
        self._compile_first(now_s + self._compile_share(left_s) * left_s)
        if not finalists(self._state(self._measured())) and search.clock() < search.end_s:
            # The rest of the budget has no other use.
            self._compile_first(search.end_s, is_one_enough=True)
        # Another pool, so that measurements have the cores and the memory of the machine for
        # themselves.
        with search.open_pool(1, self.surroundings) as pool:
            return MeasureRung.of(
                search,
                LivePool(pool=pool, study=search.study, progress=search.progress),
                compiled=self._compiled,
                finalists=finalists(self._state(self._measured())),
                challenge=self._challenge,
                rules=VisitRules(timeout_s=search.request.timeout_s),
            ).run()

    def _compile_share(self, left_s: float) -> float:
        """Returns the part of the remaining time for compiles before the first race.

        Where an earlier search has visited plans and had no time for a rule, the processes of that
        rule come first. Without this a search with a small budget, repeated, spent its time on
        further programs each time, and never confirmed any.
        """
        visited = self._waiting_for_rule()
        if not visited:
            return min(COMPILE_SHARE, max(LEAST_COMPILE_SHARE, 1 - MEASURE_S / left_s))
        self._has_compiled = True  # There is something to measure: no compile is waited for.
        fastest = sorted(visited, key=lambda one: one.whole_s)[: FinalRules().entrants]
        return min(COMPILE_SHARE, max(0.0, 1 - RESERVED * process_s_of(fastest) / left_s))

    def _waiting_for_rule(self) -> Sequence[Calibration]:
        """Returns the first visits of earlier searches on this machine, if these had no time for a
        rule; nothing while fewer than two, or not the baseline, were visited: there is nothing to
        compare."""
        search = self.search
        visits: StoredVisits | None = search.notebook.read("visits", StoredVisits)
        if visits is None or visits.machine != search.study.owner.machine:
            return ()
        if search.notebook.decision() is not None:
            return ()
        programs = search.outcomes(search.study.compile)
        known = [one for one in visits.calibrations if isinstance(programs.get(one.plan), Compiled)]
        has_baseline = {*search.legal.baseline} <= {one.plan for one in known}
        return known if has_baseline and len(known) > 1 else ()

    def _measured(self) -> dict[Plan, Outcome]:
        return outcomes_of(self.search.notebook, self.search.study.measure)

    def _state(self, measured: Mapping[Plan, Outcome]) -> SearchState:
        return self._start.knowing(self._compiled, measured)

    def _compile_first(self, deadline_s: float, *, is_one_enough: bool = False) -> None:
        """Compiles the most promising plans until there are enough programs for a race.

        Args:
          is_one_enough: whether to stop at the first program that can be measured.
        """
        search, top, measured = self.search, self._start.top, self._measured()
        self._compiled |= search.outcomes(search.study.compile)
        wanted, count = COMPILES_PER_FINALIST * top, 0
        while True:
            chosen = to_compile(self._state(measured), wanted=wanted)
            is_all, count = len(chosen) == count, len(chosen)
            self._wanted = list(chosen)
            if search.clock() >= deadline_s and self._has_compiled:
                return
            self._compile(chosen, deadline_s, is_one_enough=is_one_enough)
            racing = finalists(self._state(measured))
            others = [plan for plan in racing if plan not in self._start.first]
            is_enough = len(others) >= top or (is_one_enough and bool(racing))
            if is_all or search.clock() >= deadline_s or is_enough:
                return
            wanted += top

    def _challenge(self, measured: Mapping[Plan, Outcome], until_s: float) -> Sequence[Plan]:
        """Compiles plans that may still win; returns as many of them as fit into a race."""
        likely = challengers(self._state(measured))[: self._start.top]
        if likely:
            now_s = self.search.clock()
            self._compile([*self._wanted, *likely], now_s + (until_s - now_s) / 2)
        return raceable(self._state(measured), likely)

    def _compile(
        self, plans: Sequence[Plan], deadline_s: float, *, is_one_enough: bool = False
    ) -> None:
        search = self.search
        self._wanted = list(dict.fromkeys(plans))
        if all(plan in self._compiled for plan in self._wanted):
            return
        state = self._state(self._measured())
        view = state.view()
        judged = search.preparation.device_memory.judged

        def choose(done: Mapping[Plan, Outcome]) -> Sequence[Plan]:
            if is_one_enough and any(isinstance(judged(one), Compiled) for one in done.values()):
                return [plan for plan in self._wanted if plan in done]
            return self._wanted

        with search.open_pool(search.workers, self.surroundings) as pool:
            done = CompileRung(
                search=search,
                rung=search.study.compile,
                compiling=CompilingHere(
                    preparation=search.preparation,
                    player=self._player,
                    cache_dir=search.cache_dir,
                ),
                pool=pool,
                choose=choose,
                order=lambda plans, done: state.knowing(done, {}).order(plans, view),
                deadline_s=deadline_s,
                is_first=not self._has_compiled,
            ).run()
        self._has_compiled |= any(plan not in self._compiled for plan in done)
        self._compiled |= {plan: judged(one) for plan, one in done.items()}

    def footer(self, result: SearchResult, ending: str, *, interrupted: bool) -> Footer:
        """See `Strategy`."""
        search = self.search
        decision = search.notebook.decision()
        certificate, belief = "", ""
        if decision is not None:
            confirmed = dict(decision.confirmed)
            seen = {
                one.plan: replace(one.outcome, step_s=one.standing.step_s)
                for one in result.candidates
                if isinstance(one.outcome, Measured) and one.standing.basis == "first visits"
            }
            state = self._start.knowing(
                search.outcomes(search.study.compile), self._measured() | confirmed | seen
            )
            best_s = confirmed[decision.winner].step_s
            certificate = state.certificate(best_s, once=len(seen))
            belief = state.belief(best_s)
        reason = "interrupted"
        if not interrupted:
            if not ending:  # Nothing was left to measure: the last race says why.
                ending = decision.sentence if decision else "there was nothing left to measure"
            is_raced = bool(result.verifications) and has_raced(search.notebook)
            raced = "the most promising were raced: " if is_raced else ""
            reason = f"{self._extent(result)}; {raced}{ending}"
        return Footer(
            stop_reason=reason,
            rules_path="",
            interrupted=interrupted,
            certificate=certificate,
            belief=belief,
        )

    def _extent(self, result: SearchResult) -> str:
        if not result.funnel.waiting:
            return "every legal plan was compiled"
        if all(plan in self._compiled for plan in self._wanted):
            return "the plans that promised most were compiled"
        spent_budget = spent(self.search.request.budget_s)
        return f"{spent_budget} before all promising plans were compiled"


def player_for(search: SearchContext) -> Player | None:
    """Makes the player for programs of attached devices; None if replays are not useful.

    On a GPU the error of a replay is a few per cent; that of a prediction from the kernels' work,
    as if multiplications hid all memory traffic, is a third (docs/accuracy.md). Virtual devices
    share cores, which a replay does not model. Programs compiled on other hosts stay there.
    """
    fabric, layouts = search.estimates.fabric, search.estimates.layouts
    if fabric is None or layouts is None or fabric.kind == "shared":
        return None
    if search.lender is not None or search.start_worker is not Process:
        return None
    return player_on(fabric, layouts, search.preparation.aim)
