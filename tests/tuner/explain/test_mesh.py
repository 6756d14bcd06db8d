"""Five planted causes, and that `explain` names each: the cause, the axes, the source line."""

from __future__ import annotations

from automesh.cost.comparison import shares_of
from automesh.cost.terms import Terms
from automesh.hardware import chip_for
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.model import HardwareModel
from automesh.program.nouns import Entry, Propagation, StepRef
from automesh.report.explain.nouns import Explained
from automesh.report.explain.words import verdict_sentence, why_sentence
from automesh.tuner.explain.mesh import Ground
from automesh.tuner.explain.mesh import explained as explain_plan
from automesh.worker.handlers import jobs
from automesh.worker.messages import PropagateJob
from tests.support.paths import SCRIPTS
from tests.support.samples import explain_samples as samples
from tests.support.samples.explain_samples import AXES, monomial, total

H100 = chip_for("NVIDIA H100 80GB HBM3", "gpu")


def priced(mesh: str, terms: Terms, *, granules: int = 1, **knobs: bool | str) -> Explained:
    """One mesh on nodes of H100s, at the speeds of the data sheet."""
    plan = samples.plan(mesh, **knobs)
    fabric = Fabric(
        kind="switch",
        chip=H100,
        num_granules=granules,
        granule_devices=plan.num_devices // granules,
    )
    ground = Ground(
        kept=[samples.kept(plan, terms)],
        hardware=HardwareModel(
            fabric=fabric, layouts=samples.NO_LAYOUTS, speeds=datasheet_speeds(H100, fabric)
        ),
        command="",
    )
    return explain_plan(plan, ground, None)


def propagated(script: str, mesh: str, **knobs: bool | str) -> Explained:
    """One mesh of a real script, at its own sizes."""
    plan = samples.plan(mesh, **knobs)
    sizes = tuple((axis.name, axis.size) for axis in plan.axes if axis.size > 1)
    job = PropagateJob(
        step=StepRef(entry=Entry(kind="script", location=str(SCRIPTS / script))),
        axis_names=AXES,
        knobs=plan.knobs,
        sizes=sizes,
        probes=(tuple((name, 4 if size == 2 else 2) for name, size in sizes),),
        platform="gpu",
    )
    answer = jobs.handle(job, lambda _: {})
    assert isinstance(answer, Propagation)
    return priced(mesh, answer.terms, **knobs)


def line_of(script: str, mark: str) -> str:
    lines = (SCRIPTS / script).read_text().splitlines()
    return f"{script}:{1 + next(row for row, text in enumerate(lines) if mark in text)}"


def test_a_missing_constraint_replicates_activations() -> None:
    lost = propagated("lost_constraint.py", "dp:4,tp:2", constrained=False)
    kept = propagated("lost_constraint.py", "dp:4,tp:2", constrained=True)
    first = shares_of(lost.cost, lost.estimated)[0]
    assert (first.reason, first.axes) == ("repeated", ("dp",))
    said = why_sentence(lost)
    assert "compute that all 4 devices along dp repeat" in said
    assert "is a sharding constraint on the activations missing?" in said
    # Every multiplication of the step reads or makes the rows that are not split.
    lines = {line_of("lost_constraint.py", mark) for mark in ("# THE LINE", "# AND BACK")}
    assert any(line in said for line in lines)
    assert all(share.reason != "repeated" for share in shares_of(kept.cost, kept.estimated))
    verdict = verdict_sentence(samples.explanation(lost, kept))
    assert "dp:4,tp:2 constrained=True is" in verdict
    assert "more on compute that all 4 devices along dp repeat" in verdict


def test_tp_over_dcn() -> None:
    terms = layer("fsdp", "tp")
    across = priced("dcn.tp:4,fsdp:8", terms, granules=4)
    inside = priced("dcn.fsdp:4,tp:8", terms, granules=4)
    first = shares_of(across.cost, across.estimated)[0]
    assert (first.reason, first.axes) == ("dcn", ("tp",))
    said = why_sentence(across)
    assert "collectives over tp that cross the network between granules (DCN)" in said
    assert "the all-reduce over tp at model.py:32" in said
    verdict = verdict_sentence(samples.explanation(across, inside))
    assert verdict.startswith("Estimated, dcn.fsdp:4,tp:8 is ")
    assert "more on collectives over tp that cross the network between granules (DCN)" in verdict
    assert "model.py:32" in verdict


