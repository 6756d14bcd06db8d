"""A pipeline's step before it is run: its abstract state, its programs, what it sends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from automesh import pipeline
from automesh.errors import UsageError
from automesh.pipeline import MpmdMesh, make_schedule
from plugins.pipeline.tests.support.pipeline_models import mesh_on, perceptron


def make(*, schedule="1f1b", tied=False, stages=2, optimizer=None):
    model = perceptron(stages, tied=tied)
    mesh = mesh_on((2, 2), ("pp", "dp"))
    step = pipeline.train_step(
        model.free,
        optimizer=optimizer or optax.adam(0.1),
        mesh=mesh,
        num_microbatches=4,
        schedule=schedule,
    )
    rows = NamedSharding(MpmdMesh(mesh).abstract_mesh, PartitionSpec("dp"))
    params = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=rows if array.ndim == 2 else None
        ),
        model.params,
    )
    batch = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows), model.batch
    )
    return model, step, params, batch


class Counting:
    """Compiles, and keeps account."""

    def __init__(self):
        self.seen = []

    def __call__(self, lowered, stage, what):
        self.seen.append((stage, what))
        return lowered.compile()


def test_an_abstract_state_is_that_of_the_real_one_and_compiles_nothing(monkeypatch):
    model, step, params, batch = make()
    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", None)
        state = step.abstract_state(params, batch)
        lowered = step.lower(state, batch)
    compiled = lowered.compile()
    real = compiled.init(model.params)

    def told(tree):
        return [
            (one.shape, one.dtype, one.sharding.device_set, one.sharding.shard_shape(one.shape))
            for one in jax.tree.leaves(tree)
        ]

    assert jax.tree.structure(state) == jax.tree.structure(real)
    assert told(state) == told(compiled.state) == told(real)
    assert [one.sharding.spec for one in jax.tree.leaves(state.params)] == [
        PartitionSpec(),
        PartitionSpec("dp"),
    ] * 2


def test_every_program_is_compiled_by_who_is_given_and_run_by_the_step():
    model, step, params, batch = make()
    counting = Counting()
    lowered = step.lower(step.abstract_state(params, batch), batch)
    compiled = lowered.compile(counting)
    kinds = ("zeros", "finish", "init", "update", "B")
    wanted = {(stage, kind) for stage in (0, 1) for kind in kinds}
    assert set(counting.seen) == wanted | {(0, "F"), (1, "F"), (None, "norm")}
    assert len(counting.seen) == len(set(counting.seen))
    assert set(compiled.programs) == {
        (stage, kind) for stage in (0, 1) for kind in ("B", "update")
    } | {(0, "F")}
    assert all(one.memory_analysis() is not None for one in compiled.programs.values())
    assert compiled.schedule == make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    state = step.init(model.params, model.batch)
    state, metrics = step(state, model.batch)
    # The step runs what was compiled: nothing new is.
    assert step.compile(model.params, model.batch) is compiled.pipeline
    _, same = compiled(compiled.init(model.params), model.batch)
    assert float(metrics["loss"]) == float(same["loss"])
    step.with_schedule(make_schedule("zb_h1", num_ranks=2, num_microbatches=4))
    assert set(counting.seen) - wanted >= {(0, "W"), (1, "I"), (1, "W")}


def test_programs_alone_are_compiled_for_stand_ins():
    _, step, params, batch = make()
    counting = Counting()
    first = step.mesh.submeshes[0]
    lowered = step.lower(step.abstract_state(params, batch), batch, on=lambda _: first)
    assert set(lowered.meshes) == {first}
    with pytest.raises(UsageError, match="lowered for other meshes cannot be run"):
        lowered.compile()
    compiled = lowered.compile(counting, only_programs=True)
    assert {what for _, what in counting.seen} == {"F", "B", "update"}
    assert [(one.from_stage, one.to_stage) for one in compiled.pipeline.transfers] == [
        (0, 1),
        (1, 0),
    ]
    # What the stand-ins were compiled for is not what the step runs.
    real = step.lower(step.abstract_state(params, batch), batch)
    assert set(real.meshes) == set(step.mesh.submeshes)


@pytest.mark.parametrize(("schedule", "back"), [("1f1b", "B"), ("zb_h1", "I")])
def test_what_stages_send_for_a_microbatch(schedule, back):
    _, step, params, batch = make(schedule=schedule)
    compiled = step.lower(step.abstract_state(params, batch), batch).compile(only_programs=True)
    there, again = compiled.pipeline.transfers
    assert [there.kind, again.kind] == ["F", back]
    assert there.global_bytes == again.global_bytes == 4 * 8 * 4
    for one in (there, again):
        assert one.same_layout
        assert one.nbytes_per_device == one.global_bytes // 2
    assert compiled.pipeline.activation_bytes == (0, 4 * 8 * 4 // 2)


def test_what_changes_the_step_changes_its_text():
    def text(**options):
        _, step, params, batch = make(**options)
        return step.lower(step.abstract_state(params, batch), batch).update_text

    once = text()
    assert text() == once
    assert text(optimizer=optax.adam(0.2)) != once
    assert text(optimizer=optax.sgd(0.1)) != once


def test_schedule_with_stages_on_one_rank_sends_only_between_ranks():
    def loss(params, batch):
        for number, weight in enumerate(params):
            batch = pipeline.stage_boundary(batch) if number else batch
            batch = jnp.tanh(batch @ weight)
        return jnp.mean(batch**2)

    step = pipeline.microbatch(
        loss, mesh=mesh_on((2, 1), ("pp", "dp")), num_microbatches=4, schedule="dualpipe_v"
    )
    params = [np.eye(8, dtype=np.float32)] * 4
    compiled = step.compile(params, np.ones((8, 8), np.float32))
    assert compiled.schedule.homes == (0, 1, 1, 0)
    pairs = [(one.from_stage, one.to_stage) for one in compiled.transfers]
    assert pairs == [(0, 1), (1, 0), (2, 3), (3, 2)]


def test_what_xla_chooses_is_said_with_the_axes_of_the_submesh():
    def loss(params, batch):
        x = jax.lax.with_sharding_constraint(batch @ params[0], PartitionSpec("a", "b"))
        x = pipeline.stage_boundary(jnp.tanh(x))
        return jnp.mean(jax.lax.with_sharding_constraint(x @ params[1], PartitionSpec(("b", "a"))))

    step = pipeline.microbatch(loss, mesh=mesh_on((2, 2, 2), ("pp", "a", "b")), num_microbatches=2)
    compiled = step.compile([np.eye(8, dtype=np.float32)] * 2, np.ones((16, 8), np.float32))
    places = compiled.stages.places
    assert all(isinstance(one, NamedSharding) for one in places)
    made, read = (
        [one.sharding for one in structs]
        for structs in (compiled.stages.shapes[0].outputs, compiled.stages.shapes[1].inputs)
    )
    assert [one.spec for one in made] == [PartitionSpec("a", "b")]
    assert [one.shard_shape((8, 8)) for one in read] == [(2, 8)]
    assert [one.spec[0] for one in read] == [("b", "a")]
    one, _ = compiled.transfers
    assert not one.same_layout
    assert (one.nbytes_per_device, one.global_bytes) == (4 * 4 * 4, 8 * 8 * 4)
