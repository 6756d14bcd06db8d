"""One search from its request to its result: prepare, compile, measure, write."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware import Target, parse_target, running_under_several_processes
from automesh.ladder.assemble import assemble
from automesh.ladder.compile_rung import CompileRung
from automesh.ladder.identity import workload_name
from automesh.ladder.live_pool import LeaseLost, LivePool
from automesh.ladder.measure_rung import MeasureRung
from automesh.ladder.notebook import Footer, Header, Notebook, read_header
from automesh.ladder.places import as_seen, check_places, make_folder, newest_study
from automesh.ladder.preparation import (
    Preparation,
    count_workers,
    inspect,
    memory_share_bytes,
    prepare,
    surroundings_of,
)
from automesh.ladder.request import SearchRequest
from automesh.ladder.study import Study, open_study, parse_storage
from automesh.ladder.visits import VisitRules
from automesh.program.nouns import Inspection
from automesh.results.csv_export import write_csv
from automesh.results.progress import Progress
from automesh.results.result import Funnel, SearchResult
from automesh.results.rule import save_rule
from automesh.space.space import SearchSpace
from automesh.space.spec import read_space
from automesh.units import format_wait
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool

COMPILE_SHARE = 0.6  # of the budget; what compiling leaves of it goes to measuring


def run_search(
    request: SearchRequest, progress: Progress, *, clock: Callable[[], float] = time.monotonic
) -> SearchResult:
    """Searches until the budget is spent or nothing is left to try.

    Raises:
      UsageError: bad input.
      NoFeasibleMesh: no plan is legal.
    """
    several = running_under_several_processes(os.environ)
    if several:
        raise UsageError(
            f"this is one of several processes ({several}), but a search runs in a single one",
            hint="run the search on one host, without the launcher",
        )
    target = parse_target(request.target, os.environ)
    space = read_space(request.space)
    if not request.dry_run:
        check_places(request, space.names)
    preparation = _look(request, target, space, progress)
    if request.dry_run:
        return _enumerated_only(request, preparation)
    make_folder(preparation.folder)
    with open_study(
        parse_storage(request.storage, preparation.folder),
        preparation.name,
        source_hash=preparation.inspection.source_hash,
        versions=preparation.provenance,
    ) as study:
        search = _Search(
            request=request,
            preparation=preparation,
            study=study,
            progress=progress,
            surroundings=surroundings_of(target),
            workers=count_workers(target, request.workers),
            clock=clock,
        )
        return search.run()


def _look(
    request: SearchRequest, target: Target, space: SearchSpace, progress: Progress
) -> Preparation:
    """Inspects the script and the devices in a worker of its own, and enumerates the plans."""
    with (
        tempfile.TemporaryDirectory(prefix="automesh-inspect-") as logs,
        Pool(
            size=1,
            surroundings=surroundings_of(target),
            log_dir=Path(logs),
            memory_limit_bytes=request.memory_limit_bytes or memory_share_bytes(1),
        ) as pool,
    ):
        inspection = inspect(pool, request, space, progress)
        preparation = prepare(request, target, space, inspection, progress)
    enumeration = preparation.enumeration
    progress.phase(
        "enumerate",
        total=enumeration.num_plans,
        done=enumeration.num_plans,
        note=f"{len(enumeration.legal)} legal",
    )
    return preparation


def read_result(study: Path | None, *, results: Path, storage: str) -> SearchResult:
    """Reads what a study holds, without running anything.

    Raises:
      UsageError: there is no such study, or it cannot be read.
    """
    folder = newest_study(results, storage) if study is None else study
    place = parse_storage(storage, folder)
    if place.kind != "server" and not Path(place.location).is_file():
        raise UsageError(
            f"there is no study in `{folder}`",
            hint="give the folder of a study, as `search` printed it, or its --storage",
        )
    with open_study(place, folder.resolve().name, create=False) as opened:
        header = read_header(opened)
        if header is None:
            raise UsageError(
                f"the study in `{folder}` holds nothing yet", hint="run its search first"
            )
        return assemble(opened, header)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    request: SearchRequest
    preparation: Preparation
    study: Study
    progress: Progress
    surroundings: Surroundings
    workers: int
    clock: Callable[[], float]

    def run(self) -> SearchResult:
        header = _header(self.request, self.preparation, self.study)
        notebook = Notebook(
            study=self.study, source_hash=header.source_hash, versions=header.versions
        )
        self.study.compile.adopt_expired()
        notebook.note_header(header)
        started_s = self.clock()
        interrupted, ending = False, ""
        try:
            ending = self._climb(notebook, started_s)
        except KeyboardInterrupt:
            # Whatever is in flight is given back when the study closes; the table shows the rest.
            interrupted = True
        footer = Footer(
            stop_reason=self._stop_reason(header, notebook, interrupted=interrupted, ending=ending),
            rules_path="",
            interrupted=interrupted,
        )
        notebook.note_footer(footer)
        result = assemble(self.study, header)
        if result.verifications and self.request.rules and not interrupted:
            path = save_rule(result, Path(self.request.rules))
            notebook.note_footer(_with_rules(footer, as_seen(path)))
            result = assemble(self.study, header)
        write_csv(result, self.preparation.folder / "trials.csv")
        return result

    def _climb(self, notebook: Notebook, started_s: float) -> str:
        budget_s = self.request.budget_s
        with self._open_pool(self.workers) as pool:
            compiled = CompileRung(
                preparation=self.preparation,
                notebook=notebook,
                study=self.study,
                pool=pool,
                progress=self.progress,
                plans=self.preparation.plans,
                workers=self.workers,
                deadline_s=started_s + COMPILE_SHARE * budget_s,
                clock=self.clock,
            ).run()
        # Another pool: what is measured has the cores and the memory of the machine to itself.
        with self._open_pool(1) as pool:
            rung = MeasureRung(
                preparation=self.preparation,
                study=self.study,
                notebook=notebook,
                pool=LivePool(pool=pool, study=self.study, progress=self.progress),
                progress=self.progress,
                compiled=compiled,
                top=self.request.top,
                deadline_s=started_s + budget_s,
                rules=VisitRules(timeout_s=self.request.timeout_s),
                clock=self.clock,
            )
            try:
                return rung.run()
            except LeaseLost:
                return (
                    "this search was silent for so long that another one has taken over; "
                    "run the same command to see what it found"
                )

    def _open_pool(self, size: int) -> Pool:
        return Pool(
            size=size,
            surroundings=self.surroundings,
            log_dir=self.preparation.folder / "logs",
            memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(size),
        )

    def _stop_reason(
        self, header: Header, notebook: Notebook, *, interrupted: bool, ending: str
    ) -> str:
        if interrupted:
            return "interrupted"
        result = assemble(self.study, header)
        if result.funnel.waiting:
            budget_s = self.request.budget_s
            spent = format_wait(budget_s) if budget_s >= 120 else f"{budget_s:.0f} s"
            compiled = f"the budget of {spent} was spent before all plans were compiled"
        else:
            compiled = "every legal plan was compiled"
        decision = notebook.decision()
        if not ending:  # Nothing was left to measure: the last race says how it came to this.
            ending = decision.race.sentence if decision else "there was nothing left to measure"
        if result.verifications:
            return f"{compiled}; the most promising were raced: {ending}"
        return f"{compiled}; {ending}"


def _header(request: SearchRequest, preparation: Preparation, study: Study) -> Header:
    enumeration, inspection = preparation.enumeration, preparation.inspection
    first = inspection.devices[0]
    extra = len(preparation.plans) - len(enumeration.legal)  # a baseline outside of the space
    return Header(
        workload=workload_name(request.entry),
        target=preparation.selector,
        platform=first.platform,
        device_kind=first.kind,
        device_count=len(inspection.devices),
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        enumerated=enumeration.num_plans + extra,
        plans=len(preparation.plans),
        ruled_out=tuple((one.rule, one.count) for one in enumeration.rejections),
        baseline=preparation.baseline,
        notices=enumeration.notices,
        tokens_per_step=inspection.tokens_per_step,
        location=study.storage.text
        if study.storage.kind == "server"
        else as_seen(study.storage.location),
        results_dir=as_seen(preparation.folder),
        command=request.command,
        source_hash=inspection.source_hash,
        versions=preparation.provenance,
    )


def _with_rules(footer: Footer, path: str) -> Footer:
    return Footer(
        stop_reason=footer.stop_reason,
        rules_path=path,
        interrupted=footer.interrupted,
    )


def _enumerated_only(request: SearchRequest, preparation: Preparation) -> SearchResult:
    enumeration = preparation.enumeration
    ruled_out = tuple((one.rule, one.count) for one in enumeration.rejections)
    inspection: Inspection = preparation.inspection
    return SearchResult(
        workload=workload_name(request.entry),
        target=preparation.selector,
        platform=inspection.devices[0].platform,
        device=inspection.devices[0].kind,
        device_count=len(inspection.devices),
        axes=tuple(axis.name for axis in enumeration.legal[0].axes),
        candidates=(),
        funnel=Funnel(
            enumerated=enumeration.num_plans,
            ruled_out=ruled_out,
            legal=len(enumeration.legal),
            compiled=0,
            duplicates=0,
            out_of_memory=0,
            failed=0,
            timed_out=0,
            waiting=len(enumeration.legal),
            measured=0,
        ),
        reference="",
        verifications=(),
        stop_reason="dry run: nothing was compiled or measured",
        notices=enumeration.notices,
        tokens_per_step=inspection.tokens_per_step,
        study="",
        results_dir="",
        rules_path="",
        command="",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=preparation.provenance,
    )