def test_a_huge_gather_in_the_loop() -> None:
    inside = propagated("gathered_in_loop.py", "fsdp:8", hoisted=False)
    before = propagated("gathered_in_loop.py", "fsdp:8", hoisted=True)
    first = shares_of(inside.cost, inside.estimated)[0]
    assert (first.reason, first.axes) == ("ici", ("fsdp",))
    said = why_sentence(inside)
    loop = f"in the loop at {line_of('gathered_in_loop.py', '# THE LOOP')}"
    where = line_of("gathered_in_loop.py", "# IN THE LOOP")
    assert f"the all-gather over fsdp at {where} (64 runs of 32.0 MiB {loop})" in said
    verdict = verdict_sentence(samples.explanation(inside, before))
    assert "fsdp:8 hoisted=True is" in verdict
    assert f"the all-gather over fsdp at {where}" in verdict
    assert "which fsdp:8 hoisted=True does not have" in verdict


def test_a_mesh_bound_by_device_memory() -> None:
    terms = samples.terms(
        "dp",
        kernels=(
            samples.product(
                samples.matmul(monomial(8192.0, dp=-1), monomial(4096.0), monomial(4096.0)),
                total(2**28, dp=-1),
                source="model.py:31",
            ),
            samples.streaming(total(2.0**36, dp=-1), operation="reduce", source="model.py:40"),
        ),
    )
    one = priced("dp:8", terms)
    assert shares_of(one.cost, one.estimated)[0].reason == "memory"
    said = why_sentence(one)
    assert "of the step is device memory traffic, most of it in the reduce at model.py:40" in said
    assert "256 GiB of 257 GiB read and written" in said
    verdict = verdict_sentence(samples.explanation(one, priced("dp:32", terms)))
    assert "dp:32 is" in verdict
    assert "more on device memory traffic, above all in the reduce at model.py:40" in verdict


def test_shards_that_are_too_small() -> None:
    width = 1024.0
    tokens = monomial(65536.0, fsdp=-1)
    thin = samples.matmul(tokens, monomial(width, tp=-1), monomial(1024.0))
    terms = samples.terms(
        "fsdp", "tp", kernels=(samples.product(thin, total(1e6), source="model.py:31"),)
    )
    small, large = priced("fsdp:2,tp:256", terms), priced("fsdp:256,tp:2", terms)
    assert shares_of(small.cost, small.estimated)[0].reason == "small"
    said = why_sentence(small)
    assert "of the step is lost because the shards are too small" in said
    assert "the multiplication at model.py:31 in the loop at train.py:20" in said
    assert "(32768 x 1024 by 1024 x 4 on one device, cut so small by tp)" in said
    verdict = verdict_sentence(samples.explanation(small, large))
    assert "fsdp:256,tp:2 is" in verdict
    assert "more on multiplications that are too small to run at full speed" in verdict


def test_collectives_that_are_too_small() -> None:
    chatty = samples.collective(
        "all-reduce", "tp", payload=total(65536.0, tp=-1), source="model.py:32"
    )
    terms = samples.terms("tp", collectives=(chatty,))
    one = priced("tp:8", terms)
    assert shares_of(one.cost, one.estimated)[0].reason == "latency"
    said = why_sentence(one)
    assert "of the step is latency of many small pieces" in said
    assert "the all-reduce over tp at model.py:32 (32 runs of 8.00 KiB in the loop" in said


def layer(*active: str) -> Terms:
    """A layer with its weight split over fsdp and its hidden units over tp."""
    rows = {axis: -1 for axis in active if axis == "fsdp"}
    units = {axis: -1 for axis in active if axis == "tp"}
    tokens, hidden = monomial(65536.0, **rows), monomial(16384.0, **units)
    activations = total(2 * 65536 * 4096.0, **rows)
    up = samples.matmul(tokens, hidden, monomial(4096.0))
    down = samples.matmul(tokens, monomial(4096.0), hidden)
    weights = total(2 * 4096 * 16384.0, **units)
    return samples.terms(
        *active,
        kernels=(
            samples.product(up, activations, source="model.py:31"),
            samples.product(down, activations, source="model.py:32"),
        ),
        collectives=(
            samples.collective("all-gather", "fsdp", payload=weights, source="model.py:31"),
            samples.collective("all-reduce", "tp", payload=activations, source="model.py:32"),
        ),
    )
