"""Explains the time of a mesh from the data of a study, without compiling or running anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from automesh.cost.breakdown import MeshCost, break_down
from automesh.cost.pipeline.prices import price_pipeline_terms
from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.priced_options import pipeline_under_options, under_options
from automesh.cost.pricing import holds, price
from automesh.cost.terms import Terms
from automesh.errors import AutomeshError, UsageError
from automesh.hardware.fabric.placement import axes_in_words
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import MeshAxis, Plan, format_mesh, format_setting, parse_mesh
from automesh.mesh.plan_arrays import Batch, batch_of
from automesh.outcomes import Compiled, Estimated, Measured
from automesh.program.nouns import Propagation
from automesh.report.explain.nouns import Explained
from automesh.report.result import Candidate
from automesh.report.words import count, reason
from automesh.skipped import DAMAGE, reason_of
from automesh.tuner.estimate.terms_cache import TERMS, StoredPropagation

# Explains the time of a pipeline by the pieces of all programs of its busiest rank (pure
# functions).

_Run = tuple[int, MeshCost]


def break_down_pipeline(
    pipeline: PipelineTerms,
    where: Terms,
    estimated: Estimated,
    batch: Batch,
    *,
    hardware: HardwareModel,
) -> MeshCost:
    """Prices every piece of the work of the busiest rank.

    The time that ranks wait for each other is no piece of a program; only `estimated` contains it.

    Args:
      where: the mesh, with the axes larger than 1.
      estimated: estimate of the plan.
      batch: batch with the plan's mesh only.
      hardware: the devices, at least with the layout of the plan's ICI shape.
    """
    schedule = pipeline.schedule.schedule()
    times = Counter((one.stage, one.kind) for _, one in schedule.order)

    def priced(terms: Terms) -> MeshCost:
        whole = replace(terms, active=where.active)
        return break_down(whole, batch, routes_of=hardware.routes, speeds=hardware.speeds)

    kinds = [
        ({kind: priced(terms) for kind, terms in one.programs}, priced(one.finish))
        for one in pipeline.kinds
    ]
    ranks: list[list[_Run]] = [[] for _ in range(schedule.num_ranks)]
    for stage, number in enumerate(pipeline.stages):
        programs, finish = kinds[number]
        runs = [(times[stage, kind], cost) for kind, cost in programs.items()]
        ranks[schedule.homes[stage]] += [*runs, (1, finish)]
    busiest = max(ranks, key=_seconds)
    sizes = dict(zip(batch.names, batch.sizes[0].tolist(), strict=True))
    return _together(busiest, estimated, tuple((axis, sizes[axis]) for axis in where.active))


def _seconds(runs: Sequence[_Run]) -> float:
    return sum(
        times * sum(piece.seconds for piece in (*cost.collectives, *cost.kernels, *cost.host))
        for times, cost in runs
    )


def _together(
    runs: Iterable[_Run], estimated: Estimated, sizes: tuple[tuple[str, int], ...]
) -> MeshCost:
    listed = tuple(runs)
    collectives = [
        replace(
            collective,
            count=times * collective.count,
            latency_s=times * collective.latency_s,
            ici_s=times * collective.ici_s,
            dcn_s=times * collective.dcn_s,
        )
        for times, cost in listed
        for collective in cost.collectives
    ]
    kernels = [
        replace(
            kernel,
            count=times * kernel.count,
            matmul_s=times * kernel.matmul_s,
            ideal_s=times * kernel.ideal_s,
            memory_s=times * kernel.memory_s,
            ring_s=times * kernel.ring_s,
            reread_s=times * kernel.reread_s,
            overhead_s=times * kernel.overhead_s,
        )
        for times, cost in listed
        for kernel in cost.kernels
    ]
    copies = [
        replace(copy, count=times * copy.count, seconds=times * copy.seconds)
        for times, cost in listed
        for copy in cost.host
    ]
    worst = max((cost for _, cost in listed), key=lambda cost: cost.peak_temporary_bytes)
    uncounted = dict.fromkeys(one for _, cost in listed for one in cost.uncounted)
    return MeshCost(
        sizes=sizes,
        collectives=tuple(sorted(collectives, key=lambda collective: -collective.seconds)),
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        peak_temporary_bytes=worst.peak_temporary_bytes,
        peak_source=worst.peak_source,
        # The rest of the estimated memory is kept from one program to the next.
        argument_bytes=max(estimated.memory_bytes - worst.peak_temporary_bytes, 0.0),
        output_bytes=0.0,
        alias_bytes=0.0,
        uncounted=tuple(uncounted),
        host=tuple(sorted(copies, key=lambda copy: -copy.seconds)),
        platform=worst.platform,
        findings=tuple(dict.fromkeys(one for _, cost in listed for one in cost.findings)),
    )


_CLOSEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The data that estimates are made from.

    Attributes:
      kept: propagations of the step.
      hardware: the devices, with the layouts of the ICI shapes in question.
      command: the command that makes missing propagations.
    """

    kept: Sequence[StoredPropagation]
    hardware: HardwareModel
    command: str


