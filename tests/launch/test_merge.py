"""Answers of the processes of a gang as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automesh.launch.merge import merged_answer
from automesh.outcomes import Counts, Failed, Memory
from automesh.program.nouns import CompileAnswer, Lowered, VisitAnswer

HOSTS = ("a", "b")
VISIT = VisitAnswer(
    samples_s=(0.1, 0.3),
    losses=(1.0, float("nan")),
    loss_dtype="float32",
    values="user",
    setup_s=1.0,
    peak_bytes=10,
    fingerprint="f",
)


def compiled(peak: int, compile_s: float, fingerprint: str = "f") -> CompileAnswer:
    memory = Memory(
        argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=peak, peak_bytes=peak
    )
    counts = Counts(flops=1, hbm_bytes=1, collectives=())
    return CompileAnswer(fingerprint=fingerprint, memory=memory, counts=counts, compile_s=compile_s)


def why(*answers: Any) -> tuple[str, str]:
    failed = merged_answer(answers, HOSTS)
    assert isinstance(failed, Failed)
    return failed.reason, failed.where


def test_a_sample_is_as_slow_as_the_slowest_rank() -> None:
    other = replace(VISIT, samples_s=(0.2, 0.2), setup_s=3.0, peak_bytes=20)
    merged = merged_answer([VISIT, other], HOSTS)
    assert isinstance(merged, VisitAnswer)
    assert (merged.samples_s, merged.setup_s, merged.peak_bytes) == ((0.2, 0.3), 3.0, 20)
    assert merged.losses[0] == 1.0


def test_the_hungriest_and_slowest_compile_counts() -> None:
    merged = merged_answer([compiled(5, 2.0), compiled(7, 1.0)], HOSTS)
    assert isinstance(merged, CompileAnswer)
    assert (merged.memory.peak_bytes, merged.compile_s) == (7, 2.0)


def test_who_did_something_else_is_named() -> None:
    where = "rank 1 on b"
    than = "than rank 0 on a"
    assert why(VISIT, replace(VISIT, fingerprint="g")) == (f"it ran another program {than}", where)
    assert why(VISIT, replace(VISIT, losses=(1.0, 2.0))) == (
        f"it computed other losses {than}",
        where,
    )
    fewer = replace(VISIT, samples_s=(0.1,))
    assert why(VISIT, fewer) == (f"it took another number of samples {than}", where)
    other = replace(VISIT, fingerprint="g")
    assert merged_answer([VISIT, other], HOSTS, is_joint=False) == VISIT
    other = compiled(5, 2.0, "g")
    assert why(compiled(5, 2.0), other) == (f"it lowered another program {than}", where)
    assert why(compiled(5, 2.0), Lowered(fingerprint="f"))[0].startswith("it gave another kind")
