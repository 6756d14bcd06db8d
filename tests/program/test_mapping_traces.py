"""What jax has traced for one plan's mapping never gets into another plan's program."""

from __future__ import annotations

import textwrap

import jax
import pytest

from automesh.mesh.axes import Plan, parse_mesh
from automesh.program.nouns import StepRef
from automesh.program.script import contexts
from automesh.program.script.build import build_on
from automesh.worker.handlers import jobs
from automesh.worker.messages import CompileJob, InspectJob, PropagateJob, VisitJob
from tests.support.program_jobs import own_process, script

__all__ = ["own_process"]

NAMES = ("dp", "tp")
# The mapping goes to a function that jax has traced before, by a road that jax does not know: as in
# Haliax and in Flax, whose logical axes are thread-local.
TEXT = """
import threading

import automesh
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

CURRENT = threading.local()


@jax.checkpoint
def layer(w, x):
    spec = P(*(CURRENT.mapping[name] for name in ("batch", "mlp")))
    return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), spec)


def build(mesh, mapping={"batch": "dp", "mlp": "tp"}):
    jax.set_mesh(mesh)

    def step(w, x):
        CURRENT.mapping = mapping
        return w - 0.1 * jax.grad(lambda w: layer(w, x).sum())(w)

    def init(mesh):
        CURRENT.mapping = mapping
        x = jnp.ones((16, 64))
        return jnp.ones((64, 32)) * layer(jnp.ones((64, 32)), x).mean(), x

    whole = NamedSharding(mesh, P())
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=whole)
    return automesh.Workload(jax.jit(step), (w, x), init=init)
"""
MAPPINGS = (
    (("batch", ("dp",)), ("mlp", ("tp",))),
    (("batch", ("tp",)), ("mlp", ())),
    (("batch", ()), ("mlp", ("dp",))),
)


@pytest.fixture
def entry(own_process, tmp_path):
    path = tmp_path / "mapped.py"
    path.write_text(textwrap.dedent(TEXT))
    return script(path)


def common(entry, mapping, tmp_path):
    plan = Plan(axes=parse_mesh("dp:2,tp:2", NAMES), mapping=mapping)
    return {
        "step": StepRef(entry=entry),
        "plan": plan,
        "cache_dir": str(tmp_path / "cache"),
    }


def compiled(entry, mapping, tmp_path) -> str:
    job = CompileJob(**common(entry, mapping, tmp_path))
    return jobs.handle(job, lambda event: {"go": False}).fingerprint


def visited(entry, mapping, tmp_path) -> str:
    job = VisitJob(steps=0, samples=0, loss_steps=1, **common(entry, mapping, tmp_path))
    return jobs.handle(job, lambda event: {"go": True}).fingerprint


def propagated(entry, mapping, _):
    job = PropagateJob(
        step=StepRef(entry=entry),
        axis_names=NAMES,
        knobs=(),
        sizes=(("dp", 2), ("tp", 2)),
        probes=(),
        platform="cpu",
        mapping=mapping,
    )
    return jobs.handle(job, lambda event: {"go": True}).terms


@pytest.mark.parametrize(
    "told", [compiled, propagated, pytest.param(visited, marks=pytest.mark.long)]
)
def test_each_plan_has_the_program_of_its_own_mapping(told, entry, tmp_path):
    apart = []
    for mapping in MAPPINGS:
        jax.clear_caches()
        apart.append(told(entry, mapping, tmp_path))
    assert all(apart.count(one) == 1 for one in apart)
    jobs._MEMORY.ready.clear()
    jobs._MEMORY.programs.clear()
    jax.clear_caches()
    assert [told(entry, mapping, tmp_path) for mapping in MAPPINGS] == apart
    # What the initial values of a plan trace is not another's, either.
    visited(entry, MAPPINGS[1], tmp_path)
    jobs._MEMORY.ready.clear()
    jobs._MEMORY.programs.clear()
    assert told(entry, MAPPINGS[0], tmp_path) == apart[0]


def test_an_inspection_sees_the_logical_axes_behind_what_was_traced_before(entry, tmp_path):
    for mapping in MAPPINGS:
        compiled(entry, mapping, tmp_path)
    listed = (("batch", ("dp",)), ("mlp", ("tp",)))
    job = InspectJob(step=StepRef(entry=entry), axis_names=NAMES, platform="cpu", mapping=listed)
    assert jobs.handle(job, lambda event: {}).mapping.logical == {"batch", "mlp"}


def test_traces_of_the_same_call_are_used_again_and_those_of_too_many_forgotten(monkeypatch):
    traced = []

    @jax.jit
    def twice(x):
        traced.append(x.shape)
        return x * 2

    def build(mesh, number=0):
        jax.eval_shape(twice, jax.ShapeDtypeStruct((8,), "float32"))
        return twice, (jax.ShapeDtypeStruct((8,), "float32"),)

    def traces_at(number):
        before = len(traced)
        build_on(build, parse_mesh("dp:1", ("dp",)), knobs=(("number", number),))
        return len(traced) - before

    monkeypatch.setattr(contexts, "MOST_CALLS", 3)
    monkeypatch.setattr(contexts, "_calls", set())
    assert [traces_at(number) for number in (1, True, 1, True, 2, 1)] == [1, 1, 0, 0, 1, 0]
    assert [traces_at(number) for number in (3, 1)] == [1, 1]  # A fourth call.


RAGGED = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def build(mesh, mapping={"vocab": None}):
    rows = 400 if mapping["vocab"] else 2
    where = NamedSharding(mesh, P(mapping["vocab"]))
    table = jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=where)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=NamedSharding(mesh, P()))

    def step(table, ids):
        return table[ids].sum() * 0.0 + ids.max().astype(jnp.float32)

    return jax.jit(step), (table, ids)
"""


def test_values_that_are_made_up_fit_the_arrays_of_their_mapping(own_process, tmp_path):
    path = tmp_path / "ragged.py"
    path.write_text(RAGGED)

    def largest(axes):
        mapping = (("vocab", axes),)
        job = VisitJob(steps=0, samples=0, loss_steps=1, **common(script(path), mapping, tmp_path))
        return jobs.handle(job, lambda event: {"go": True}).losses[0]

    assert largest(("tp",)) > 1
    assert largest(()) <= 1
