"""A search for absent devices: compiles, replays, and writes a rule with the evidence
`compiled`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from automesh.errors import NoFeasibleMesh
from automesh.hardware import Absent, Target
from automesh.hardware.compilers import absent_devices_of
from automesh.mesh.axes import Plan
from automesh.outcomes import Effort, Failure, Outcome
from automesh.platforms import platform_named
from automesh.program.nouns import Attachment
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.words import count
from automesh.tuner.choose.affordable import short_compiles_notice
from automesh.tuner.choose.ahead_of_time import (
    challengers,
    interleaved,
    pairs_in_order,
    to_compile,
    to_screen,
)
from automesh.tuner.choose.memory_belief import MemoryBelief, large_last, too_large_notice
from automesh.tuner.choose.prior_rule import measured_rule
from automesh.tuner.choose.state import SearchState, state_of
from automesh.tuner.compile.jobs import CompilingAhead
from automesh.tuner.compile.replay import Player, player_on
from automesh.tuner.compile.rung import CompileRung
from automesh.tuner.context import SearchContext
from automesh.tuner.paths import as_seen
from automesh.tuner.request import SearchRequest
from automesh.tuner.strategies.search_run import Strategy
from automesh.tuner.study.assemble import outcomes_of
from automesh.tuner.study.metadata import Footer, spent
from automesh.tuner.worker_errors import machine_error
from automesh.tuner.workers import ask, one_worker
from automesh.worker.environment import surroundings_for
from automesh.worker.messages import DevicesJob

# Part of the budget for compiles at low effort; what they do not use goes to default effort.
SCREEN_SHARE = 0.55
# A compile at default effort takes a minute on a small machine, so one that is running at the
# deadline may finish.
GRACE_S = 60.0


def ready_for(request: SearchRequest, target: Target, progress: Progress) -> Attachment:
    """Asks the compiler about the absent devices.

    Returns:
      The devices as the compiler describes them, with the memory that it allows a program.

    Raises:
      UsageError: the compiler does not start, or does not know the devices.
    """
    assert target.absent is not None
    devices = absent_devices_of(target.absent)
    progress.now(f"asking the compiler about {target.name}")
    with one_worker(
        surroundings_for(devices),
        memory_limit_bytes=request.memory_limit_bytes,
        progress=progress,
    ) as pool:
        answer = ask(pool, DevicesJob(absent=devices), Attachment, request.timeout_s)
    if isinstance(answer, Failure):
        raise machine_error(replace(answer, stage="start"))
    return answer


@dataclass(slots=True, kw_only=True)
class AbsentStrategy(Strategy):
    """Compiles the most promising plans and replays their schedules; runs nothing.

    Attributes:
      absent: the devices.
      is_first_only: whether to stop behind the plans that promise most, since other plans are
        estimated after them.

    Raises:
      NoFeasibleMesh: jax can lay out none of the meshes.
    """

    search: SearchContext
    absent: Absent
    is_first_only: bool = False
    _start: SearchState = field(init=False)
    _player: Player = field(init=False)
    _screened: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _compiled: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _told: set[str] = field(init=False, default_factory=set[str])
    _was_late: bool = field(init=False, default=False)
    _served: set[Effort] = field(init=False, default_factory=set[Effort])

    def __post_init__(self) -> None:
        preparation, estimates = self.search.preparation, self.search.estimates
        fabric, layouts = self.absent.fabric, estimates.layouts
        assert layouts is not None, "every search for absent devices is laid out"
        refused = dict(layouts.refused)
        plans = [
            plan
            for plan in self.search.legal.plans
            if tuple(axis.ici for axis in plan.axes) not in refused
        ]
        if not plans:
            reason = next(iter(refused.values()))
            raise NoFeasibleMesh(
                f"no legal plan can be laid out on {preparation.selector}: {reason}",
                hint="let the space have other sizes, or name another target",
            )
        state = state_of(
            preparation,
            self.search.legal,
            estimates.found,
            plans=plans,
            top=self.search.request.top,
        )
        self._start = replace(
            state, is_replayed=True, device_memory_bytes=preparation.device_memory.free_bytes
        )
        self._player = player_on(fabric, layouts, preparation.aim)

    def climb(self) -> str:
        """Compiles the best plans by estimate, then those that may still beat the best replay."""
        self._load_outcomes()
        search, top = self.search, self._start.top
        order, wanted = self._order(), top
        screen_until_s = search.started_s + SCREEN_SHARE * search.request.budget_s
        while True:
            if platform_named(search.preparation.aim.platform).low_effort_options:
                self._screen(order, wanted, screen_until_s)
            self._compile(order, wanted)
            if self._was_late or self.is_first_only:
                return self._extent()
            order = self._large_last(challengers(self._state(), self._may_fit()))
            wanted = min(len(order), top)
            now_s = search.clock()
            self._was_late = bool(order) and now_s >= search.end_s
            if self._was_late or not order:
                return self._extent()
            screen_until_s = now_s + (search.end_s - now_s) / 2

    def _load_outcomes(self) -> None:
        """Loads the outcomes that the study has."""
        search = self.search
        self._screened |= search.outcomes(search.study.screen)
        self._compiled |= search.outcomes(search.study.compile)

    def _state(self) -> SearchState:
        return self._start.knowing(self._screened, self._compiled)

    def _order(self) -> tuple[Plan, ...]:
        """Returns all plans except the script's own, best first by their estimates."""
        start, out = self._start, {*self._start.baseline, *self._unpromising()}
        others = [plan for plan in start.plans if plan not in out]
        return self._large_last(interleaved(start.order(others, start.view())))

    def _large_last(self, order: Sequence[Plan]) -> tuple[Plan, ...]:
        memory = self.search.preparation.device_memory
        return large_last(
            order, self._start.estimates, memory, known=self._screened | self._compiled
        )

    def _unpromising(self) -> frozenset[Plan]:
        """Returns plans without an estimate that are not compiled while others have one. Some still
        wait for their estimate: neither time nor memory is known, and a minute of estimates shows
        more than hours of compiles in any order. The others were refused by the step, which would
        refuse them again.

        Some still wait for their estimate: neither time nor memory is known, and a minute of
        estimates shows more than hours of compiles in any order. The others were refused by the
        step, which would refuse them again.
        """
        estimates = self.search.estimates
        return estimates.waiting | (estimates.refused_by_step if estimates.found else frozenset())

    def _left(self) -> tuple[Plan, ...]:
        """Returns the plans that are not compiled but may be."""
        out = self._unpromising()
        return tuple(plan for plan in self._state().left() if plan not in out)

    def _may_fit(self) -> tuple[Plan, ...]:
        """Returns the plans that are not compiled but may fit."""
        return self._belief_with(self._screened | self._compiled).may_fit(self._left())

    def _belief_with(self, known: Mapping[Plan, Outcome]) -> MemoryBelief:
        memory = self.search.preparation.device_memory
        return MemoryBelief.of(known, self._start.estimates, memory)

    def _worth_asking(
        self, order: Sequence[Plan], done: Mapping[Plan, Outcome]
    ) -> tuple[Sequence[Plan], dict[Plan, Outcome]]:
        """Returns the plans that may be compiled now, and the compiled outcomes.

        Args:
          done: outcomes of the rung so far, judged without the reserve.
        """
        judged = self.search.preparation.device_memory.judged
        found = {plan: judged(one) for plan, one in done.items()}
        belief = self._belief_with(self._screened | self._compiled | found)
        return belief.worth_asking(order), found

    def _screen(self, order: Sequence[Plan], wanted: int, until_s: float) -> None:
        """Compiles at low effort until enough plans fit."""
        memory = self.search.preparation.device_memory

        def choose(done: Mapping[Plan, Outcome]) -> Sequence[Plan]:
            worth, found = self._worth_asking(order, done)
            chosen = to_screen(worth, found | self._compiled, memory, wanted=wanted)
            return [plan for plan in chosen if plan not in self._compiled]

        self._screened |= self._run(order, choose, until_s, effort="low")

    def _compile(self, order: Sequence[Plan], wanted: int) -> None:
        """Compiles the script's own plan and the most promising ones at default effort."""
        baseline = [plan for plan in self._start.baseline if plan in self._start.plans]

        def choose(done: Mapping[Plan, Outcome]) -> Sequence[Plan]:
            worth, found = self._worth_asking(order, done)
            return [*baseline, *to_compile(worth, self._screened, found, wanted=wanted)]

        self._compiled |= self._run(order, choose, self.search.end_s, effort="default")
        self._was_late = any(plan not in self._compiled for plan in choose(self._compiled))

    def _run(
        self,
        order: Sequence[Plan],
        choose: Callable[[Mapping[Plan, Outcome]], Sequence[Plan]],
        until_s: float,
        *,
        effort: Effort,
    ) -> dict[Plan, Outcome]:
        """Runs one of the two rungs; returns the outcomes, judged with the reserve."""
        search, is_screen = self.search, effort == "low"
        rung = search.study.screen if is_screen else search.study.compile
        known = outcomes_of(search.notebook, rung)
        if all(plan in known for plan in choose(known)):
            return search.outcomes(rung)
        devices = absent_devices_of(self.absent)
        compiling = CompilingAhead(
            preparation=search.preparation,
            effort=effort,
            store=self._player.store,
            player=None if is_screen else self._player,
        )
        place = {plan: number for number, plan in enumerate(order)}
        with search.open_compilers(surroundings_for(devices)) as pool:
            done = CompileRung(
                search=search,
                rung=rung,
                compiling=compiling,
                pool=pool,
                choose=choose,
                # The only plan that is not in the order is the script's own, which comes first.
                order=lambda plans, _: sorted(plans, key=lambda plan: place.get(plan, -1)),
                deadline_s=until_s,
                name="screen" if is_screen else "compile",
                grace_s=GRACE_S,
                is_first=effort not in self._served,
                on_first=None if is_screen or self._served else self._tell_budget,
            ).run()
        if any(plan not in known for plan in done):
            self._served.add(effort)
        self._log_asked(compiling.asked)
        judged = search.preparation.device_memory.judged
        # An outcome may have admitted plans that come before its own plan in the order.
        return search.outcomes(rung) | {plan: judged(one) for plan, one in done.items()}

    def _tell_budget(self, compile_s: float, left: int) -> None:
        """Tells how many of the first plans the budget is enough for, if not for all.

        Args:
          compile_s: seconds of the first compile at default effort.
          left: plans that are to be compiled after it.
        """
        search, now_s = self.search, self.search.clock()
        said = short_compiles_notice(
            compile_s,
            at_once=search.workers,
            left=left,
            left_s=search.end_s - now_s,
            used_s=now_s - search.started_s,
        )
        if said:
            search.progress.notice(said)

    def _log_asked(self, asked: Mapping[str, None]) -> None:
        """Logs what the script asked about the absent devices."""
        news = [what for what in asked if what not in self._told]
        self._told.update(news)
        for what in news:
            self.search.progress.log(f"while it was built, the script asked jax: {what}")

    def keeps_rule(self, path: Path) -> str:
        """See `Strategy`; a measured rule is not replaced by a compiled one."""
        selector = self.search.preparation.selector
        if not measured_rule(path, selector):
            return ""
        return (
            f"the rule for {selector} in {as_seen(path)} was measured, and stays "
            "(--rules FILE writes this one elsewhere)"
        )

    def footer(self, result: SearchResult, ending: str, *, interrupted: bool) -> Footer:
        """See `Strategy`."""
        del result  # Not needed: the strategy has all outcomes itself.
        if interrupted:
            self._load_outcomes()
        return Footer(
            stop_reason="interrupted" if interrupted else ending,
            rules_path="",
            interrupted=interrupted,
            belief=self._belief(),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _extent(self) -> str:
        if not self._state().left():
            all_legal = len(self._start.plans) == len(self.search.legal.plans)
            which = "every legal plan" if all_legal else "every legal plan that jax can lay out"
            return f"{which} was compiled, and nothing was run"
        if self._was_late:
            spent_budget = spent(self.search.request.budget_s)
            return f"{spent_budget} before all promising plans were compiled, and nothing was run"
        said = "the plans that promised most were compiled and replayed, and nothing was run"
        waiting = self.search.estimates.waiting & frozenset(self._state().left())
        if not waiting:
            return said
        wait = "waits" if len(waiting) == 1 else "wait"
        plans = count(len(waiting), "plan")
        return f"{said}; {plans} {wait} for an estimate, so run the same command to go on"

    def _belief(self) -> str:
        """Returns the belief about the plans that were not compiled, by estimate and replay."""
        state, may_fit = self._state(), self._may_fit()
        said = state.belief(state.best_s(), may_fit, how="replayed")
        left_out = len(self._left()) - len(may_fit)
        if left_out:
            said += f"; {too_large_notice(left_out)}" if said else too_large_notice(left_out)
        right, total = pairs_in_order(state.estimates, self._compiled)
        if not said or not total:
            return said
        pairs = count(total, "pair that is no tie", "pairs that are no ties")
        return f"{said}; the estimate orders {right} of {pairs} as the replay does"