def explained(plan: Plan, ground: Ground, candidate: Candidate | None) -> Explained:
    """Breaks one plan down.

    Args:
      candidate: the plan's outcomes in the study, beyond the estimate.

    Raises:
      UsageError: the study has no propagation for its set of active axes.
    """
    found = propagation_for(plan, ground.kept)
    if found is None:
        raise UsageError(
            f"the study holds no terms for `{plan}`: its estimate was not reached, or failed",
            hint=f"run its search again: {ground.command}"
            if ground.command
            else "run its search again",
        )
    batch, hardware, terms = batch_of([plan]), ground.hardware, found.terms
    # Without guards: a mesh that has only terms of other sizes is priced by these.
    if found.pipeline is not None:
        pipeline = pipeline_under_options(found.pipeline, plan.compiler_options)
        prices = price_pipeline_terms(pipeline, _unguarded(terms), batch, hardware=hardware)
        estimated = prices.estimated(0)
        cost = break_down_pipeline(pipeline, terms, estimated, batch, hardware=hardware)
    else:
        estimated = estimate_of(plan, terms, hardware)
        terms = under_options(terms, plan.compiler_options)
        cost = break_down(terms, batch, routes_of=hardware.routes, speeds=hardware.speeds)
    return Explained(
        plan=plan,
        cost=cost,
        estimated=estimated,
        compiled=_compiled(candidate),
        measured=_measured(candidate),
        failure=reason(candidate) if candidate is not None else "",
        is_borrowed=not _holds(terms, plan.sizes),
        placement=axes_in_words(plan.axes, hardware.fabric, hardware.layouts),
    )


class DamagedTerms(UsageError):
    """The terms that a study keeps read well, but nothing can be calculated from them."""


