"""The objects that all parts of a running search use: request, study, display and clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automesh.mesh.axes import Plan
from automesh.outcomes import Outcome
from automesh.report.estimates import Estimates
from automesh.report.progress import Progress
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.assemble import outcomes_of
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.rung import Rung
from automesh.tuner.study.study import Study
from automesh.tuner.workers import memory_share_bytes
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool
from automesh.worker.process import Process, StartWorker

if TYPE_CHECKING:
    from automesh.launch.lending import Lender


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """A search whose plans are enumerated and estimated, and whose study is open.

    Attributes:
      workers: number of compiles at the same time.
      start_worker: starts the workers that have the target's own devices.
      lender: lends workers on other hosts for compiles; None if there are none.
      cache_dir: the folder in which jax keeps executables, so that the measure rung need not
        compile again; None if none are kept, as for absent devices.
      started_s: when the budget began, on `clock`.
    """

    request: SearchRequest
    preparation: Preparation
    legal: LegalPlans
    estimates: Estimates
    study: Study
    notebook: Notebook
    progress: Progress
    workers: int
    started_s: float
    clock: Callable[[], float]
    start_worker: StartWorker = Process
    lender: Lender | None = None
    cache_dir: Path | None = None

    @property
    def end_s(self) -> float:
        """The time at which the budget is spent, on `clock`."""
        return self.started_s + self.request.budget_s

    def outcomes(self, rung: Rung) -> dict[Plan, Outcome]:
        """Returns the outcomes of a rung, judged by the memory that is kept free now."""
        judged = self.preparation.device_memory.judged
        return {plan: judged(one) for plan, one in outcomes_of(self.notebook, rung).items()}

    def open_compilers(self, surroundings: Surroundings) -> Pool:
        """Opens a pool as `open_pool` does, on all hosts that compile."""
        lender = self.lender
        if lender is None:
            return self.open_pool(self.workers, surroundings)
        return Pool(
            size=self.workers,
            surroundings=surroundings,
            log_dir=self.preparation.folder / "logs",
            memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(1),
            on_wait=self.progress.tick,
            start=lender.start_worker,
            room=lender.room,
        )

    def open_pool(self, size: int, surroundings: Surroundings) -> Pool:
        """Opens a pool of workers with logs in the study's folder, and with their share of the free
        memory."""
        return Pool(
            size=size,
            surroundings=surroundings,
            log_dir=self.preparation.folder / "logs",
            memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(size),
            on_wait=self.progress.tick,
            start=self.start_worker,
        )
