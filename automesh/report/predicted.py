"""The sentences that follow from a replayed program: pure functions."""

from __future__ import annotations

from automesh.outcomes import Compiled, Outcome, PipelineOutcome, ReplayOutcome
from automesh.report.result import Candidate, SearchResult
from automesh.units import format_bytes, format_percent, format_seconds

_COMMUNICATION = ("ici", "dcn", "host")
_LEAST = 5e-4  # smaller parts of a step would print as 0.0 %
_MOST = 3


def replay_of(outcome: Outcome) -> ReplayOutcome | None:
    """Returns the replay that a predicted time comes from; None if there is none."""
    return outcome.replay if isinstance(outcome, Compiled) else None


def exposed_s(replay: ReplayOutcome) -> float:
    """Returns the seconds of a step in which the cores wait for communication."""
    return sum(seconds for _, seconds in _exposed(replay))


def exposed_sentence(replay: ReplayOutcome) -> str:
    """Says `1.20 ms of the step waits for communication (ici tp 0.90 ms, ...), of 4.30 ms of it in
    all`.

    Communication in all is the sum of every transfer's time as if it had its links to itself.
    """
    total_s = sum(seconds for _, seconds in replay.communication_s)
    waits = [(cause, seconds) for cause, seconds in _exposed(replay) if seconds > 0]
    if not total_s:
        return "there is no communication"
    said = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in waits[:_MOST])
    more = ", ..." if len(waits) > _MOST else ""
    in_all = f"{format_seconds(total_s)} of communication"
    if not waits or exposed_s(replay) < _LEAST * replay.step_s:
        return f"all of {in_all} is hidden behind other work"
    part = format_percent(exposed_s(replay) / replay.step_s)
    return (
        f"{format_seconds(exposed_s(replay))} ({part} of the step) of {in_all} is exposed: "
        f"{said}{more}"
    )


def memory_sentence(result: SearchResult, best: Candidate) -> str:
    """Says `12.3 GiB of 15.8 GiB a device, of which 256 MiB stay in reserve`; empty if unknown."""
    devices = result.facts.devices
    if not best.peak_bytes or not devices.memory_bytes:
        return ""
    text = f"{format_bytes(best.peak_bytes)} of {format_bytes(devices.memory_bytes)} a device"
    if devices.reserve_bytes:
        text += f", of which {format_bytes(devices.reserve_bytes)} stay in reserve"
    return text


def predicted_lines(result: SearchResult, best: Candidate | None) -> list[tuple[str, str]]:
    """Lists predictions for the best plan other than its time: a label and a sentence each."""
    replay = replay_of(best.outcome) if best is not None else None
    if best is None or replay is None:
        return []
    mfu = f"{format_percent(replay.mfu)} of the chip's peak" if replay.mfu > 0 else ""
    return [
        ("exposed", exposed_sentence(replay)),
        ("memory", memory_sentence(result, best)),
        ("mfu", mfu),
    ]


def _exposed(replay: ReplayOutcome) -> list[tuple[str, float]]:
    return [
        (cause, seconds)
        for cause, seconds in replay.causes
        if cause.partition(" ")[0] in _COMMUNICATION
    ]


# What the compiler and the simulator say of a pipeline's stages, in words: pure functions.

_MOST_STAGES = 8


def stages_of(candidate: Candidate | None) -> PipelineOutcome | None:
    """Returns the compiled stages of a plan; None if it was not compiled, or is no pipeline."""
    if candidate is None:
        return None
    found = candidate.outcome if isinstance(candidate.outcome, Compiled) else candidate.compiled
    return found.pipeline if found is not None else None


def stage_bytes(candidate: Candidate) -> tuple[int, ...]:
    """Returns the peak bytes on the devices of each stage, other stages of the rank included."""
    pipeline = stages_of(candidate)
    return tuple(stage.peak_bytes for stage in pipeline.stages) if pipeline is not None else ()


def stages_sentence(pipeline: PipelineOutcome) -> str:
    """Says `1f1b, 4 stages of 3.1 GiB, 2.9 GiB, ... a device by the compiler; simulated, ranks
    ...`."""
    sizes = [format_bytes(stage.peak_bytes) for stage in pipeline.stages]
    listed = ", ".join(sizes[:_MOST_STAGES]) + (", ..." if len(sizes) > _MOST_STAGES else "")
    if len(set(sizes)) == 1:
        listed = f"{sizes[0]} each"
    bubble = f"; simulated, ranks do nothing for {format_percent(pipeline.bubble)} of a step"
    return (
        f"{pipeline.schedule}, {len(sizes)} stages of {listed} a device by the compiler"
        f"{bubble if pipeline.bubble > 0 else ''}"
    )
