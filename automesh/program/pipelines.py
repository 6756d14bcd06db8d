"""Where a step is recognised as a pipeline (jax)."""

from __future__ import annotations

from automesh.pipeline.runtime.training import TrainStep
from automesh.program.building import Built
from automesh.program.lowering import Program, lower
from automesh.program.pipelined import PipelineProgram, lower_pipeline


def pipeline_of(built: Built) -> TrainStep | None:
    """The pipeline that a workload's step is; None if it is an ordinary step."""
    step = built.workload.step
    return step if isinstance(step, TrainStep) else None


def lower_any(
    built: Built, *, platforms: tuple[str, ...] | None = None
) -> Program | PipelineProgram:
    """Traces and lowers a step, whichever it is.

    Args:
      platforms: see `lower`; a pipeline's stages are lowered for the platform of their submeshes.
    """
    step = pipeline_of(built)
    return lower(built, platforms=platforms) if step is None else lower_pipeline(built, step)
