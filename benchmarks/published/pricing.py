"""A published layout's time and memory, from the terms of its stages (numpy, no jax).

What Megatron does once per step is priced once per step: gradients are reduced after the last
microbatch, and with ZeRO-1 each replica updates its part of the parameters and gathers the rest.
Where they are reduced while the last microbatch goes back, what is then left of it counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from automesh.collectives import CollectiveName
from automesh.cost.pipeline.prices import price_pipeline_terms
from automesh.cost.pipeline.step import PipelineCost
from automesh.cost.pipeline.terms import PipelineTerms, ScheduleText, StageTerms
from automesh.cost.pricing import price
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
# Of a program that goes forward and back the part that goes back: it multiplies twice as often.
_BACK = 2 / 3
# Seconds of one execution.
_Clock = Callable[[Terms], float]


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
    name = f"{group.trainer.cluster}-{group.devices}"
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
    hardware = HardwareModel(
        fabric=fabric,
        layouts=Layouts(shapes=(tuple(one.ici for one in axes),), spans=((),)),
        speeds=datasheet_speeds(fabric.chip, fabric),
    )

    def clock(terms: Terms) -> float:
        there = replace(
            terms, active=active, sampled=where.sampled, fixed=where.fixed, guards=(), limits=()
        )
        return price({active: there}, batch, hardware=hardware).estimated(0).step_s

    pipeline = _as_trained(made.pipeline, layout, group, clock)
    found = price_pipeline_terms(pipeline, where, batch, hardware=hardware)
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


def _as_trained(
    pipeline: PipelineTerms, layout: Layout, group: LayoutGroup, clock: _Clock
) -> PipelineTerms:
    text = pipeline.schedule
    ends = {pipeline.stages[0], pipeline.stages[-1]}
    return replace(
        pipeline,
        schedule=ScheduleText(
            name="1f1b",
            num_ranks=text.num_ranks,
            num_microbatches=layout.microbatches,
            num_stages=text.num_stages,
        ),
        kinds=tuple(
            _stage(
                one,
                layout,
                group,
                clock,
                is_first=number == pipeline.stages[0],
                is_tied=group.shape.tied and len(pipeline.stages) > 1 and number in ends,
            )
            for number, one in enumerate(pipeline.kinds)
        ),
    )


def _stage(
    stage: StageTerms,
    layout: Layout,
    group: LayoutGroup,
    clock: _Clock,
    *,
    is_first: bool,
    is_tied: bool,
) -> StageTerms:
    """A stage as it was trained.

    Args:
      is_first: whether it begins with the embedding.
      is_tied: whether its embedding is that of another stage, too.
    """
    shared = layout.zero > 0 and layout.dp > 1
    programs = tuple(
        (kind, _fused(_unreduced(terms)) if group.is_fused else _unreduced(terms))
        for kind, terms in stage.programs
    )
    stage = replace(stage, programs=programs)
    finish = _updated(stage.finish, shared=shared)
    gradients = _scaled(stage.sums_bytes, group.trainer.gradient_bytes / _SUM)
    embedding = _embedding(group)
    moved = _moved(stage, layout, group, gradients)
    if group.trainer.overlaps and not shared:
        last = embedding if is_first else ()
        moved = [_left(one, last, finish, _back_s(stage, clock), clock) for one in moved]
    if is_tied:
        # Both stages add what the other one has: an all-reduce of two, in which each sends all.
        moved.append(_collective("collective-permute", PIPELINE, embedding))
    return replace(
        stage,
        finish=replace(finish, collectives=(*finish.collectives, *moved)),
        sums_bytes=gradients,
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


def _updated(finish: Terms, *, shared: bool) -> Terms:
    """What follows the last microbatch, but for the replicas' exchange."""
    if not shared:
        return finish
    kernels = (replace(one, count=_scaled(one.count, 1.0, shared=True)) for one in finish.kernels)
    return replace(finish, kernels=tuple(kernels))


def _moved(
    stage: StageTerms, layout: Layout, group: LayoutGroup, gradients: Sum
) -> list[CollectiveTerm]:
    """What replicas exchange once per step."""
    if layout.dp == 1:
        return []
    if not layout.zero:
        return [_collective("all-reduce", _REPLICAS, gradients)]
    return [
        _collective(
            "reduce-scatter" if group.trainer.scatters else "all-reduce", _REPLICAS, gradients
        ),
        _collective("all-gather", _REPLICAS, stage.params_bytes),
    ]


def _collective(kind: CollectiveName, axis: str, size: Sum) -> CollectiveTerm:
    return CollectiveTerm(
        region=0, count=_ONCE, kind=kind, axes=(axis,), payload_bytes=size, hides=False
    )


def _embedding(group: LayoutGroup) -> Sum:
    """Bytes of the gradient of the embedding, whose rows `tp` splits."""
    size = group.shape.vocab * group.shape.d_model * group.trainer.gradient_bytes
    return (Monomial(coefficient=size, powers=(("tp", -1),)),)


def _back_s(stage: StageTerms, clock: _Clock) -> float:
    """Seconds that a microbatch goes back for."""
    programs = dict(stage.programs)
    return clock(programs["B"]) * (1.0 if "F" in programs else _BACK)


def _left(
    whole: CollectiveTerm, last: Sum, finish: Terms, back_s: float, clock: _Clock
) -> CollectiveTerm:
    """What is left of an all-reduce in buckets when the last microbatch has gone back.

    Args:
      last: bytes of the gradient that is there when all is done; empty if a layer's is.
      finish: of the stage, for its regions.
      back_s: seconds of the last microbatch's way back.
    """

    def seconds(one: CollectiveTerm) -> float:
        return clock(replace(finish, kernels=(), host_transfers=(), collectives=(one,)))

    whole_s = seconds(whole)
    left_s = max(whole_s - back_s, seconds(replace(whole, payload_bytes=last)) if last else 0.0)
    part = min(left_s / whole_s, 1.0) if whole_s else 0.0
    return replace(whole, count=(Monomial(coefficient=part),))


def _scaled(total: Sum, factor: float, *, shared: bool = False) -> Sum:
    """A sum times a factor, and divided by the number of replicas if they share it."""
    more = ((_REPLICAS, -1),) if shared else ()
    return tuple(
        Monomial(coefficient=one.coefficient * factor, powers=tuple(sorted((*one.powers, *more))))
        for one in total
    )
