"""Propagations as jobs of a worker, on the examples."""

import functools
from dataclasses import replace

import pytest

from automesh.cost.terms import value_of
from automesh.mesh.axes import DEFAULT_AXES, MeshAxis
from automesh.program.nouns import Propagation, StepRef
from automesh.program.script.build import build_on, read_facts
from automesh.program.script.load import load_entry
from automesh.worker import protocol
from automesh.worker.handlers import jobs
from automesh.worker.messages import InspectJob, PropagateJob
from tests.support.paths import EXAMPLES, SCRIPTS
from tests.support.program_jobs import own_process as own_process
from tests.support.program_jobs import script


def example(name, size):
    return script(EXAMPLES / f"{name}.py", argv=("--size", size))


@functools.cache
def facts_of(name, size):
    build = load_entry(example(name, size))
    return read_facts(build_on(build, [MeshAxis(name=axis) for axis in DEFAULT_AXES]).workload)


def job(name, sizes, *probes, size="tiny", knobs=()):
    return PropagateJob(
        step=StepRef(entry=example(name, size), facts=facts_of(name, size)),
        axis_names=DEFAULT_AXES,
        knobs=knobs,
        sizes=tuple(sizes.items()),
        probes=tuple(tuple(one.items()) for one in probes),
        platform="none",
    )


def answer(wanted, events=None) -> Propagation:
    heard = [] if events is None else events
    found = jobs.handle(wanted, lambda event: heard.append(event) or {})
    # As the parent gets it.
    message = protocol.answer_message(wanted, found)
    assert protocol.read_result(wanted, message) == found
    return found


def totals(terms, sizes):
    """FLOPs, bytes, the bytes of each kind of collective, the peak, and the arguments."""
    flops = sum(
        2 * value_of(one.count, sizes) * by.batch.at(sizes) * by.m.at(sizes) * by.n.at(sizes)
        * by.k.at(sizes)
        for one in terms.kernels
        for by in one.matmuls
    )  # fmt: skip
    moved: dict[str, float] = {}
    for one in terms.collectives:
        key = f"{one.kind} {one.axes}"
        bytes_ = value_of(one.count, sizes) * value_of(one.payload_bytes, sizes)
        moved[key] = moved.get(key, 0.0) + bytes_
    traffic = sum(value_of(one.count, sizes) * value_of(one.bytes, sizes) for one in terms.kernels)
    peak = max(value_of(one.bytes, sizes) for one in terms.points)
    return {
        "flops": flops,
        "traffic": traffic,
        "peak": peak,
        "arguments": value_of(terms.argument_bytes, sizes),
        **moved,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "sizes", "other"),
    [
        ("dense_lm", "small", {"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 2}),
        pytest.param(
            *("moe_lm", "small", {"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 4}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("long_context", "small", {"dp": 2, "sp": 2}, {"dp": 2, "sp": 8}),
            marks=pytest.mark.long,
        ),
    ],
)
def test_terms_at_other_sizes_are_those_of_their_own_propagation(
    own_process, name, size, sizes, other
):
    here = answer(job(name, sizes, dict.fromkeys(sizes, 4), size=size))
    assert here.failed_probes == () and here.terms.fixed == () and here.terms.limits == ()
    assert here.lower_s > 0 and here.propagate_s > 0
    jobs._MEMORY.programs.clear()
    there = answer(job(name, other, size=size))
    expected = totals(there.terms, other)
    assert totals(here.terms, other) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_sets_of_one_step_share_what_was_lowered(own_process):
    axes = [("dp", "tp"), ("dp", "sp"), ("sp",)]
    answers = [
        answer(job("dense_lm", dict.fromkeys(one, 2), dict.fromkeys(one, 4))) for one in axes
    ]
    (propagations,) = jobs._MEMORY.programs.values()
    programs = propagations.programs
    assert programs.lowered == 4 and not programs.varies
    assert answers[0].lower_s > 0 and answers[-1].lower_s == 0
    assert any("derived" in note for note in answers[-1].notes)
    jobs._MEMORY.programs.clear()
    own = answer(job("dense_lm", {"sp": 4}))
    assert totals(answers[-1].terms, {"sp": 4}) == pytest.approx(totals(own.terms, {"sp": 4}))
    answer(job("dense_lm", {"sp": 2}, knobs=(("remat", "none"),)))
    *_, propagations = jobs._MEMORY.programs.values()
    assert propagations.programs.lowered == 1


@pytest.mark.parametrize("name", ["dense_lm", "long_context", "moe_lm"])
def test_a_step_on_one_device_has_terms_without_collectives(own_process, name):
    terms = answer(job(name, {}, knobs=(("remat", "full"),))).terms
    assert totals(terms, {})["flops"] > 0 and not terms.collectives


def test_a_worker_says_what_it_is_doing(own_process):
    events = []
    answer(job("dense_lm", {"dp": 2}), events)
    stages = [one["stage"] for one in events if one["event"] == "stage"]
    assert stages[-3:] == ["build", "lower", "propagate"]


@pytest.mark.long
def test_what_an_inspection_lowered_need_not_be_lowered_again(own_process):
    entry = example("dense_lm", "tiny")
    seen = answer(
        InspectJob(step=StepRef(entry=entry), axis_names=DEFAULT_AXES, platform="none")
    ).seen
    ((_, meshes),) = seen
    assert meshes >= 2
    other = (("another program", 9),)
    # Several programs say that the step is another one on some meshes: then none is a witness.
    for known, lowered in ((seen, 2), (other, 4), ((*seen, *other), 4)):
        jobs._MEMORY.programs.clear()
        wanted = job("dense_lm", {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4})
        first = answer(replace(wanted, seen=known))
        answer(replace(job("dense_lm", {"tp": 2}, {"tp": 4}), seen=known))
        (propagations,) = jobs._MEMORY.programs.values()
        assert propagations.programs.lowered == lowered
        assert first.failed_probes == () and first.terms.fixed == ()


def test_complex_numbers_are_propagated():
    """MLIR's bindings of Python have no class for constants of complex numbers."""
    step = StepRef(entry=script(SCRIPTS / "steps" / "complex_numbers.py"), facts=())
    asked = PropagateJob(
        step=step,
        axis_names=("dp", "tp"),
        knobs=(),
        sizes=(("dp", 2), ("tp", 2)),
        probes=(),
        platform="cpu",
    )
    terms = answer(asked).terms
    found = totals(terms, {"dp": 2, "tp": 2})
    rows = 8 * 8 // 2
    assert found["flops"] >= 2 * 2 * rows * 16 * 8
    assert {one.axes for one in terms.collectives} >= {("dp",)}


def test_a_worker_keeps_what_it_has_lowered_for_a_few_calls_of_build(
    own_process, monkeypatch
) -> None:
    def wanted(copies: int):
        return job("dense_lm", {"dp": 2}, knobs=(("microbatches", copies),))

    monkeypatch.setattr(jobs, "MOST_CALLS", 2)
    jobs._MEMORY.programs.clear()
    answer(wanted(1))
    (first,) = jobs._MEMORY.programs.values()
    answer(wanted(2))
    answer(wanted(1))
    assert [*jobs._MEMORY.programs.values()][-1] is first
    answer(wanted(4))
    assert first in jobs._MEMORY.programs.values() and len(jobs._MEMORY.programs) == 2
    monkeypatch.setattr(jobs, "_MOST_KEPT_BYTES", 0)
    answer(wanted(2))
    assert first not in jobs._MEMORY.programs.values() and len(jobs._MEMORY.programs) == 1
