"""Training by a pipeline equals training by one program: steps, clipping, tied embeddings."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import optax
import pytest

from automesh import pipeline
from automesh.errors import UsageError, WrongType
from automesh.pipeline import SCHEDULES, MpmdMesh, make_schedule
from plugins.pipeline.tests.support.pipeline_models import (
    language_model,
    perceptron,
    pipeline_mesh,
    worst,
)

STEPS = 5
CLIP = 0.5
CLOSE = 1e-5
SEVERAL = ("interleaved", "kimi_k2", "wavefront", "dualpipe_v")


def single_training(model, *, num_microbatches, optimizer):
    """Of each of `STEPS` steps of one program on one device what it begins with and gives.

    Returns:
      For each step parameters, value and gradients; and the parameters in the end.
    """
    value_and_grad = jax.value_and_grad(model.single())
    accumulated = pipeline.accumulate(value_and_grad, num_microbatches=num_microbatches, argnum=1)
    clipped = optax.chain(optax.clip_by_global_norm(CLIP), optimizer)

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.tree.map(
            lambda leaf: leaf / num_microbatches, accumulated(params, batch)
        )
        updates, state = clipped.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, gradients

    params = jax.tree.map(jax.numpy.asarray, model.params)
    state, steps = clipped.init(params), []
    for _ in range(STEPS):
        moved, state, value, gradients = step(params, state, model.batch)
        steps.append((params, value, gradients))
        params = moved
    return steps, params


def pipeline_training(step, model):
    state = step.init(model.params, model.batch)
    values, norms = [], []
    for _ in range(STEPS):
        state, metrics = step(state, model.batch)
        values.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return np.array(values), np.array(norms), state.params


def check_training(model, mesh, schedules, *, residuals="recompute", num_microbatches=4):
    """All schedules, which have the stages on the same ranks, against one program."""
    # Of Adam's kind, an update of what has almost no gradient would be decided by rounding.
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    steps, last = single_training(model, num_microbatches=num_microbatches, optimizer=optimizer)
    wanted = np.array([value for _, value, _ in steps])
    norms = np.array([optax.tree.norm(gradients) for _, _, gradients in steps])
    assert (norms > CLIP).any()
    cut = MpmdMesh(mesh)
    step = pipeline.train_step(
        model.loss(cut.abstract_mesh),
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        schedule=schedules[0],
        mesh=cut,
        clip_norm=CLIP,
        residuals=residuals,
    )
    step.compile(model.abstract(cut.abstract_mesh), model.batch)
    # So that the optimizer's programs are there for all schedules.
    step.init(model.params, model.batch)
    for schedule in schedules:
        changed = step.with_schedule(schedule)
        compiled = changed.compile(model.params, model.batch)
        for params, value, gradients in steps:
            host = jax.tree.map(np.asarray, params)
            assert worst(compiled(host, model.batch), (value, gradients)) < CLOSE, schedule.name
        got = pipeline_training(changed, model)
        np.testing.assert_allclose(got[0], wanted, rtol=CLOSE, err_msg=schedule.name)
        np.testing.assert_allclose(got[1], norms, rtol=CLOSE, err_msg=schedule.name)
        assert worst(got[2], last) < CLOSE, schedule.name


@pytest.mark.long
def test_a_dense_model_over_two_stages_with_fsdp_and_tp():
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    model = language_model("dense", 2, rows=16, layers=2)
    check_training(model, pipeline_mesh(2, fsdp=2, tp=2), [schedule])


@pytest.mark.long
def test_a_model_with_experts_over_two_stages():
    schedule = make_schedule("zb_h1", num_ranks=2, num_microbatches=4)
    model = language_model("moe", 2, rows=16, layers=2)
    check_training(model, pipeline_mesh(2, dp=2, ep=2), [schedule], residuals="save")


LAYOUTS = {
    2: ({"dp": 4}, {"fsdp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}),
    4: ({"dp": 2}, {"fsdp": 2}, {"tp": 2}),
}
# What is kept instead of computed again does not depend on the layout.
CASES = [
    (pp, sizes, residuals)
    for pp, listed in LAYOUTS.items()
    for sizes in listed
    for residuals in (("recompute", "save") if sizes == listed[-1] else ("recompute",))
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("pp", "sizes", "residuals"), CASES)
def test_every_schedule_trains_the_examples_like_one_program(kind, residuals, pp, sizes):
    count = 8
    for per_rank in (1, 2):
        names = [name for name in SCHEDULES if per_rank == 2 or name != "dualpipe_v"]
        names = [name for name in names if per_rank == 1 or name in SEVERAL]
        schedules = [
            make_schedule(name, num_ranks=pp, num_microbatches=count, num_stages=per_rank * pp)
            for name in names
        ]
        model = language_model(kind, per_rank * pp, rows=32, layers=8)
        for _, alike in itertools.groupby(schedules, lambda one: one.homes):
            check_training(
                model,
                pipeline_mesh(pp, **sizes),
                list(alike),
                residuals=residuals,
                num_microbatches=count,
            )


def test_the_callers_parameters_survive_and_a_state_is_overwritten():
    model = perceptron(2)
    mesh = pipeline_mesh(2)
    step = pipeline.train_step(model.free, optimizer=optax.sgd(0.1), mesh=mesh, num_microbatches=2)
    placed = pipeline.microbatch(model.free, mesh=mesh, num_microbatches=2).place(
        model.params, model.batch
    )
    state = step.init(placed, model.batch)
    new, metrics = step(state, model.batch)
    assert set(metrics) == {"loss", "grad_norm"}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert jax.tree.structure(new.params) == jax.tree.structure(model.params)


def test_an_optimizer_sees_only_its_stage_at_its_place_in_the_tree():
    seen = []

    def init(params):
        seen.append(
            [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        )
        return ()

    def update(gradients, state, params):
        return jax.tree.map(lambda gradient: -gradient, gradients), state

    model = perceptron(2)
    step = pipeline.train_step(
        model.free,
        optimizer=optax.GradientTransformation(init, update),
        mesh=pipeline_mesh(2),
        num_microbatches=2,
    )
    step.init(model.params, model.batch)
    assert sorted(set(map(tuple, seen))) == [("[0]['b']", "[0]['w']"), ("[1]['b']", "[1]['w']")]


def test_wrong_calls():
    loss = perceptron(2).free
    options = {"mesh": pipeline_mesh(2), "num_microbatches": 2}
    with pytest.raises(WrongType, match="must have `init` and `update`"):
        pipeline.train_step(loss, optimizer=0.1, **options)
    with pytest.raises(UsageError, match="must be more than 0"):
        pipeline.train_step(loss, optimizer=optax.sgd(0.1), clip_norm=0, **options)
