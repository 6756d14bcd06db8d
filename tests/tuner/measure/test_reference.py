"""With whose losses those of all plans are compared; what a measured outcome holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.tuner.measure.decision import measured_outcome
from automesh.tuner.measure.numerics import find_reference
from tests.tuner.choose.test_ranking import compiled
from tests.tuner.measure.test_schedule import CRASH, RULES, SUBJECT, FakePool, calibrated

AXES = ("dp", "fsdp", "tp")


def plan(mesh: str, remat: str = "none") -> Plan:
    return Plan(axes=parse_mesh(mesh, AXES), knobs=(("remat", remat),))


ONE = plan("dp:1")
LEGAL = [
    plan(mesh, remat)
    for mesh in ("dp:8", "dp:4,tp:2", "dp:4,fsdp:2", "dp:2,fsdp:4", "fsdp:4,tp:2", "tp:8")
    for remat in ("none", "full")
]


@pytest.mark.parametrize(
    ("failing", "name", "found"),
    [
        ((), "the step on one device", "dp:1"),
        (("dp:1",), "the data-parallel plan dp:8 remat=none", "dp:8"),
        (("dp:1", "dp:8"), "the data-parallel plan dp:2,fsdp:4 remat=none", "dp:2,fsdp:4"),
    ],
)
def test_without_a_baseline_one_device_or_the_batch_split_is_the_reference(
    failing: tuple[str, ...], name: str, found: str
) -> None:
    pool = FakePool(
        step_s=dict.fromkeys([ONE, *LEGAL], 0.1),
        script={(plan(mesh), visit): CRASH for mesh in failing for visit in range(3)},
    )
    reference = find_reference(pool, SUBJECT, baseline=[], plans=LEGAL, rules=RULES)
    assert (reference.name, reference.plan) == (name, (plan(found),))
    assert reference.losses == (3.0, 2.9, 2.8)[: len(reference.losses)] and reference.losses


def test_where_none_of_these_runs_there_is_no_reference() -> None:
    pool = FakePool(
        step_s=dict.fromkeys([ONE, *LEGAL], 0.1),
        script={(one, visit): CRASH for one in [ONE, *LEGAL] for visit in range(3)},
    )
    reference = find_reference(pool, SUBJECT, baseline=[], plans=LEGAL, rules=RULES)
    assert reference.name.startswith("none: neither one device nor data parallelism")
    assert not reference.plan and not reference.losses
    assert not any(job.plan.sizes["tp"] > 1 for job in pool.jobs)


def test_a_baseline_that_ran_is_the_reference() -> None:
    pool = FakePool(step_s=dict.fromkeys(LEGAL, 0.1))
    (calibration,) = calibrated(pool, LEGAL[3]).values()
    visits = len(pool.jobs)
    reference = find_reference(pool, SUBJECT, baseline=[calibration], plans=LEGAL, rules=RULES)
    assert reference.plan == (LEGAL[3],) and len(pool.jobs) == visits


@pytest.mark.parametrize(("seen_bytes", "peak_bytes"), [(0, None), (7_000, 7_000)])
def test_memory_is_what_the_device_saw_or_else_what_the_compiler_said(
    seen_bytes: int, peak_bytes: int | None
) -> None:
    pool = FakePool(step_s=dict.fromkeys(LEGAL, 0.1))
    (calibration,) = calibrated(pool, LEGAL[0]).values()
    calibration = replace(calibration, first=replace(calibration.first, peak_bytes=seen_bytes))
    program = compiled(0.1)

    def outcome(of_compiler: object) -> int:
        return measured_outcome(
            calibration,
            of_compiler,  # type: ignore[arg-type]
            ("agree", ""),
            [0.1],
            step_s=0.1,
            interval_s=(0.09, float("inf")),
        ).peak_bytes

    assert outcome(program) == (peak_bytes or program.memory.peak_bytes)
    assert outcome(None) == seen_bytes
