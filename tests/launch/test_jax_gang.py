"""Two real jax processes with DCN between them give what one process gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from automesh.launch.fleet import Fleet
from automesh.launch.local import local_launcher
from automesh.launch.secret import new_token
from automesh.mesh.axes import DEFAULT_AXES, PIPELINE, MeshAxis, Plan, parse_mesh
from automesh.outcomes import Failure
from automesh.program.nouns import Attachment, Entry, StepRef, VisitAnswer
from automesh.worker.messages import DevicesJob, Surroundings, VisitJob
from automesh.worker.pool import Pool
from tests.support.paths import DATA, EXAMPLES
from tests.support.worker_jobs import surroundings

pytestmark = pytest.mark.slow

SCRIPT = DATA / "scripts" / "gang" / "train.py"
LIMIT_S = 600.0


def pool_of(folder: Path, around: Surroundings, **how: object) -> Pool:
    settings = {"size": 1, "memory_limit_bytes": 4 * 2**30, **how}
    return Pool(surroundings=around, log_dir=folder / "logs", **settings)  # pyright: ignore


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with local_launcher() as launcher:
        token = new_token()
        with Fleet(token=token, listen=("127.0.0.1", 0), hosts=2, launcher=launcher) as fleet:
            fleet.wait(120)
            folder = tmp_path_factory.mktemp("gang")
            around = surroundings(cpu_devices=2)
            with pool_of(folder, around, start=fleet.start_gang) as pool:
                yield pool


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_of(tmp_path_factory.mktemp("alone"), surroundings(cpu_devices=4)) as pool:
        yield pool


def visit(pool: Pool, mesh: str, folder: Path) -> VisitAnswer:
    entry = Entry(kind="script", location=str(SCRIPT))
    job = VisitJob(
        step=StepRef(entry=entry),
        plan=Plan(axes=parse_mesh(mesh, ("dp", "tp"))),
        cache_dir=str(folder / "executables"),
        steps=2,
        samples=2,
        loss_steps=3,
        warmup_s=0.01,
    )
    answer = pool.run(job, LIMIT_S)
    assert isinstance(answer, VisitAnswer), answer
    return answer


def test_the_devices_are_those_of_all_processes(gang: Pool) -> None:
    answer = gang.run(DevicesJob(), LIMIT_S)
    assert not isinstance(answer, Failure)
    assert isinstance(answer, Attachment)
    assert answer.process_count == 2
    assert [device.process_index for device in answer.devices] == [0, 0, 1, 1]


def test_two_hosts_with_two_processes_each_are_one_program(tmp_path: Path, alone: Pool) -> None:
    with (
        local_launcher() as launcher,
        Fleet(
            token=new_token(),
            listen=("127.0.0.1", 0),
            hosts=2,
            processes=4,
            launcher=launcher,
        ) as fleet,
        pool_of(tmp_path, surroundings(cpu_devices=1), start=fleet.start_gang) as pool,
    ):
        fleet.wait(120)
        answer = pool.run(DevicesJob(), LIMIT_S)
        assert isinstance(answer, Attachment), answer
        assert answer.process_count == 4
        assert [device.process_index for device in answer.devices] == [0, 1, 2, 3]
        (tmp_path / "alone").mkdir()
        found = visit(pool, "dcn.dp:4", tmp_path)
    assert found.losses == pytest.approx(visit(alone, "dp:4", tmp_path / "alone").losses, rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "same"),
    [
        ("dcn.dp:2,dp:2", "dp:4"),
        ("dcn.tp:2,dp:2", "dp:2,tp:2"),
        ("dcn.dp:2,tp:2", "dp:2,tp:2"),
        ("dp:1", "dp:1"),
    ],
)
def test_losses_and_updates_are_those_of_one_process(
    gang: Pool, alone: Pool, tmp_path: Path, mesh: str, same: str
) -> None:
    found, wanted = visit(gang, mesh, tmp_path), visit(alone, same, tmp_path)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert len(found.losses) == 3
    assert len(found.samples_s) == 2
    assert [update.path for update in found.updates] == [one.path for one in wanted.updates]
    for update, one in zip(found.updates, wanted.updates, strict=True):
        assert update.is_finite
        assert update.count == one.count
        assert update.apart == 0.0
        assert update.norm == pytest.approx(one.norm, rel=1e-4)
        assert update.projections == pytest.approx(one.projections, rel=1e-3, abs=1e-6)


@pytest.mark.plugin("pipeline")
@pytest.mark.parametrize("mesh", ["dcn.pp:2,dp:2", "dcn.dp:2,pp:2"])
def test_a_pipeline_of_two_processes_has_the_losses_of_one(
    gang: Pool, alone: Pool, tmp_path: Path, mesh: str
) -> None:
    """Stages on one process each, which send to each other, and stages that all processes share."""
    axes = parse_mesh(mesh, (PIPELINE, *DEFAULT_AXES))
    inside = tuple(MeshAxis(name=axis.name, ici=axis.size) for axis in axes)
    job = VisitJob(
        step=StepRef(entry=Entry(kind="script", location=str(EXAMPLES / "dense_lm.py"))),
        plan=Plan(axes=axes, knobs=(("microbatches", 4),)),
        cache_dir=str(tmp_path / "executables"),
        steps=1,
        samples=2,
        loss_steps=3,
    )
    found = gang.run(job, LIMIT_S)
    assert isinstance(found, VisitAnswer), found
    wanted = alone.run(replace(job, plan=replace(job.plan, axes=inside)), LIMIT_S)
    assert isinstance(wanted, VisitAnswer), wanted
    assert len(found.losses) == 3
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert len(found.samples_s) == 2
    # The first process tells also of arrays that it has nothing of.
    norms = {update.path: update.norm for update in wanted.updates}
    assert {update.path: update.norm for update in found.updates} == pytest.approx(norms, rel=1e-3)
    assert any("layers" in path for path in norms)


def test_a_script_that_joins_by_itself_finds_it_done(gang: Pool, tmp_path: Path) -> None:
    """The script of these tests calls `jax.distributed.initialize()`, as those of clusters do."""
    assert "jax.distributed.initialize()" in SCRIPT.read_text()
    assert visit(gang, "dcn.dp:2,dp:2", tmp_path).fingerprint
