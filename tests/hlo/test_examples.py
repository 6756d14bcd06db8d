"""The module reader on the example scripts: agreement with jaxlib, and what is counted."""

from __future__ import annotations

import functools

import pytest

from automesh.hlo import count, module_fingerprint, read_module
from automesh.outcomes import Counts
from tests.support.example_runs import AXES, build
from tests.support.hlo_oracle import assert_agrees, serialized

pytestmark = pytest.mark.slow

Sizes = tuple[tuple[str, int], ...]
CASES: dict[str, Sizes] = {
    "dense_lm": (("dp", 2), ("fsdp", 2), ("tp", 2)),
    "moe_lm": (("dp", 2), ("ep", 2), ("tp", 2)),
    "long_context": (("dp", 2), ("sp", 4)),
}


@functools.cache
def compiled(name: str, sizes: Sizes) -> bytes:
    workload = build(name, dict(sizes))
    return serialized(workload.step.lower(*workload.args).compile())


def counted(name: str, sizes: Sizes) -> Counts:
    axes = [(axis, dict(sizes).get(axis, 1)) for axis in AXES]
    return count(read_module(compiled(name, sizes)), axes)


# One at every landing, the others where there is time.
SOME = [name if name == "moe_lm" else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("name", SOME)
def test_reader_agrees_with_jaxlib_on_every_instruction(name: str) -> None:
    assert assert_agrees(compiled(name, CASES[name])) > 1000


@pytest.mark.parametrize("name", SOME)
def test_everything_in_an_example_is_counted(name: str) -> None:
    counts = counted(name, CASES[name])
    named = {one.partition(" (")[0] for one in counts.uncounted}
    # The router takes the best experts, and sums up how many tokens each has so far.
    routing = {"arithmetic of `topk`", "arithmetic of `reduce-window`"}
    assert named == (routing if name == "moe_lm" else set())
    assert counts.flops > 0
    assert counts.hbm_bytes > 0
    for collective in counts.collectives:
        sizes = dict(CASES[name])
        devices = functools.reduce(lambda n, axis: n * sizes[axis], collective.axes, 1)
        assert collective.axes
        assert collective.group_size == devices


def test_experts_are_reached_by_all_to_all_over_ep() -> None:
    kinds = {(c.kind, c.axes) for c in counted("moe_lm", CASES["moe_lm"]).collectives}
    assert ("all-to-all", ("ep",)) in kinds
    assert ("collective-permute", ("ep",)) not in kinds


def test_ring_attention_permutes_over_sp_alone() -> None:
    permutes = [
        c
        for c in counted("long_context", CASES["long_context"]).collectives
        if c.kind == "collective-permute"
    ]
    assert [(c.axes, c.group_size) for c in permutes] == [(("sp",), 4)]
    # Keys and values go around at least once forwards: 3 hops each.
    assert permutes[0].count >= 2 * 3


@pytest.mark.long
def test_dense_flops_are_shared_evenly() -> None:
    alone = counted("dense_lm", ())
    assert alone.collectives == ()
    assert 8 * counted("dense_lm", CASES["dense_lm"]).flops == alone.flops


@pytest.mark.long
def test_programs_of_different_examples_differ() -> None:
    prints = {module_fingerprint(read_module(compiled(n, s))) for n, s in CASES.items()}
    assert len(prints) == len(CASES)
