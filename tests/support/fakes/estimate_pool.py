"""A pool that answers propagations at once, and a price that is read off the sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.terms import DivisibilityGuard, Region, Terms
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated, Failure
from automesh.program.nouns import Entry, Propagation, StepRef
from automesh.report.progress import Silent
from automesh.tuner.estimate.propagator import PropagatedStep, Propagator
from automesh.tuner.estimate.rung import EstimateRung
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.worker.messages import Job, LayoutJob, PropagateJob
from automesh.worker.pool import Finished, OnEvent

AXES = ("dp", "tp", "sp")
PIPELINE_AXES = ("pp", *AXES)
STEP = PropagatedStep(
    step=StepRef(entry=Entry(kind="script", location="/train.py")),
    axis_names=AXES,
    platform="cpu",
)


def plan(mesh: str, **knobs: bool | int | float | str) -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), knobs=tuple(knobs.items()))


def terms(job: PropagateJob, **changes: object) -> Terms:
    made = Terms(
        active=tuple(axis for axis, _ in job.sizes),
        sampled=job.sizes,
        platform="cpu",
        regions=(Region(name="step", trips=()),),
        kernels=(),
        collectives=(),
        points=(),
        argument_bytes=(),
        output_bytes=(),
        alias_bytes=(),
    )
    return replace(made, **changes)


def propagation(job: PropagateJob, **changes: object) -> Propagation:
    return Propagation(
        terms=terms(job, **changes), failed_probes=(), notes=(), lower_s=0.1, propagate_s=0.1
    )


Answers = Callable[[PropagateJob], Propagation | Failure]


@dataclass
class FakePool:
    """Answers in the order in which it was asked, one job per wait; each takes a second."""

    answers: Answers = propagation
    layouts: Layouts = field(default_factory=lambda: Layouts(shapes=(), spans=()))
    doubtful: bool = False
    now_s: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    waiting: list[tuple[int, Job]] = field(default_factory=list)

    def submit(
        self,
        job: Job,
        timeout_s: float,
        on_event: OnEvent | None = None,
        *,
        fresh: bool = False,
        affinity: object = None,
    ) -> int:
        self.jobs.append(job)
        self.waiting.append((len(self.jobs), job))
        return len(self.jobs)

    def wait(self, timeout_s: float | None = None) -> list[Finished]:
        ticket, job = self.waiting.pop(0)
        self.now_s += 1.0
        if isinstance(job, LayoutJob):
            return [Finished(ticket=ticket, job=job, result=self.layouts)]
        assert isinstance(job, PropagateJob)
        result = self.answers(job)
        is_bad = not isinstance(result, Propagation)
        return [Finished(ticket=ticket, job=job, result=result, doubtful=self.doubtful and is_bad)]

    @property
    def propagated(self) -> list[PropagateJob]:
        return [job for job in self.jobs if isinstance(job, PropagateJob)]


@dataclass(frozen=True)
class FakePrices:
    sizes: NDArray[np.int64]
    needs_own: NDArray[np.bool_]
    own: bool

    @property
    def step_s(self) -> NDArray[np.float64]:
        return 1.0 + 0.1 * self.sizes[:, -2] + 0.01 * self.sizes[:, -1]

    def estimated(self, row: int) -> Estimated:
        assert not self.needs_own[row]
        *_, tp, sp = (int(size) for size in self.sizes[row])
        step_s = 1.0 + 0.1 * tp + 0.01 * sp
        return Estimated(
            step_s=step_s,
            bracket_s=(step_s / 2, 2 * step_s),
            bound_s=0.1,
            memory_bytes=1000 * tp,
            causes=(("compute", step_s),),
            uncounted=("custom call x: no price",) if sp > 1 else (),
        )


def price(own: Mapping[tuple[str, ...], Terms], batch: Batch, layouts: Layouts) -> FakePrices:
    """Terms hold where their guards do, or at the sampled sizes."""
    needs_own = np.ones(len(batch), np.bool_)
    for row, sizes in enumerate(batch.sizes):
        named = dict(zip(batch.names, map(int, sizes)))
        active = tuple(name for name, size in named.items() if size > 1)
        found = own.get(active)
        if found is None:
            continue
        at_home = all(named[axis] == size for axis, size in found.sampled)
        fits = all(
            guard.size % int(np.prod([named[axis] for axis in guard.axes])) == 0
            for guard in found.guards
        )
        moved = [axis for axis in found.fixed if named[axis] != dict(found.sampled)[axis]]
        needs_own[row] = not at_home and (not fits or bool(moved))
    return FakePrices(sizes=batch.sizes, needs_own=needs_own, own=False)


@dataclass(frozen=True)
class FakePipelinePrices:
    """Seconds are the number of microbatches, and tell the schedule by a small part."""

    pipeline: PipelineTerms
    needs_own: NDArray[np.bool_]

    @property
    def step_s(self) -> NDArray[np.float64]:
        return np.full(len(self.needs_own), self.estimated(0).step_s)

    def estimated(self, row: int) -> Estimated:
        text = self.pipeline.schedule
        step_s = text.num_microbatches + len(text.name) / 100
        return Estimated(
            step_s=step_s,
            bracket_s=(step_s, step_s),
            bound_s=0.0,
            memory_bytes=1,
            causes=(("bubble", step_s),),
        )


def price_pipeline(
    pipeline: PipelineTerms, where: Terms, batch: Batch, layouts: Layouts
) -> FakePipelinePrices:
    return FakePipelinePrices(pipeline=pipeline, needs_own=np.zeros(len(batch), np.bool_))


def rung(
    plans: Sequence[Plan],
    pool: FakePool,
    *,
    cache: TermsCache | None = None,
    deadline_s: float = 1e9,
    torus: bool = False,
    workers: int = 2,
) -> EstimateRung:
    def layout(shapes: tuple[tuple[int, ...], ...]) -> LayoutJob:
        return LayoutJob(
            platform="tpu", device_kind="TPU", torus=(2, 4), devices_per_chip=1, shapes=shapes
        )

    propagator = Propagator(
        step=STEP,
        pool=pool,
        cache=cache or TermsCache(folder=None, source_hash="", versions=()),
        progress=Silent(),
        workers=workers,
        deadline_s=deadline_s,
        timeout_s=60.0,
        clock=lambda: pool.now_s,
    )
    return EstimateRung(
        plans=plans,
        propagator=propagator,
        layout=layout if torus else None,
        price=price,
        price_pipeline=price_pipeline,
        origin="the test",
    )


GUARD = DivisibilityGuard(size=4, axes=("tp",))
