"""Merges the answers of a gang's processes into one (no jax)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from automesh.outcomes import Failed
from automesh.program.nouns import (
    Attachment,
    CompileAnswer,
    Inspection,
    Lowered,
    ProbeTimes,
    Traced,
    VisitAnswer,
)
from automesh.worker.protocol import Answer

_FINGERPRINT = (
    "let `build` and the step be the same on every host, whatever `jax.process_index()` says"
)


def merged_answer(
    answers: Sequence[Answer], hosts: Sequence[str], *, is_joint: bool = True
) -> Answer | Failed:
    """Merges the answers to a job that all processes of a gang did.

    The result has the time of the slowest process, and the memory of the process that needs the
    most. All other values must be equal: otherwise the processes did not do the same job.

    Args:
      answers: the answers in the order of the ranks, all of one type.
      hosts: name of each process's host.
      is_joint: False if each process ran a program of its own on one of its devices. This is the
        step on one device, with which other plans are compared; the programs differ by the number
        of the device.

    Returns:
      The answer; or a failure that names the first process that did something else.
    """
    first = answers[0]
    for rank, answer in enumerate(answers):
        if why := _difference(first, answer, is_joint=is_joint):
            return Failed(
                stage=_stage(answer),
                reason=f"{why} than rank 0 on {hosts[0]}",
                hint=_FINGERPRINT,
                where=f"rank {rank} on {hosts[rank]}",
            )
    match first:
        case VisitAnswer():
            return _slowest([one for one in answers if isinstance(one, VisitAnswer)])
        case CompileAnswer():
            found = [one for one in answers if isinstance(one, CompileAnswer)]
            hungriest = max(found, key=lambda one: one.memory.peak_bytes)
            return replace(hungriest, compile_s=max(one.compile_s for one in found))
        case ProbeTimes():
            return _slowest_points([one for one in answers if isinstance(one, ProbeTimes)])
        case _:
            return first


def _slowest(answers: Sequence[VisitAnswer]) -> VisitAnswer:
    """Takes each sample from the slowest process, since all processes begin it at the same time."""
    return replace(
        answers[0],
        samples_s=tuple(max(sample) for sample in zip(*(one.samples_s for one in answers))),
        setup_s=max(one.setup_s for one in answers),
        state_s=max(one.state_s for one in answers),
        start_s=max(one.start_s for one in answers),
        peak_bytes=max(one.peak_bytes for one in answers),
    )


def _slowest_points(answers: Sequence[ProbeTimes]) -> ProbeTimes:
    """Takes each probe from the slowest process, since the others wait for it."""
    return ProbeTimes(
        points=tuple(
            max(same, key=lambda point: point.seconds)
            for same in zip(*(one.points for one in answers))
        )
    )


def _difference(first: Answer, other: Answer, *, is_joint: bool) -> str:
    """Returns how another process's answer differs, in words; empty if it does not."""
    if type(first) is not type(other):
        return "it gave another kind of answer"
    match first, other:
        case (VisitAnswer(), VisitAnswer()):
            if is_joint and first.fingerprint != other.fingerprint:
                return "it ran another program"
            if len(first.samples_s) != len(other.samples_s):
                return "it took another number of samples"
            return "" if _same(first.losses, other.losses) else "it computed other losses"
        case (CompileAnswer() | Lowered() | Traced(), CompileAnswer() | Lowered() | Traced()):
            return "it lowered another program" if first.fingerprint != other.fingerprint else ""
        case (Inspection(), Inspection()):
            if first.source_hash != other.source_hash:
                return "it has another version of the script"
            return _versions(first, other)
        case (Attachment(), Attachment()):
            return _versions(first, other)
        case (ProbeTimes(), ProbeTimes()):
            mine, theirs = (tuple(point.probe for point in one.points) for one in (first, other))
            return "" if mine == theirs else "it measured other probes"
        case _:
            return ""


def _versions(first: Inspection | Attachment, other: Inspection | Attachment) -> str:
    mine, theirs = dict(first.versions), dict(other.versions)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            have, than = theirs.get(name, "none"), mine.get(name, "none")
            return f"it has another {name} ({have}, not {than})"
    return ""


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other)
    )


def _stage(answer: Answer) -> str:
    match answer:
        case VisitAnswer():
            return "run"
        case CompileAnswer() | Lowered() | Traced():
            return "lower"
        case _:
            return "load"
