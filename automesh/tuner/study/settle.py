"""By which hash a search knows its trials: what changed is looked at before anything is tried."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from automesh.hardware import Target
from automesh.mesh.axes import Plan
from automesh.program.nouns import Traced
from automesh.report.progress import Progress
from automesh.tuner.preparation import Preparation, memory_share_bytes, surroundings_of
from automesh.tuner.request import SearchRequest
from automesh.tuner.study.freshness import grounds_of, settle
from automesh.tuner.study.study import Study
from automesh.worker.messages import TraceJob
from automesh.worker.pool import Pool

# Of the budget: what cannot be lowered in this time counts as another program.
LOWER_SHARE = 0.1


def settled(
    request: SearchRequest,
    target: Target,
    preparation: Preparation,
    study: Study,
    progress: Progress,
    clock: Callable[[], float],
) -> Preparation:
    """The preparation with the hash of the trials that count for it, and with what is said of it.

    The study counts by it, too, from then on.
    """
    with tempfile.TemporaryDirectory(prefix="automesh-lower-") as folder:
        lowering = _Lowering(
            request=request,
            target=target,
            preparation=preparation,
            study=study,
            progress=progress,
            folder=Path(folder),
            clock=clock,
            until_s=clock() + LOWER_SHARE * request.budget_s,
        )
        found = settle(
            study,
            grounds_of(preparation.inspection),
            preparation.provenance,
            # Programs for absent devices are lowered by their compiler's processes.
            lowering.lower if target.absent is None else None,
        )
        lowering.close()
    study.count_for(found.source_hash)
    for notice in found.notices:
        progress.notice(notice)
    enumeration = preparation.enumeration
    return replace(
        preparation,
        source_hash=found.source_hash,
        enumeration=replace(enumeration, notices=(*enumeration.notices, *found.notices)),
    )


@dataclass(slots=True, kw_only=True)
class _Lowering:
    """Lowers plans as the rungs do, in a process of its own that starts when it is needed."""

    request: SearchRequest
    target: Target
    preparation: Preparation
    study: Study
    progress: Progress
    folder: Path
    clock: Callable[[], float]
    until_s: float
    _pool: Pool | None = None

    def lower(self, plan: Plan) -> str:
        left_s = self.until_s - self.clock()
        if left_s <= 0:
            return ""
        self.study.heartbeat()
        self.progress.now(f"lowering {plan} to see whether it is the program that it was")
        if self._pool is None:
            self._pool = Pool(
                size=1,
                surroundings=surroundings_of(self.target),
                log_dir=self.folder,
                memory_limit_bytes=self.request.memory_limit_bytes or memory_share_bytes(1),
                on_wait=self.progress.tick,
            )
        inspection = self.preparation.inspection
        job = TraceJob(
            entry=self.preparation.entry,
            plan=plan,
            axis_types=inspection.axis_types,
            facts=inspection.facts,
            text_file=str(self.folder / "program.txt"),
        )
        answer = self._pool.run(job, min(self.request.timeout_s, left_s))
        # A plan that cannot be lowered any more is another program.
        return answer.fingerprint if isinstance(answer, Traced) else ""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
