"""Knobs that change the arrays which logical axes split: looked at, and held against jax."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from automesh.errors import UsageError
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.lower.lowering import lower
from automesh.program.nouns import Inspection, StepRef
from automesh.program.script.build import build_on
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.tuner.estimate import logical_knobs
from automesh.tuner.estimate.logical_knobs import with_knobs
from automesh.worker.handlers import jobs
from automesh.worker.messages import InspectJob
from automesh.worker.pool import Finished
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]

TEXT = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh, mapping={"batch": "dp", "mlp": "tp"}, parts=4, hidden=8, scale=1.0):
    def spec(*names):
        return NamedSharding(mesh, P(*(mapping.get(name) for name in names)))

    def step(w, x):
        def one(total, part):
            part = jax.lax.with_sharding_constraint(part, spec("batch", None))
            return total + jnp.tanh(part @ w).sum() * scale, None

        return jax.lax.scan(one, 0.0, x.reshape(parts, 16 // parts, 64))[0]

    w = jax.ShapeDtypeStruct((64, hidden), jnp.float32, sharding=spec(None, "mlp"))
    return jax.jit(step), (w, jax.ShapeDtypeStruct((16, 64), jnp.float32))
"""
SPACE = """
[axes]
dp = {}
tp = {}

[mapping]
batch = ["dp"]
mlp = ["tp", "none"]

[knobs]
"""


@dataclass
class Here:
    """A pool that does its jobs in this process."""

    asked: list[object] = field(default_factory=list)
    answers: dict[object, object] = field(default_factory=dict)
    _done: deque[Finished] = field(default_factory=deque)

    def submit(self, job, timeout_s, *, fresh=False, affinity=None):
        self.asked.append(job.knobs)
        result = self.answers.get(job.knobs) or jobs.handle(job, lambda event: {})
        self._done.append(Finished(ticket=len(self.asked), job=job, result=result))
        return len(self.asked)

    def wait(self):
        return [self._done.popleft(), Finished(ticket=-1, job=None, result=None)]


class Notices(list):
    def now(self, _):
        pass

    def notice(self, text):
        self.append(text)


def read(tmp_path, knobs):
    path = tmp_path / "space.toml"
    path.write_text(SPACE + knobs)
    return read_space(str(path))


def look(tmp_path, pool, knobs, notices=None) -> tuple[Inspection, object]:
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    space = read(tmp_path, knobs)
    job = InspectJob(
        step=StepRef(entry=script(path)),
        axis_names=space.names,
        platform="cpu",
        mapping=(("batch", ("dp",)), ("mlp", ("tp",))),
    )
    seen = jobs.handle(job, lambda event: {})
    progress = Notices() if notices is None else notices
    return with_knobs(pool, job, seen, space, progress, timeout_s=60.0), space


def legal(seen, space):
    step = StepFacts(
        facts=seen.facts, used_axes=seen.used_axes, mapping=seen.mapping, knobs=seen.knobs
    )
    return find_legal(space, step, num_devices=8, platform="cpu")


def test_uneven_splits_are_ruled_out_at_every_value_of_the_knobs(own_process, tmp_path):
    pool = Here()
    seen, space = look(tmp_path, pool, "parts = [1, 4]\nhidden = [8, 12]\n")
    assert len(pool.asked) == 3  # The inspection knows the defaults.
    assert len(seen.mapping.by_knobs) == 4
    found = legal(seen, space)
    namespace: dict[str, object] = {}
    exec(TEXT, namespace)
    refused = 0
    for mesh, mlp in itertools.product(("dp:8", "dp:4,tp:2", "dp:2,tp:4", "tp:8"), (("tp",), ())):
        for parts, hidden in itertools.product((1, 4), (8, 12)):
            plan = Plan(
                axes=parse_mesh(mesh, space.names),
                mapping=(("batch", ("dp",)), ("mlp", mlp)),
                knobs=(("parts", parts), ("hidden", hidden)),
            )
            reasons = [one for one in found.reasons_against(plan) if "divides" in one.rule]
            uneven = 16 // parts % plan.sizes["dp"] or (mlp and hidden % plan.sizes["tp"])
            assert bool(reasons) == bool(uneven), plan
            try:
                build = namespace["build"]
                lower(build_on(build, plan.axes, mapping=plan.mapping, knobs=plan.knobs))
            except ValueError:
                refused += 1
                assert uneven, plan
            assert (plan in found.legal) <= (not reasons)
    assert refused == 2  # jax pads what is split unevenly inside of a step.
    assert {one.rule for one in found.rejections} >= {
        "dp divides batch of 4",
        "tp divides mlp of 12",
    }


