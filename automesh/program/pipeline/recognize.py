"""Where a step is recognised as a pipeline (jax)."""

from __future__ import annotations

from automesh.pipeline.runtime.training import TrainStep
from automesh.program.lower.lowered import canonical_lines
from automesh.program.lower.lowering import Program, lower
from automesh.program.lower.program_text import TextLine
from automesh.program.pipeline.lower import PipelineProgram, lower_pipeline
from automesh.program.script.build import Built


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


def lines_of(program: Program | PipelineProgram) -> tuple[TextLine, ...]:
    """All that a fingerprint of the program is made from, in words, line by line."""
    if isinstance(program, Program):
        return canonical_lines(program.lowered)
    forward = [line for one in program.lowered.forward for line in canonical_lines(one)]
    rest = f"{program.lowered.schedule}\n{program.lowered.update_text}".splitlines()
    return (*forward, *(TextLine(text=line, place="") for line in rest))
