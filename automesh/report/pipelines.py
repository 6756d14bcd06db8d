"""What the compiler and the simulator say of a pipeline's stages, in words: pure functions."""

from __future__ import annotations

from automesh.outcomes import Compiled, CompiledPipeline
from automesh.report.result import Candidate
from automesh.units import format_bytes, format_percent

_MOST = 8


def stages_of(candidate: Candidate | None) -> CompiledPipeline | None:
    """The compiled stages of a plan; None if it was not compiled, or is no pipeline."""
    if candidate is None:
        return None
    found = candidate.outcome if isinstance(candidate.outcome, Compiled) else candidate.compiled
    return found.pipeline if found is not None else None


def stage_bytes(candidate: Candidate) -> tuple[int, ...]:
    """Of each stage what its devices need, with what other stages of the rank hold there."""
    pipeline = stages_of(candidate)
    return tuple(one.peak_bytes for one in pipeline.stages) if pipeline is not None else ()


def stages_sentence(pipeline: CompiledPipeline) -> str:
    """`1f1b, 4 stages of 3.1 GiB, 2.9 GiB, ... a device by the compiler; simulated, ranks ...`."""
    sizes = [format_bytes(one.peak_bytes) for one in pipeline.stages]
    listed = ", ".join(sizes[:_MOST]) + (", ..." if len(sizes) > _MOST else "")
    if len(set(sizes)) == 1:
        listed = f"{sizes[0]} each"
    bubble = f"; simulated, ranks do nothing for {format_percent(pipeline.bubble)} of a step"
    return (
        f"{pipeline.schedule}, {len(sizes)} stages of {listed} a device by the compiler"
        f"{bubble if pipeline.bubble > 0 else ''}"
    )