def test_of_many_combinations_those_of_knobs_that_tell_are_looked_at(
    own_process, tmp_path, monkeypatch
):
    monkeypatch.setattr(logical_knobs, "LEAST", 7)
    pool = Here()
    seen, _ = look(tmp_path, pool, "parts = [1, 4]\nhidden = [8, 12]\nscale = [2.0, 1.0]\n")
    # Each other value alone, then the pair of the two that change arrays.
    assert [dict(knobs) for knobs in pool.asked] == [
        {"parts": 1},
        {"hidden": 12},
        {"scale": 2.0},
        {"parts": 1, "hidden": 12},
    ]
    assert [len(one.knobs) for one in seen.mapping.by_knobs] == [2, 2, 2, 2]
    assert seen.mapping.telling == {"parts", "hidden"}


def test_combinations_beyond_the_most_are_left_to_be_built(own_process, tmp_path, monkeypatch):
    monkeypatch.setattr(logical_knobs, "MOST", 2)
    notices = Notices()
    seen, space = look(tmp_path, Here(), "hidden = [8, 12]\nparts = [4, 1]\n", notices)
    assert len(seen.mapping.by_knobs) == 2
    assert "looked at for 2 combinations of knobs" in notices[0]
    plans = {(plan.mesh, plan.knobs) for plan in legal(seen, space).legal}
    assert ("tp:8", (("hidden", 8), ("parts", 4))) in plans
    assert ("tp:8", (("hidden", 12), ("parts", 4))) in plans


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Failed(stage="build", reason="ValueError: too large"), "ValueError: too large"),
        (TimedOut(stage="lower", limit_s=60.0), "not done within 60 s"),
        (
            OutOfMemory(stage="build", needed_bytes=2, limit_bytes=1, detail="2 of 1 bytes"),
            "out of memory: 2 of 1 bytes",
        ),
    ],
)
def test_a_value_that_cannot_be_looked_at_does_not_end_the_search(
    failure, reason, own_process, tmp_path
):
    pool = Here(answers={(("hidden", 12),): failure})
    seen, space = look(tmp_path, pool, "hidden = [8, 12]\n")
    assert [one.unseen for one in seen.mapping.by_knobs] == ["", reason]
    found = legal(seen, space)
    assert any(reason in notice for notice in found.notices)
    assert "tp divides mlp of 12" not in {one.rule for one in found.rejections}


def test_a_worker_that_cannot_start_ends_it(own_process, tmp_path):
    pool = Here(answers={(("hidden", 12),): Failed(stage="start", reason="no devices")})
    with pytest.raises(UsageError, match="no devices"):
        look(tmp_path, pool, "hidden = [8, 12]\n")


def test_knobs_that_change_no_array_leave_one_set_of_arrays(own_process, tmp_path):
    pool = Here()
    seen, _ = look(tmp_path, pool, "scale = [1.0, 2.0]\n")
    assert seen.mapping.by_knobs == () and len(pool.asked) == 1


def test_without_logical_axes_nothing_is_looked_at(own_process, tmp_path):
    pool = Here()
    seen, space = look(tmp_path, pool, "hidden = [8, 12]\n")
    unmapped = replace(space, mapping=())
    job = InspectJob(step=StepRef(entry=script(tmp_path / "train.py")), axis_names=space.names)
    asked = len(pool.asked)
    assert with_knobs(pool, job, seen, unmapped, Notices(), timeout_s=60.0) is seen
    assert len(pool.asked) == asked
