"""The compiled truth: which meshes, and what is kept of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.truth import command as truth
from benchmarks.truth.command import Case, Truth, cases, factorizations


def test_all_factorizations_over_three_axes():
    assert len(factorizations(8, 3)) == 10
    assert len(factorizations(16, 3)) == 15
    every = cases()
    assert len(set(every)) == len(every)
    assert len(every) == 25 * len(truth.LANGUAGE_MODELS) + 10 * (
        len(truth.OTHER_STEPS) + len(truth.KINDS)
    )
    for case in every:
        assert math.prod(size for _, size in case.sizes) in (8, 16)
        assert {a for a, size in case.sizes if size > 1} <= set(truth.CHOSEN[case.example])


SMALL = Case(
    example="dense_lm",
    size="tiny",
    sizes=(("dp", 1), ("fsdp", 2), ("ep", 1), ("tp", 1), ("sp", 1)),
)


@pytest.mark.long
def test_a_mesh_is_compiled_once_and_then_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(truth, "CACHE", tmp_path)
    said: list[str] = []
    first = truth.truths([SMALL], say=said.append)[SMALL]
    assert isinstance(first, Truth), first
    assert len(said) == 2
    assert first.flops == first.partitioned.flops > 0
    assert {one.axes for one in first.partitioned.collectives} == {("fsdp",)}
    memory = first.memory
    assert memory.peak_bytes == (
        memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temporary_bytes
    )

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert truth.truths([SMALL], say=said.append)[SMALL] == first
    assert len(said) == 2


def test_a_worker_that_fails_is_an_answer_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(truth, "CACHE", tmp_path)
    run = subprocess.run
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda _, **fields: run([sys.executable, "-c", "raise SystemExit('no luck')"], **fields),
    )
    answer = truth.truths([SMALL], say=lambda _: None)[SMALL]
    assert answer == "the worker ended with 1: no luck"
    assert not list(tmp_path.iterdir())


def test_a_case_survives_the_way_to_the_worker():
    from benchmarks.truth.worker import _case

    case = Case(example="moe_lm", sizes=SMALL.sizes, knobs=(("remat", "dots"),))
    assert _case(json.loads(json.dumps(asdict(case)))) == case
