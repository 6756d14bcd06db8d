"""A pipeline becomes terms: each program of its stages as a step of its own (jax).

Stages that do the same share their terms: with equal layers only the first, one in the middle and
the last differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from automesh.cost.pipeline.terms import PipelineTerms, StageTerms, text_of_schedule
from automesh.cost.terms import Monomial, Terms
from automesh.mesh.axes import MeshAxis
from automesh.pipeline.actions import KIND_WORDS, ActionKind
from automesh.pipeline.runtime.split.parts import Parts
from automesh.pipeline.runtime.training import TrainStep
from automesh.program.nouns import Propagation
from automesh.program.pipeline.recognize import pipeline_of
from automesh.program.script.build import Built
from automesh.program.script.contexts import entered
from automesh.sharding.pipeline_stages import (
    FINISH,
    Stage,
    StageProgram,
    bytes_of,
    signature_of,
    stage_of,
)
from automesh.sharding.programs import Programs, Sizes
from automesh.sharding.propagate import propagate

_Whole = tuple[TrainStep, Parts, Hashable]  # with what `build` was called with
_KEPT = 4  # meshes whose stages are kept: those of one job


@dataclass(slots=True, kw_only=True)
class Stages:
    """One pipeline at one choice of knobs and one number of ranks; a worker keeps it between jobs.

    Attributes:
      build: the step on a mesh of these axes.
      axis: that the mesh is cut along.
      ranks: into how many parts.
      axis_names: of the whole mesh, in order.
      platform: see `Programs`.
    """

    build: Callable[[Sequence[MeshAxis]], Built]
    axis: str
    ranks: int
    axis_names: tuple[str, ...]
    platform: str
    _known: dict[tuple[int, ...], _Whole] = field(default_factory=dict[tuple[int, ...], _Whole])
    _programs: dict[tuple[int, StageProgram], Programs] = field(
        default_factory=dict[tuple[int, StageProgram], Programs]
    )

    def programs(self, number: int, kind: StageProgram, names: tuple[str, ...]) -> Programs:
        """One program of a stage at all sizes.

        Args:
          names: the axes of the submeshes.
        """
        key = number, kind
        if key not in self._programs:
            self._programs[key] = Programs(
                build=lambda axes: self.stage({one.name: one.size for one in axes}, number).built(
                    kind
                ),
                axis_names=names,
                platform=self.platform,
                # Of many programs that share their shardings one is partitioned at a second size.
                verified=len(self._programs),
            )
        return self._programs[key]

    def stage(self, sizes: dict[str, int], number: int) -> Stage:
        """A stage on a submesh of these sizes."""
        step, parts, call = self.split(sizes)
        return stage_of(step, parts, number, call)

    def split(self, sizes: dict[str, int]) -> _Whole:
        """The step on submeshes of these sizes, and its stages."""
        whole = {name: sizes.get(name, 1) for name in self.axis_names} | {self.axis: self.ranks}
        key = tuple(whole.values())
        if key not in self._known:
            built = self.build([MeshAxis(name=name, ici=size) for name, size in whole.items()])
            step = pipeline_of(built)
            if step is None:
                raise TypeError("the step is a pipeline on some meshes of these ranks only")
            state, batch = built.workload.args
            with entered(built.ambient, built.workload.context):
                parts = step.parts(state.params, batch)
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = step, parts, built.ambient.call
        return self._known[key]


def propagate_pipeline(
    stages: Stages,
    *,
    sizes: Sizes,
    probes: Sequence[Sizes],
    exact: bool = False,
    enter: Callable[[str], None],
) -> Propagation:
    """The terms of a pipeline for the axes in `sizes`, that of the pipeline among them.

    Args:
      probes, exact, enter: see `propagate`.

    Raises:
      Refused, Exception: see `propagate`.
    """
    inside, *tried = (
        tuple(one for one in each if one[0] != stages.axis) for each in (sizes, *probes)
    )
    enter("build")
    step, parts, call = stages.split(dict(inside))
    every = [stage_of(step, parts, number, call) for number in range(parts.schedule.num_stages)]
    signatures = [signature_of(stage) for stage in every]
    distinct = list(dict.fromkeys(signatures))
    firsts = [signatures.index(one) for one in distinct]
    wanted = {(action.stage, action.kind) for _, action in parts.schedule.order}
    made: dict[tuple[int, StageProgram], Propagation] = {}
    for first in firsts:
        skips = parts.functions[first].skips_forward
        kinds = [kind for kind in KIND_WORDS if (first, kind) in wanted]
        for kind in (*(kind for kind in kinds if kind != "F" or not skips), FINISH):
            made[first, kind] = propagate(
                stages.programs(first, kind, tuple(parts.meshes[first].axis_names)),
                sizes=inside,
                probes=_distinct(tried, inside),
                exact=exact,
                enter=enter,
                with_results=kind == "F",
            )
    of_stages = [distinct.index(signature) for signature in signatures]
    sent = {
        number: made[firsts[kind], "F"].results
        for number, kind in enumerate(of_stages)
        if (firsts[kind], "F") in made
    }
    pipeline = PipelineTerms(
        axis=stages.axis,
        schedule=text_of_schedule(parts.schedule),
        kinds=tuple(_stage_terms(every[first], made, sent) for first in firsts),
        stages=tuple(of_stages),
    )
    return _joined(pipeline, [*made.values()], sizes, stages)


def _distinct(probes: Sequence[Sizes], sizes: Sizes) -> tuple[Sizes, ...]:
    return tuple(one for one in dict.fromkeys(probes) if one != sizes)


def _stage_terms(
    stage: Stage,
    made: Mapping[tuple[int, StageProgram], Propagation],
    sent: Mapping[int, Sequence[Monomial]],
) -> StageTerms:
    """One stage's terms.

    Args:
      made: of each program.
      sent: of each stage the bytes of what its forward pass gives.
    """
    function, split = stage.parts.functions[stage.number], stage.parts.splits[stage.number]

    def bytes_of_value(value: int) -> Monomial:
        producer = split.values[value].producer
        return sent[producer][split.stages[producer].outputs.index(value)]

    inputs = [bytes_of_value(value) for value in function.part.inputs]
    given = sent.get(stage.number, ())
    own = 0 if function.is_last else len(function.part.outputs)
    kinds: tuple[ActionKind, ...] = tuple(
        kind for kind in KIND_WORDS if (stage.number, kind) in made
    )
    return StageTerms(
        programs=tuple((kind, made[stage.number, kind].terms) for kind in kinds),
        finish=made[stage.number, FINISH].terms,
        params_bytes=bytes_of(stage.params),
        sums_bytes=bytes_of(stage.sums),
        state_bytes=bytes_of(jax.tree.leaves(stage.state)),
        inputs_bytes=tuple(inputs),
        saved_bytes=tuple(given[len(stage.outputs) :]),
        outputs_bytes=tuple(given[:own]),
        gradients_bytes=tuple(
            each for each, has in zip(inputs, function.with_gradient, strict=True) if has
        ),
    )


def _joined(
    pipeline: PipelineTerms, found: Sequence[Propagation], sizes: Sizes, stages: Stages
) -> Propagation:
    """One answer; its terms say where those of all programs hold, and nothing else."""
    active = tuple(axis for axis, _ in sizes)
    each = [one.terms for one in found]
    fixed = {stages.axis, *(axis for one in each for axis in one.fixed)}
    limits: dict[str, int] = {}
    for one in each:
        for axis, limit in one.limits:
            limits[axis] = min(limit, limits.get(axis, limit))
    frame = Terms(
        active=active,
        sampled=tuple(sizes),
        platform=stages.platform,
        regions=(),
        kernels=(),
        collectives=(),
        points=(),
        argument_bytes=(),
        output_bytes=(),
        alias_bytes=(),
        guards=tuple(dict.fromkeys(guard for one in each for guard in one.guards)),
        uncounted=tuple(dict.fromkeys(what for one in each for what in one.uncounted)),
        fixed=tuple(axis for axis in active if axis in fixed),
        limits=tuple(limits.items()),
    )
    ranks = (stages.axis, stages.ranks)
    return Propagation(
        terms=frame,
        failed_probes=tuple(
            dict.fromkeys(
                _with(ranks, probe, active) for one in found for probe in one.failed_probes
            )
        ),
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
        lower_s=sum(one.lower_s for one in found),
        propagate_s=sum(one.propagate_s for one in found),
        pipeline=pipeline,
    )


def _with(ranks: tuple[str, int], probe: Sizes, active: tuple[str, ...]) -> Sizes:
    known = dict([ranks, *probe])
    return tuple((axis, known[axis]) for axis in active)