@contextmanager
def stored_terms(folder: Path) -> Generator[None]:
    """Names the terms of a study as damaged if a calculation with them fails.

    Whoever can write into the folder of a study can write terms that are read without an error, and
    that fit neither its plans nor each other.

    Args:
      folder: of the study.

    Raises:
      DamagedTerms: instead of the exception that such a calculation raises.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            yield
    except AutomeshError:
        raise
    except DAMAGE as error:
        raise DamagedTerms(
            f"the terms of the study in `{folder}` are damaged: {reason_of(error)}",
            hint=f"delete `{folder / TERMS}`, and run its search again, which makes them anew",
        ) from error


def estimate_of(plan: Plan, terms: Terms, hardware: HardwareModel) -> Estimated:
    """Returns the price of a plan by terms that are assumed to hold for it.

    Args:
      hardware: the devices, at least with the layout of the plan's ICI shape.
    """
    terms = under_options(terms, plan.compiler_options)
    return price({terms.active: _unguarded(terms)}, batch_of([plan]), hardware=hardware).estimated(
        0
    )


def propagation_for(plan: Plan, kept: Iterable[StoredPropagation]) -> Propagation | None:
    """Returns the propagation from which the estimate of a plan is made, the most exact one.

    One that was made at the plan's own sizes is preferred, then one that holds there, then one of
    other sizes; for pipelines it must have the same number of ranks.
    """
    active = tuple(axis.name for axis in plan.axes if axis.size > 1)
    mine = [
        one.propagation
        for one in kept
        if (one.job.mapping, one.job.knobs) == plan.call
        and one.propagation.terms.active == active
        and _is_as_long(plan, one.propagation)
    ]

    def exactness(found: Propagation) -> tuple[bool, bool]:
        at_own_sizes = all(plan.sizes[axis] == size for axis, size in found.terms.sampled)
        return at_own_sizes, _holds(found.terms, plan.sizes)

    return max(mine, key=exactness, default=None)


def _is_as_long(plan: Plan, found: Propagation) -> bool:
    pipeline = found.pipeline
    return pipeline is None or pipeline.schedule.num_ranks == plan.sizes[pipeline.axis]


def _holds(terms: Terms, sizes: Mapping[str, int]) -> bool:
    row = np.array([[sizes[axis] for axis in terms.active]], np.int64)
    return bool(holds(terms, terms.active, row)[0])


def _unguarded(terms: Terms) -> Terms:
    return replace(terms, guards=(), fixed=())


def _compiled(candidate: Candidate | None) -> Compiled | None:
    if candidate is None:
        return None
    found = candidate.outcome if isinstance(candidate.outcome, Compiled) else candidate.compiled
    # A program that was compiled at low effort would not run in this form.
    return found if found is not None and found.effort == "default" else None


def _measured(candidate: Candidate | None) -> Measured | None:
    outcome = candidate.outcome if candidate is not None else None
    return outcome if isinstance(outcome, Measured) else None


def find_plan(text: str, plans: Sequence[Plan], *, num_devices: int) -> tuple[Plan, str]:
    """Finds the plan that a user names by a mesh, with or without knobs.

    Args:
      text: `dp:2,tp:4`, or `fsdp:-1 remat=full`.
      plans: the plans to choose from, the fastest first.

    Returns:
      The fastest plan with that mesh and these settings, and a notice if there were several.

    Raises:
      UsageError: not a mesh of these devices, or none of the plans.
    """
    mesh, *settings = text.split() or [""]
    axes = parse_mesh(
        mesh,
        [axis.name for axis in plans[0].axes],
        num_devices=num_devices,
        num_granules=plans[0].num_granules,
    )
    of_mesh = [plan for plan in plans if plan.axes == axes]
    if not of_mesh:
        near = ", ".join(f"`{one}`" for one in _closest(axes, plans))
        raise UsageError(
            f"the mesh `{format_mesh(axes)}` is none of the {_meshes(plans)} that are legal here",
            hint=f"the closest that are: {near}",
        )
    found = [plan for plan in of_mesh if _matches(plan, settings)]
    if not found:
        there = ", ".join(f"`{' '.join(str(plan).split()[1:])}`" for plan in of_mesh[:_CLOSEST])
        raise UsageError(
            f"no plan of the mesh `{mesh}` has the settings `{' '.join(settings)}`",
            hint=f"there are for example {there}",
        )
    notice = (
        f"{found[0]} is one of {count(len(found), 'plan')} with that mesh: knobs after the mesh, "
        "as here, choose another"
    )
    return found[0], notice if len(found) > 1 else ""


def _meshes(plans: Sequence[Plan]) -> str:
    return count(len({plan.axes for plan in plans}), "mesh", "meshes")


def _matches(plan: Plan, settings: Sequence[str]) -> bool:
    mine = {format_setting(*setting) for setting in plan.settings}
    return all(setting in mine for setting in settings)


def _closest(axes: Sequence[MeshAxis], plans: Sequence[Plan]) -> list[str]:
    """Returns the meshes that differ least, by the factors that move between axes."""

    def distance(plan: Plan) -> float:
        return sum(
            abs(math.log2(one.ici / other.ici)) + abs(math.log2(one.dcn / other.dcn))
            for one, other in zip(plan.axes, axes, strict=True)
        )

    meshes = dict.fromkeys(plan.mesh for plan in sorted(plans, key=distance))
    return list(meshes)[:_CLOSEST]
