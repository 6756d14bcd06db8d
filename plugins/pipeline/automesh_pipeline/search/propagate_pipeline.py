"""Makes the terms of a pipeline: each program of its stages is a step (jax).

Equal stages share their terms: with equal layers only the first, one in the middle and the last
differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from automesh.cost.pipeline.terms import PipelineTerms, StageTerms, text_of_schedule
from automesh.cost.terms import Monomial, Sum, Terms
from automesh.ir.graph import added
from automesh.mesh.axes import MeshAxis
from automesh.mesh.layout.shardings import axes_of_entry
from automesh.pipeline.actions import KIND_WORDS, ActionKind
from automesh.program.nouns import Propagation
from automesh.program.script.build import Built
from automesh.program.script.contexts import Ambient, entered
from automesh.program.script.workload import Workload
from automesh.sharding.programs import Programs, Sizes
from automesh.sharding.propagate import propagate
from automesh_pipeline.runtime.split.arguments import Struct
from automesh_pipeline.runtime.split.parts import Parts
from automesh_pipeline.runtime.stages.stage import (
    Stage,
    StageUpdate,
    given_stage,
    shardings_of,
)
from automesh_pipeline.runtime.training import TrainStep
from automesh_pipeline.search.lower import pipeline_of

_Program = ActionKind | Literal["finish"]
_Whole = tuple[TrainStep, Parts, Hashable]  # the step, its stages, and the arguments of `build`
_FINISH: _Program = "finish"
_KEPT = 4  # number of meshes whose stages are cached: those of one job


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenStage:
    """A stage that is not compiled.

    It has the shardings that the user gave; propagation chooses the others, as the compiler does.

    Attributes:
      update: the update of the parameters that it keeps.
      state: the optimizer's state for these parameters.
      call: the arguments of `build` for this step.
    """

    stage: Stage
    update: StageUpdate
    state: Any
    call: Hashable

    def built(self, program: _Program) -> Built:
        """Makes one program of the stage into the step of a workload."""
        step, args = self._finish() if program == "finish" else self.stage.action(program)
        return Built(
            mesh=self.stage.mesh,
            axis_types=(),
            workload=Workload(step, args),
            ambient=Ambient(mesh=self.stage.mesh, call=self.call),
        )

    def _finish(self) -> tuple[Any, tuple[Any, ...]]:
        """Makes the program that computes new parameters from the sums, with the norm over all
        stages."""
        stage, update = self.stage, self.update
        params, sums = update.likes, stage.owned(stage.sums)

        def finish(params: Any, sums: Any, state: Any, norm: Any) -> Any:
            gradients, squares = stage.finish(sums, ((),) * len(sums))
            return *update.update(params, gradients, state, norm), squares

        shardings = (*shardings_of((params, self.state)), None)
        jitted = jax.jit(finish, donate_argnums=(0, 2), out_shardings=shardings)
        return jitted, (params, sums, self.state, Struct((), jnp.float32))

    def signature(self) -> tuple[object, ...]:
        """Returns a key that equal stages share."""
        stage, function = self.stage, self.stage.function
        arrays = (stage.params, stage.batch, stage.inputs, stage.gradients, self.state)
        return (
            str(function.part.program),
            function.residuals,
            function.is_last,
            function.with_gradient,
            function.outputs_with_gradient,
            stage.owned(range(len(stage.params))),
            *(tuple(map(_described, jax.tree.leaves(array))) for array in arrays),
        )


def _given_stage(step: TrainStep, parts: Parts, number: int, call: Hashable) -> _GivenStage:
    stage = given_stage(parts, number)
    update = StageUpdate(
        parts=parts,
        number=number,
        likes=stage.owned(stage.params),
        optimizer=step.optimizer,
        clip_norm=step.clip_norm,
    )
    return _GivenStage(stage=stage, update=update, state=update.state(), call=call)


def _described(one: Any) -> tuple[object, ...]:
    spec = one.sharding.spec if isinstance(one.sharding, NamedSharding) else None
    return (one.shape, str(one.dtype), spec)


def _bytes_of(structs: Iterable[Any]) -> Sum:
    """Counts the bytes of arrays on one device, with the given shardings."""
    return added(
        *(
            Monomial(
                coefficient=float(math.prod(struct.shape) * struct.dtype.itemsize),
                powers=tuple((axis, -1) for axis in sorted(_axes(struct.sharding))),
            )
            for struct in structs
        )
    )


def _axes(sharding: Any) -> list[str]:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return [axis for entry in spec for axis in axes_of_entry(entry)]


@dataclass(slots=True, kw_only=True)
class PropagatedStages:
    """One pipeline at one choice of knobs and one number of ranks; a worker keeps it between jobs.

    Attributes:
      build: the step on a mesh of these axes.
      axis: the pipeline's mesh axis.
      ranks: number of parts of the mesh.
      axis_names: the axes of the whole mesh, in order.
      platform: see `Programs`.
    """

    build: Callable[[Sequence[MeshAxis]], Built]
    axis: str
    ranks: int
    axis_names: tuple[str, ...]
    platform: str
    _known: dict[tuple[int, ...], _Whole] = field(default_factory=dict[tuple[int, ...], _Whole])
    _programs: dict[tuple[int, _Program], Programs] = field(
        default_factory=dict[tuple[int, _Program], Programs]
    )

    def programs(self, number: int, kind: _Program, names: tuple[str, ...]) -> Programs:
        """Returns one program of a stage at all sizes.

        Args:
          names: the axes of the submeshes.
        """
        key = number, kind
        if key not in self._programs:
            self._programs[key] = Programs(
                build=lambda axes: self.stage(
                    {axis.name: axis.size for axis in axes}, number
                ).built(kind),
                axis_names=names,
                platform=self.platform,
                # Many programs share their shardings: one of them is partitioned at a second size.
                verified=len(self._programs),
            )
        return self._programs[key]

    def stage(self, sizes: dict[str, int], number: int) -> _GivenStage:
        """Returns a stage on a submesh of these sizes."""
        step, parts, call = self.split(sizes)
        return _given_stage(step, parts, number, call)

    def split(self, sizes: dict[str, int]) -> _Whole:
        """Returns the step on submeshes of these sizes, and its stages."""
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

    def propagate(
        self,
        *,
        sizes: Sizes,
        probes: Sequence[Sizes],
        exact: bool,
        enter: Callable[[str], None],
    ) -> Propagation:
        """See `propagate_pipeline`."""
        return propagate_pipeline(self, sizes=sizes, probes=probes, exact=exact, enter=enter)


def propagate_pipeline(
    stages: PropagatedStages,
    *,
    sizes: Sizes,
    probes: Sequence[Sizes],
    exact: bool = False,
    enter: Callable[[str], None],
) -> Propagation:
    """Makes the terms of a pipeline for the axes in `sizes`, which include the pipeline's.

    Args:
      probes, exact, enter: see `propagate`.

    Raises:
      StepRefused, Exception: see `propagate`.
    """
    inside, *tried = (
        tuple(one for one in each if one[0] != stages.axis) for each in (sizes, *probes)
    )
    enter("build")
    step, parts, call = stages.split(dict(inside))
    every = [_given_stage(step, parts, number, call) for number in range(parts.schedule.num_stages)]
    signatures = [stage.signature() for stage in every]
    distinct = list(dict.fromkeys(signatures))
    firsts = [signatures.index(one) for one in distinct]
    wanted = {(action.stage, action.kind) for _, action in parts.schedule.order}
    made: dict[tuple[int, _Program], Propagation] = {}
    for first in firsts:
        skips = parts.functions[first].skips_forward
        kinds: list[_Program] = [kind for kind in KIND_WORDS if (first, kind) in wanted]
        kinds = [kind for kind in kinds if kind != "F" or not skips]
        kinds.append(_FINISH)
        for kind in kinds:
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
    return tuple(probe for probe in dict.fromkeys(probes) if probe != sizes)


def _stage_terms(
    given: _GivenStage,
    made: Mapping[tuple[int, _Program], Propagation],
    sent: Mapping[int, Sequence[Monomial]],
) -> StageTerms:
    """Makes one stage's terms.

    Args:
      made: the terms of each program.
      sent: the bytes that the forward pass of each stage returns.
    """
    stage, function, split = given.stage, given.stage.function, given.stage.parts.split

    def bytes_of_value(value: int) -> Monomial:
        producer = split.values[value].producer
        return sent[producer][split.stages[producer].outputs.index(value)]

    inputs = [bytes_of_value(value) for value in function.part.inputs]
    outputs = sent.get(stage.number, ())
    own = 0 if function.is_last else len(function.part.outputs)
    kinds: tuple[ActionKind, ...] = tuple(
        kind for kind in KIND_WORDS if (stage.number, kind) in made
    )
    return StageTerms(
        programs=tuple((kind, made[stage.number, kind].terms) for kind in kinds),
        finish=made[stage.number, _FINISH].terms,
        params_bytes=_bytes_of(stage.params),
        sums_bytes=_bytes_of(stage.sums),
        state_bytes=_bytes_of(jax.tree.leaves(given.state)),
        inputs_bytes=tuple(inputs),
        saved_bytes=tuple(outputs[len(stage.outputs) :]),
        outputs_bytes=tuple(outputs[:own]),
        gradients_bytes=tuple(
            each for each, has in zip(inputs, function.with_gradient, strict=True) if has
        ),
    )


def _joined(
    pipeline: PipelineTerms, found: Sequence[Propagation], sizes: Sizes, stages: PropagatedStages
) -> Propagation:
    """Joins the propagations of all programs. The joined terms only say for which sizes the terms
    of all programs hold."""
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
