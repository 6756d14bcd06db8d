"""The object that automesh finds by the entry point of this distribution (jax)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from automesh.hardware.absent import AbsentDevices
from automesh.mesh.axes import MeshAxis
from automesh.program.script.build import Built
from automesh_pipeline.runtime.training import TrainStep
from automesh_pipeline.search.lower import StagedProgram, lower_pipeline, pipeline_of
from automesh_pipeline.search.lower_absent import lower_for_absent
from automesh_pipeline.search.propagate_pipeline import PropagatedStages

_PUBLIC = {
    "split.chain": ("chain", "repeat_layer", "split_layers"),
    "compiled": ("CompiledPipeline",),
    "split.marks": ("register_task", "stage_boundary", "task"),
    "stage_costs": ("measure_costs",),
    "mesh": ("MpmdMesh",),
    "microbatching": ("Microbatched", "accumulate", "microbatch"),
    "parallel": ("Parallelized", "parallelize"),
    "training": ("Optimizer", "TrainState", "TrainStep", "train_step"),
}


class _Pipelines:
    """`automesh.plugins.pipelines.Pipelines`."""

    def is_pipeline(self, step: object) -> bool:
        return isinstance(step, TrainStep)

    def lower(self, built: Built) -> StagedProgram:
        return lower_pipeline(built, _step(built))

    def lower_for_absent(
        self, built: Built, one: AbsentDevices
    ) -> tuple[StagedProgram, AbsentDevices]:
        return lower_for_absent(built, _step(built), one)

    def stages(
        self,
        *,
        build: Callable[[Sequence[MeshAxis]], Built],
        axis: str,
        ranks: int,
        axis_names: tuple[str, ...],
        platform: str,
    ) -> PropagatedStages:
        return PropagatedStages(
            build=build, axis=axis, ranks=ranks, axis_names=axis_names, platform=platform
        )

    def public(self, name: str) -> Any:
        for module, names in _PUBLIC.items():
            if name in names:
                return getattr(importlib.import_module(f"automesh_pipeline.runtime.{module}"), name)
        raise AttributeError(f"what runs pipelines has no name `{name}`")


def _step(built: Built) -> TrainStep:
    step = pipeline_of(built)
    if step is None:
        raise TypeError("the step is no pipeline")
    return step


PIPELINES = _Pipelines()
