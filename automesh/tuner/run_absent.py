"""A search for devices that are not here: compile, replay, write a rule that says `compiled`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from automesh.errors import NoFeasibleMesh
from automesh.hardware import Absent, Target
from automesh.hardware.calibration.measured_speeds import find_speeds
from automesh.hardware.compile_client import elsewhere_of
from automesh.hlo.store import ModuleStore, default_store
from automesh.mesh.axes import Plan
from automesh.outcomes import Effort, Failed, Outcome, OutOfMemory, TimedOut
from automesh.program.nouns import Attachment
from automesh.report.estimates import ESTIMATES, Estimates
from automesh.report.files.csv import write_csv, write_estimates
from automesh.report.files.rule import save_rule
from automesh.report.progress import Progress
from automesh.report.result import SearchResult
from automesh.report.words import best_of, count
from automesh.tuner.choose.ahead_of_time import (
    challengers,
    chances_left,
    hopeless,
    interleaved,
    large_last,
    left_of,
    pairs_in_order,
    said_of_hopeless,
    to_compile,
    to_screen,
    view_by_replay,
)
from automesh.tuner.choose.beliefs import View, compile_order
from automesh.tuner.choose.certificate import belief
from automesh.tuner.choose.prior_rule import measured_rule
from automesh.tuner.compile.jobs import CompilingAhead
from automesh.tuner.compile.replay import Player
from automesh.tuner.compile.rung import CompileRung
from automesh.tuner.paths import as_seen
from automesh.tuner.preparation import Preparation, memory_share_bytes
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.assemble import assemble, outcomes_of
from automesh.tuner.study.metadata import Footer, Notebook, header_of, spent
from automesh.tuner.study.study import Study
from automesh.tuner.worker_errors import refuse_to_blame
from automesh.worker.environment import surroundings_for
from automesh.worker.messages import DevicesJob
from automesh.worker.pool import Pool

# Of the budget, from its beginning; what is left over goes to compiles at default effort.
SCREEN_SHARE = 0.55
# A compile at default effort takes a minute on a small machine: one that is under way past the
# deadline is worth waiting for.
GRACE_S = 60.0
# Compilers for GPUs take seconds at any effort.
_SCREENED = ("tpu",)


def ready_for(request: SearchRequest, target: Target, progress: Progress) -> Attachment:
    """Asks the compiler for absent devices about them.

    Returns:
      The devices as the compiler describes them, with the memory that it lets a program use.

    Raises:
      UsageError: it does not start, or does not know them.
    """
    assert target.absent is not None
    elsewhere = elsewhere_of(target.absent)
    progress.now(f"asking the compiler about {target.name}")
    with (
        tempfile.TemporaryDirectory(prefix="automesh-ready-") as logs,
        Pool(
            size=1,
            surroundings=surroundings_for(elsewhere),
            log_dir=Path(logs),
            memory_limit_bytes=request.memory_limit_bytes or memory_share_bytes(1),
            on_wait=progress.tick,
        ) as pool,
    ):
        answer = pool.run(DevicesJob(elsewhere=elsewhere), request.timeout_s)
    if isinstance(answer, Failed | TimedOut | OutOfMemory):
        refuse_to_blame(replace(answer, stage="start"))
    if not isinstance(answer, Attachment):
        raise TypeError(f"a question about devices was answered with {type(answer).__name__}")
    return answer


@dataclass(slots=True, kw_only=True)
class AheadSearch:
    """The rungs above the estimates.

    Attributes:
      absent: the devices.
      workers: compiles side by side.
      started_s: when the budget began, on `clock`.

    Raises:
      NoFeasibleMesh: jax can lay out none of the meshes.
    """

    request: SearchRequest
    preparation: Preparation
    absent: Absent
    estimates: Estimates
    study: Study
    progress: Progress
    workers: int
    started_s: float
    clock: Callable[[], float]
    _plans: tuple[Plan, ...] = field(init=False, default=())
    _player: Player = field(init=False)
    _store: ModuleStore = field(init=False)
    _screened: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _compiled: dict[Plan, Outcome] = field(init=False, default_factory=dict[Plan, Outcome])
    _told: set[str] = field(init=False, default_factory=set[str])
    _was_late: bool = field(init=False, default=False)
    _served: set[Effort] = field(init=False, default_factory=set[Effort])

    def __post_init__(self) -> None:
        fabric, layouts = self.absent.fabric, self.estimates.layouts
        assert layouts is not None, "every search for absent devices is laid out"
        refused = dict(layouts.refused)
        self._plans = tuple(
            plan
            for plan in self.preparation.plans
            if tuple(axis.ici for axis in plan.axes) not in refused
        )
        if not self._plans:
            reason = next(iter(refused.values()))
            raise NoFeasibleMesh(
                f"no legal plan can be laid out on {self.preparation.selector}: {reason}",
                hint="let the space have other sizes, or name another target",
            )
        self._store = default_store(os.environ)
        aim = self.preparation.aim
        self._player = Player(
            store=self._store,
            fabric=fabric,
            layouts=layouts,
            speeds=find_speeds(
                fabric, platform=aim.platform, device_kind=aim.device_kind, environ=os.environ
            ),
        )

    def run(self) -> SearchResult:
        """Compiles until nothing is left that may win, or the budget is spent, and writes the rule.

        Raises:
          UsageError: the compiler or this machine failed, not a plan.
        """
        header = header_of(
            self.request, self.preparation, self.estimates, self.study, is_ahead=True
        )
        notebook = Notebook(
            study=self.study, source_hash=header.source_hash, versions=header.versions
        )
        for rung in (self.study.screen, self.study.compile):
            rung.adopt_expired()
        notebook.note_header(header)
        write_estimates(self.estimates, self.preparation.folder / ESTIMATES)
        interrupted = False
        try:
            self._climb(notebook)
        except KeyboardInterrupt:
            # Whatever is in flight is given back when the study closes; the table shows the rest.
            interrupted = True
            self._read(notebook)
        footer = self._footer(interrupted=interrupted)
        notebook.note_footer(footer)
        result = assemble(self.study, header)
        if best_of(result) and self.request.rules and not interrupted:
            notebook.note_footer(self._written(result, footer))
            result = assemble(self.study, header)
        write_csv(result, self.preparation.folder / "trials.csv")
        return result

    def _written(self, result: SearchResult, footer: Footer) -> Footer:
        """Writes the rule, unless the file has a measured one, which is worth more."""
        path = Path(self.request.rules)
        if measured_rule(path, self.preparation.selector):
            kept = (
                f"{footer.stop_reason}; the rule for {self.preparation.selector} in "
                f"{as_seen(path)} was measured, and stays (--rules FILE writes this one elsewhere)"
            )
            return replace(footer, stop_reason=kept)
        return replace(footer, rules_path=as_seen(save_rule(result, path)))

    def _climb(self, notebook: Notebook) -> None:
        """Compiles the best by estimate, then whatever may still beat the best replay."""
        self._read(notebook)
        end_s = self.started_s + self.request.budget_s
        order, wanted = self._order(), self.request.top
        screen_until_s = self.started_s + SCREEN_SHARE * self.request.budget_s
        while True:
            if self.preparation.aim.platform in _SCREENED:
                self._screen(notebook, order, wanted, screen_until_s)
            self._compile(notebook, order, wanted, end_s)
            if self._was_late:
                return
            order = self._challengers()
            wanted = min(len(order), self.request.top)
            self._was_late = bool(order) and self.clock() >= end_s
            if self._was_late or not order:
                return
            screen_until_s = self.clock() + (end_s - self.clock()) / 2

    def _read(self, notebook: Notebook) -> None:
        """Takes over what the study knows."""
        judged = self.preparation.room.judged
        rungs = (self._screened, self.study.screen), (self._compiled, self.study.compile)
        for known, rung in rungs:
            known |= {p: judged(one) for p, one in outcomes_of(notebook, rung).items()}

    def _order(self) -> tuple[Plan, ...]:
        """All plans but the script's own, best first by their estimates."""
        plans = [plan for plan in self._plans if plan not in self.preparation.baseline]
        order = compile_order(
            plans,
            view_by_replay(self.estimates.found, {}),
            self.estimates.found,
            {},
            usual=self.preparation.enumeration.legal[0],
            first=(),
            device_memory_bytes=self.preparation.room.free_bytes,
        )
        return large_last(interleaved(order), self.estimates.found, self.preparation.room)

    def _challengers(self) -> tuple[Plan, ...]:
        view = self._view()
        chances = chances_left(self._left(), self._screened, self._compiled, view)
        found, room = challengers(chances, view), self.preparation.room
        return large_last(found, self.estimates.found, room)

    def _left(self) -> tuple[Plan, ...]:
        """The plans that are not compiled and may fit."""
        left = left_of(self._plans, self._screened, self._compiled)
        known = self._screened | self._compiled
        too_large = hopeless(left, known, self.estimates.found, self.preparation.room)
        return tuple(plan for plan in left if plan not in too_large)

    def _view(self) -> View:
        return view_by_replay(self.estimates.found, self._compiled)

    def _screen(
        self, notebook: Notebook, order: Sequence[Plan], wanted: int, until_s: float
    ) -> None:
        """Compiles at low effort until enough plans fit."""
        room = self.preparation.room

        def choose(done: Mapping[Plan, Outcome]) -> Sequence[Plan]:
            known = {plan: room.judged(one) for plan, one in done.items()}
            chosen = to_screen(order, known | self._compiled, room, wanted=wanted)
            return [plan for plan in chosen if plan not in self._compiled]

        self._screened |= self._run(notebook, order, choose, until_s, effort="low")

    def _compile(
        self, notebook: Notebook, order: Sequence[Plan], wanted: int, until_s: float
    ) -> None:
        """Compiles at default effort the script's own plan, and those that promise most."""
        room = self.preparation.room
        baseline = [plan for plan in self.preparation.baseline if plan in self._plans]

        def choose(done: Mapping[Plan, Outcome]) -> Sequence[Plan]:
            known = {plan: room.judged(one) for plan, one in done.items()}
            return [*baseline, *to_compile(order, self._screened, known, wanted=wanted)]

        self._compiled |= self._run(notebook, order, choose, until_s, effort="default")
        self._was_late = any(plan not in self._compiled for plan in choose(self._compiled))

    def _run(
        self,
        notebook: Notebook,
        order: Sequence[Plan],
        choose: Callable[[Mapping[Plan, Outcome]], Sequence[Plan]],
        until_s: float,
        *,
        effort: Effort,
    ) -> dict[Plan, Outcome]:
        """Runs one of the two rungs; gives the outcomes with the reserve taken into account."""
        is_screen = effort == "low"
        rung = self.study.screen if is_screen else self.study.compile
        known = outcomes_of(notebook, rung)
        room = self.preparation.room
        if all(plan in known for plan in choose(known)):
            return {plan: room.judged(one) for plan, one in known.items()}
        compiling = CompilingAhead(
            preparation=self.preparation,
            elsewhere=elsewhere_of(self.absent),
            effort=effort,
            store=self._store,
            player=None if is_screen else self._player,
        )
        place = {plan: number for number, plan in enumerate(order)}
        with self._open_pool() as pool:
            done = CompileRung(
                preparation=self.preparation,
                notebook=notebook,
                study=self.study,
                rung=rung,
                compiling=compiling,
                pool=pool,
                progress=self.progress,
                choose=choose,
                # What is not in the order is the script's own plan, which comes first.
                order=lambda plans, _: sorted(plans, key=lambda plan: place.get(plan, -1)),
                estimates=self.estimates.found,
                workers=self.workers,
                deadline_s=until_s,
                clock=self.clock,
                name="screen" if is_screen else "compile",
                grace_s=GRACE_S,
                is_first=effort not in self._served,
            ).run()
        if any(plan not in known for plan in done):
            self._served.add(effort)
        self._tell(compiling.asked)
        return {plan: room.judged(one) for plan, one in done.items()}

    def _open_pool(self) -> Pool:
        return Pool(
            size=self.workers,
            surroundings=surroundings_for(elsewhere_of(self.absent)),
            log_dir=self.preparation.folder / "logs",
            memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(self.workers),
            on_wait=self.progress.tick,
        )

    def _tell(self, asked: Mapping[str, None]) -> None:
        """Says what the script was told about devices that are not here."""
        news = [what for what in asked if what not in self._told]
        self._told.update(news)
        for what in news:
            self.progress.log(f"while it was built, the script asked jax: {what}")

    def _footer(self, *, interrupted: bool) -> Footer:
        return Footer(
            stop_reason="interrupted" if interrupted else self._extent(),
            rules_path="",
            interrupted=interrupted,
            belief=self._belief(),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _extent(self) -> str:
        left = left_of(self._plans, self._screened, self._compiled)
        if not left:
            all_legal = len(self._plans) == len(self.preparation.plans)
            which = "every legal plan" if all_legal else "every legal plan that jax can lay out"
            return f"{which} was compiled, and nothing was run"
        if self._was_late:
            late = f"{spent(self.request.budget_s)} before all promising plans were compiled"
            return f"{late}, and nothing was run"
        return "the plans that promised most were compiled and replayed, and nothing was run"

    def _belief(self) -> str:
        """What is thought of the plans that were not compiled, by estimate and replay."""
        view = self._view()
        left = self._left()
        chances = chances_left(left, self._screened, self._compiled, view)
        said = belief(len(left), view.refinement, chances, how="replayed")
        said += self._too_large(len(left), after=said)
        right, total = pairs_in_order(self.estimates.found, self._compiled)
        if not said or not total:
            return said
        pairs = count(total, "pair that is no tie", "pairs that are no ties")
        return f"{said}; the estimate orders {right} of {pairs} as the replay does"

    def _too_large(self, left: int, *, after: str) -> str:
        number = len(left_of(self._plans, self._screened, self._compiled)) - left
        if not number:
            return ""
        said = said_of_hopeless(number)
        return f"; {said}" if after else said
