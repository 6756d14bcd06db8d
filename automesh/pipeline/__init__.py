"""Pipelines: schedules as data, checked and simulated, and their runtime on submeshes.

Importing it loads no jax: the half that runs pipelines is a plug-in, which is loaded
when one of its names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from automesh.pipeline.actions import Action, ActionKind, format_actions, parse_actions
from automesh.pipeline.catalogue import SCHEDULES, find_refusal, make_schedule
from automesh.pipeline.costs import StageCost
from automesh.pipeline.draw_svg import draw_svg
from automesh.pipeline.draw_text import draw_text
from automesh.pipeline.schedule import (
    Schedule,
    check_actions,
    find_needs,
    order_actions,
    parse_schedule,
)
from automesh.pipeline.simulate import (
    Held,
    Simulated,
    Span,
    Transfer,
    find_makespans,
    simulate,
    steady_step_s,
)
from automesh.plugins.pipelines import find_pipelines

if TYPE_CHECKING:
    from automesh_pipeline.runtime.compiled import CompiledPipeline
    from automesh_pipeline.runtime.mesh import MpmdMesh
    from automesh_pipeline.runtime.microbatching import Microbatched, accumulate, microbatch
    from automesh_pipeline.runtime.parallel import Parallelized, parallelize
    from automesh_pipeline.runtime.split.chain import chain, repeat_layer, split_layers
    from automesh_pipeline.runtime.split.marks import register_task, stage_boundary, task
    from automesh_pipeline.runtime.stage_costs import measure_costs
    from automesh_pipeline.runtime.training import Optimizer, TrainState, TrainStep, train_step

# Names of what runs pipelines, which is a plug-in.
_RUNTIME = (
    "CompiledPipeline",
    "Microbatched",
    "MpmdMesh",
    "Optimizer",
    "Parallelized",
    "TrainState",
    "TrainStep",
    "accumulate",
    "chain",
    "measure_costs",
    "microbatch",
    "parallelize",
    "register_task",
    "repeat_layer",
    "split_layers",
    "stage_boundary",
    "task",
    "train_step",
)

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "CompiledPipeline",
    "Held",
    "Microbatched",
    "MpmdMesh",
    "Optimizer",
    "Parallelized",
    "Schedule",
    "Simulated",
    "Span",
    "StageCost",
    "TrainState",
    "TrainStep",
    "Transfer",
    "accumulate",
    "chain",
    "check_actions",
    "draw_svg",
    "draw_text",
    "find_makespans",
    "find_needs",
    "find_refusal",
    "format_actions",
    "make_schedule",
    "measure_costs",
    "microbatch",
    "order_actions",
    "parallelize",
    "parse_actions",
    "parse_schedule",
    "register_task",
    "repeat_layer",
    "simulate",
    "split_layers",
    "stage_boundary",
    "steady_step_s",
    "task",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name in _RUNTIME:
        return find_pipelines(f"`automesh.pipeline.{name}`").public(name)
    raise AttributeError(f"module `automesh.pipeline` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
