"""Steps of `benchmarks.lint`: broken ones are named at their line, mended twins are silent."""

from __future__ import annotations

from typing import Any

import pytest

from automesh.cost.terms import Terms, value_of
from automesh.ir.findings.variants import variants
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from benchmarks.lint.samples import Sample, samples

# One for each way in which a rule can see it; the benchmark runs all of them.
STEPS = {
    "best_of_the_vocabulary": "cpu",
    "embedding_without_a_rule": "cpu",
    "gradients_whole_for_their_norm": "tpu",
    "grouped_convolution": "cpu",
    "nine_heads": "gpu",
    "pmean_in_float32": "gpu",
    "pmean_of_every_microbatch": "tpu",
    "reshard_of_explicit_axes": "cpu",
    "stacks_of_a_block": "tpu",
    "weights_fetched_in_the_loop": "tpu",
}


def programs_of(sample: Sample, platform: str, *, is_mended: bool) -> Programs:
    build = sample.build(is_mended=is_mended)
    return Programs(
        build=lambda mesh: build_on(build, mesh),
        axis_names=tuple(axis for axis, _ in sample.mesh),
        platform=platform,
    )


def terms_of(programs: Programs, sample: Sample, cure: Any = None) -> Terms:
    sizes = sample.sizes(8)
    return propagate(programs, sizes=sizes, probes=(), enter=lambda _: None, cure=cure).terms


@pytest.mark.parametrize("name", STEPS)
def test_a_broken_step_is_named_once_and_its_twin_is_silent(name: str) -> None:
    (sample,) = samples([name])
    broken, mended = (
        terms_of(programs_of(sample, STEPS[name], is_mended=is_mended), sample).findings
        for is_mended in (False, True)
    )
    assert [one.source for one in broken if one.rule == sample.finding] == [sample.source]
    assert mended == ()


def test_one_cure_mends_all_gradients_of_a_line() -> None:
    (sample,) = samples(["gradients_whole_for_their_norm"])
    programs = programs_of(sample, "tpu", is_mended=False)
    (found,) = terms_of(programs, sample).findings
    assert found.array.endswith("] and 1 more")
    assert value_of(found.bytes, {"fsdp": 8}) == 16 << 20
    assert found.cure is not None and len(found.cure.also) == 1
    assert terms_of(programs, sample, found.cure).findings == ()


def test_state_is_returned_as_given_where_a_constraint_changes_it() -> None:
    (sample,) = samples(["optimizer_comes_back_whole"])
    programs = programs_of(sample, "cpu", is_mended=False)
    (found,) = terms_of(programs, sample).findings
    assert found.cure is not None
    # Nobody is told to keep the optimizer whole on every device.
    assert [one.kind for one in variants(found.cure)] == ["return-as-given"]
    cured = terms_of(programs, sample, found.cure)
    mended = terms_of(programs_of(sample, "cpu", is_mended=True), sample)
    assert cured.findings == ()
    assert [p.bytes for p in cured.points] == [p.bytes for p in mended.points]
