"""A published layout's time and memory, from the terms of its stages (numpy, no jax).

What Megatron does once per step is priced once per step: gradients are reduced after the last
microbatch, and with ZeRO-1 each replica updates its part of the parameters and gathers the rest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from automesh.collectives import CollectiveName
from automesh.cost.pipeline.prices import price_pipeline_terms
from automesh.cost.pipeline.step import PipelineCost
from automesh.cost.pipeline.terms import PipelineTerms, ScheduleText, StageTerms
from automesh.cost.terms import CollectiveTerm, Kernel, Monomial, Sum, Terms
from automesh.hardware import parse_target
from automesh.hardware.absent import Absent
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.clusters_file import read_clusters
from automesh.hardware.fabric.fabric import Layouts
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import DEFAULT_AXES, PIPELINE, MeshAxis
from automesh.mesh.plan_arrays import Batch
from automesh.program.nouns import Propagation
from benchmarks.published.layouts import Layout, LayoutGroup
from benchmarks.support.paths import DATA, EXAMPLES

CLUSTERS = DATA / "clusters.toml"
_ATTENTION = EXAMPLES / "lm" / "attention.py"
_ROWS, _REPLICAS = "ep", "dp"
_SUM = 4.0  # bytes of a sum of gradients in our terms
_ONCE: Sum = (Monomial(coefficient=1.0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What we say of a layout.

    Attributes:
      fits: whether its memory is that of a device at most.
    """

    cost: PipelineCost
    fits: bool


def devices_of(group: LayoutGroup) -> Absent:
    """The devices that a group was measured on.

    Raises:
      UsageError: they are not among ours.
    """
    name = f"{group.cluster}-{group.devices}"
    found = read_clusters(CLUSTERS).find(name)
    absent = found[0] if found else parse_target(name, {}).absent
    assert absent is not None
    return absent


def priced(layout: Layout, group: LayoutGroup, made: Propagation, absent: Absent) -> Priced:
    """Prices a layout; pipelines lie between machines first, as Megatron places them.

    Raises:
      ValueError: the terms do not hold for it, or its mesh and the machines do not end together.
    """
    assert made.pipeline is not None
    fabric = absent.fabric
    pipeline = _as_trained(made.pipeline, layout, group)
    axes = _axes(layout, group, fabric.granule_devices)
    batch = Batch(
        names=tuple(one.name for one in axes),
        ici=np.array([[one.ici for one in axes]]),
        dcn=np.array([[one.dcn for one in axes]]),
    )
    active = tuple(one.name for one in axes if one.size > 1)
    known = dict(made.terms.sampled)
    where = replace(
        made.terms,
        active=active,
        sampled=tuple((name, known.get(name, 1)) for name in active),
        fixed=tuple(name for name in active if name in made.terms.fixed),
    )
    found = price_pipeline_terms(
        pipeline,
        where,
        batch,
        hardware=HardwareModel(
            fabric=fabric,
            layouts=Layouts(shapes=(tuple(one.ici for one in axes),), spans=((),)),
            speeds=datasheet_speeds(fabric.chip, fabric),
        ),
    )
    if not found.costs:
        raise ValueError(f"the terms of {layout} do not hold there: {where.fixed}, {where.guards}")
    cost = found.costs[0]
    return Priced(cost=cost, fits=cost.memory_bytes <= absent.device_memory_bytes)


def _axes(layout: Layout, group: LayoutGroup, granule: int) -> tuple[MeshAxis, ...]:
    """The mesh, the innermost axis last; what cuts a microbatch takes no devices."""
    left = granule
    found = {_ROWS: MeshAxis(name=_ROWS, ici=group.most_rows // layout.rows)}
    for name, size in (("tp", layout.tp), (_REPLICAS, layout.dp), (PIPELINE, layout.pp)):
        inside = int(np.gcd(size, left))
        if inside not in (size, left):
            raise ValueError(f"the rows of {layout} and the machines do not end together")
        left //= inside
        found[name] = MeshAxis(name=name, ici=inside, dcn=size // inside)
    return tuple(found.get(name, MeshAxis(name=name)) for name in (PIPELINE, *DEFAULT_AXES))


def _as_trained(pipeline: PipelineTerms, layout: Layout, group: LayoutGroup) -> PipelineTerms:
    text = pipeline.schedule
    return replace(
        pipeline,
        schedule=ScheduleText(
            name="1f1b",
            num_ranks=text.num_ranks,
            num_microbatches=layout.microbatches,
            num_stages=text.num_stages,
        ),
        kinds=tuple(_stage(one, layout, group) for one in pipeline.kinds),
    )


def _stage(stage: StageTerms, layout: Layout, group: LayoutGroup) -> StageTerms:
    shared = layout.zero > 0 and layout.dp > 1
    return replace(
        stage,
        programs=tuple(
            (kind, _fused(_unreduced(terms)) if group.is_fused else _unreduced(terms))
            for kind, terms in stage.programs
        ),
        finish=_reduced(stage, layout, group, shared=shared),
        sums_bytes=_scaled(stage.sums_bytes, group.gradient_bytes / _SUM),
        state_bytes=_scaled(stage.state_bytes, 1.0, shared=shared),
    )


def _unreduced(terms: Terms) -> Terms:
    """Without the collectives over the parts of a microbatch, which are of gradients and the loss;
    the others are waited for, as Megatron does."""
    kept = (one for one in terms.collectives if _ROWS not in one.axes)
    return replace(terms, collectives=tuple(replace(one, hides=False) for one in kept))


def _fused(terms: Terms) -> Terms:
    """With attention as one kernel that keeps no scores: its multiplications, and no traffic."""
    file, first = _ATTENTION.name, _first_line()

    def without_traffic(one: Kernel) -> Kernel:
        name, _, line = one.source.partition(":")
        if name != file or int(line or 0) < first:
            return one
        return replace(one, bytes=(), near=(), epilogue=(), windowed=())

    return replace(terms, kernels=tuple(map(without_traffic, terms.kernels)))


@functools.cache
def _first_line() -> int:
    """Where attention itself begins, after what turns queries and keys."""
    lines = _ATTENTION.read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.startswith("def gathered_attention"))


def _reduced(stage: StageTerms, layout: Layout, group: LayoutGroup, *, shared: bool) -> Terms:
    """What follows the last microbatch."""
    terms = stage.finish
    if shared:
        terms = replace(
            terms,
            kernels=tuple(
                replace(one, count=_scaled(one.count, 1.0, shared=True)) for one in terms.kernels
            ),
        )
    gradients = _scaled(stage.sums_bytes, group.gradient_bytes / _SUM)
    moved: list[tuple[CollectiveName, Sum]] = [("all-reduce", gradients)]
    if shared:
        moved = [("reduce-scatter", gradients), ("all-gather", stage.params_bytes)]
    if layout.dp == 1:
        moved = []
    added = [
        CollectiveTerm(
            region=0, count=_ONCE, kind=kind, axes=(_REPLICAS,), payload_bytes=size, hides=False
        )
        for kind, size in moved
    ]
    return replace(terms, collectives=(*terms.collectives, *added))


def _scaled(total: Sum, factor: float, *, shared: bool = False) -> Sum:
    """A sum times a factor, and divided by the number of replicas if they share it."""
    more = ((_REPLICAS, -1),) if shared else ()
    return tuple(
        Monomial(coefficient=one.coefficient * factor, powers=tuple(sorted((*one.powers, *more))))
        for one in total
    )
