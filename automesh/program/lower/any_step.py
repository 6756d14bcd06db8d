"""A step as a lowered program: an ordinary step, or the pipeline of a plug-in (jax)."""

from __future__ import annotations

from automesh.plugins.pipelines import StagedProgram, pipelines_of
from automesh.program.lower.lowering import SingleProgram, lower
from automesh.program.script.build import Built

StepProgram = SingleProgram | StagedProgram


def lower_any(built: Built, *, platforms: tuple[str, ...] | None = None) -> StepProgram:
    """Traces and lowers a step, an ordinary one or a pipeline.

    Args:
      platforms: see `lower`; a pipeline's stages are lowered for the platform of their submeshes.
    """
    pipelines = pipelines_of(built.workload.step)
    return lower(built, platforms=platforms) if pipelines is None else pipelines.lower(built)
