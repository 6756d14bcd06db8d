"""How a loss is cut into stages: marks, tasks, what is repeated, what crosses, what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from automesh import pipeline
from automesh.errors import UsageError, WrongType
from automesh.mesh.layout.shardings import axes_of_entry
from automesh_pipeline.runtime.split.cut import SplitLoss, split_program
from automesh_pipeline.runtime.split.marks import rules_in_force
from automesh_pipeline.runtime.split.trace import trace_loss
from plugins.pipeline.tests.support.pipeline_models import mesh_on

WIDTH = 4
X = np.ones((2, WIDTH), np.float32)
W = np.eye(WIDTH, dtype=np.float32)


def split(loss, params, batch=X) -> SplitLoss:
    mesh = mesh_on((2,), ("dp",))
    return split_program(trace_loss(loss, params, batch, mesh=mesh, rules=rules_in_force()))


def evaluate(stages: SplitLoss, params, batch=X):
    """The loss, stage by stage."""
    params, batch = jax.tree.leaves(params), jax.tree.leaves(batch)
    values = {}
    for number, stage in enumerate(stages.stages):
        results = core.jaxpr_as_fun(stage.program)(
            *(params[leaf] for leaf in stage.params),
            *(batch[leaf] for leaf in stage.batch),
            *(values[value] for value in stage.inputs),
        )
        for value in stage.inputs:
            assert stages.values[value].producer < number
            assert number in stages.values[value].consumers
        values.update(zip(stage.outputs, results))
    return results[0]


def reads(stages: SplitLoss):
    return [(stage.params, stage.batch, len(stage.inputs)) for stage in stages.stages]


def test_three_stages():
    def loss(params, x):
        for number, w in enumerate(params):
            x = jnp.tanh((pipeline.stage_boundary(x) if number else x) @ w)
        return jnp.mean(x)

    stages = split(loss, [W, 2 * W, 3 * W])
    assert reads(stages) == [((0,), (0,), 0), ((1,), (), 1), ((2,), (), 1)]
    assert [value.consumers for value in stages.values] == [(1,), (2,)]
    np.testing.assert_allclose(evaluate(stages, [W, 2 * W, 3 * W]), loss([W, 2 * W, 3 * W], X))


def test_a_tied_parameter_is_read_by_both_and_nothing_of_it_is_sent():
    def loss(params, x):
        tied = params["tied"].astype(jnp.bfloat16).astype(jnp.float32) * 2
        x = pipeline.stage_boundary(x @ tied)
        x = pipeline.stage_boundary(jnp.tanh(x @ params["own"]))
        return jnp.mean(x @ tied.T)

    params = {"own": W, "tied": W}
    stages = split(loss, params)
    assert reads(stages) == [((1,), (0,), 0), ((0,), (), 1), ((1,), (), 1)]
    assert stages.owners == (1, 0)
    assert stages.users == ((1,), (0, 2))
    np.testing.assert_allclose(evaluate(stages, params), loss(params, X))


def test_a_value_that_skips_a_stage_is_sent_once_and_aliases_are_one_value():
    def loss(params, x):
        first = x @ params[0]
        second = jnp.tanh(pipeline.stage_boundary(first) @ params[1])
        third = pipeline.stage_boundary(second)
        return jnp.mean(third @ params[2] + first)

    params = [W, 2 * W, 3 * W]
    stages = split(loss, params)
    assert [(value.producer, value.consumers) for value in stages.values] == [
        (0, (1, 2)),
        (1, (2,)),
    ]
    np.testing.assert_allclose(evaluate(stages, params), loss(params, X))


def test_what_only_the_loss_needs_is_done_where_it_can_be():
    def loss(params, x):
        first = x @ params[0]
        second = pipeline.stage_boundary(first) @ params[1]
        penalty = jnp.sum(second**2)
        third = pipeline.stage_boundary(second) @ params[2]
        return jnp.mean(third) + penalty

    stages = split(loss, [W, W, W])
    shapes = {(value.producer, value.like.shape) for value in stages.values}
    assert shapes == {(0, (2, WIDTH)), (1, (2, WIDTH)), (1, ())}
    np.testing.assert_allclose(evaluate(stages, [W, W, W]), loss([W, W, W], X))


def test_trees_in_marks_and_marks_in_jitted_functions():
    @jax.jit
    def block(tree, w):
        tree = pipeline.stage_boundary({"x": tree["x"] @ w, "count": tree["count"] + 1})
        return {"x": jnp.tanh(tree["x"]), "count": tree["count"]}

    def loss(params, batch):
        tree = batch
        for w in params:
            tree = block(tree, w)
        return jnp.mean(tree["x"]) * tree["count"]

    batch = {"x": X, "count": np.int32(3)}
    params = [W, 2 * W]
    stages = split(loss, params, batch)
    assert len(stages.stages) == 3
    # What is counted crosses, too, from the second stage on, and has no gradient.
    kinds = {(value.producer, value.like.dtype.name, value.has_gradient) for value in stages.values}
    assert kinds == {(0, "float32", True), (1, "float32", True), (1, "int32", False)}
    np.testing.assert_allclose(evaluate(stages, params, batch), loss(params, batch), rtol=1e-6)


def test_parameters_that_nothing_reads_stay_on_the_first_stage():
    def loss(params, x):
        return jnp.mean(pipeline.stage_boundary(x @ params["w"]) ** 2 + params["b"])

    stages = split(loss, {"w": W, "b": W[0], "unused": W})
    assert [stage.params for stage in stages.stages] == [(1, 2), (0,)]


def test_constants_go_where_they_are_read():
    table = jnp.arange(float(WIDTH))

    def loss(params, x):
        return jnp.mean(pipeline.stage_boundary(x @ params) * table)

    stages = split(loss, W)
    assert [len(stage.program.consts) for stage in stages.stages] == [0, 1]


def test_tasks_in_the_code_and_by_name():
    def layer(w, x):
        return jnp.tanh(x @ w)

    def with_tasks(params, x):
        x = pipeline.task(layer, stage=0)(params[0], x)
        x = pipeline.task(layer, "second", stage=0)(params[1], x * 2)
        x = pipeline.task(layer, stage=1)(params[2], x * 2)
        return jnp.mean(x)

    def with_scopes(params, x):
        for number, w in enumerate(params):
            with jax.named_scope(f"layers_{number}"):
                x = layer(w, x)
            x = x * 2
        return jnp.mean(x)

    params = [W, 2 * W, 3 * W]
    assert reads(split(with_tasks, params)) == [((0, 1), (0,), 0), ((2,), (), 1)]
    with pipeline.register_task(r"layers_(\d)", lambda match: int(match[1]) // 2):
        stages = split(with_scopes, params)
    assert reads(stages) == [((0, 1), (0,), 0), ((2,), (), 1)]
    np.testing.assert_allclose(evaluate(stages, params), with_scopes(params, X))
    assert len(split(with_scopes, params).stages) == 1


def test_a_mark_inside_scan_or_checkpoint_is_refused():
    def looped(params, x):
        def body(x, w):
            return pipeline.stage_boundary(x @ w), None

        return jnp.mean(jax.lax.scan(body, x, params)[0])

    with pytest.raises(UsageError, match="ends inside a loop"):
        split(looped, np.stack([W, W]))
    with pytest.raises(UsageError, match="ends inside a rematerialized function"):
        split(jax.checkpoint(lambda w, x: jnp.mean(pipeline.stage_boundary(x @ w))), W)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w, x: x @ w, "returns one scalar of floats"),
        (lambda w, x: (jnp.mean(x @ w), x), "returns one scalar of floats"),
        (lambda w, x: jnp.sum(x @ w).astype(int), "returns one scalar of floats"),
        (lambda w, x: jnp.mean(x), "does not depend on both"),
        (lambda w, x: jnp.mean(w), "does not depend on both"),
        (lambda w, x: (pipeline.stage_boundary(x @ w), jnp.mean(x @ w))[1], "does not go on with"),
        (lambda w, x: pipeline.stage_boundary(jnp.mean(x @ w)), "has nothing to do"),
        (lambda w, x: jnp.mean(pipeline.stage_boundary(x) @ w), "has nothing to do"),
        (
            lambda w, x: jnp.mean(
                pipeline.task(jnp.tanh, stage=0)(pipeline.task(jnp.tanh, stage=1)(x @ w))
            ),
            "reads what stage 1 makes",
        ),
        (
            lambda w, x: jnp.mean(pipeline.task(jnp.tanh, stage=1)(pipeline.stage_boundary(x @ w))),
            "both `stage_boundary` marks and tasks",
        ),
        (lambda w, x: jnp.mean(pipeline.task(jnp.tanh, stage=2)(x @ w)), "has nothing to do"),
    ],
)
def test_losses_that_cannot_be_cut(loss, words):
    with pytest.raises(UsageError, match=words):
        split(loss, W)


def test_wrong_marks_tasks_and_chains():
    with pytest.raises(UsageError, match="without arrays"):
        pipeline.stage_boundary({})
    with pytest.raises(WrongType, match="takes a function"):
        pipeline.task(3, stage=0)
    with pytest.raises(UsageError, match="from 0, got -1"):
        pipeline.task(jnp.tanh, stage=-1)
    with (
        pytest.raises(UsageError, match="not a regular expression"),
        pipeline.register_task("(", 0),
    ):
        pass
    with pytest.raises(WrongType, match="an int or a function"), pipeline.register_task("a", "b"):
        pass
    with (
        pipeline.register_task("scope", lambda match: -1),
        pytest.raises(UsageError, match="a stage is an int from 0"),
    ):
        split(jax.named_scope("scope")(lambda w, x: jnp.mean(x @ w)), W)
    with pytest.raises(UsageError, match="at least 1 stage"):
        pipeline.chain([], lambda y, batch: y)
    with pytest.raises(WrongType, match="are functions"):
        pipeline.chain([jnp.tanh], 3)
    chained = pipeline.chain([lambda w, x: x @ w] * 2, lambda y, batch: jnp.mean(y))
    with pytest.raises(UsageError, match="has 2 stages, and weights for 1"):
        chained([W], X)
    with pytest.raises(UsageError, match="cannot be divided evenly over 2 stages"):
        pipeline.split_layers({"w": np.ones((3, 2))}, 2)
    stages = pipeline.repeat_layer(lambda w, x: jnp.concatenate([x, x @ w]), 1)
    with pytest.raises(UsageError, match="must return what it takes"):
        stages[0](np.stack([W]), X)


def test_a_repeated_layer_equals_a_loop():
    layers = np.random.default_rng(0).standard_normal((6, WIDTH, WIDTH)).astype(np.float32)
    loss = pipeline.chain(
        pipeline.repeat_layer(lambda w, x: jnp.tanh(x @ w), 3), lambda y, batch: jnp.mean(y)
    )
    params = pipeline.split_layers(layers, 3)
    x = X
    for w in layers:
        x = jnp.tanh(x @ w)
    np.testing.assert_allclose(loss(params, X), jnp.mean(x), rtol=1e-5)
    assert len(split(loss, params).stages) == 3


def test_an_axis_that_is_left_to_xla_is_none():
    assert axes_of_entry(jax.P.UNCONSTRAINED) == ()
    assert (axes_of_entry("dp"), axes_of_entry(("dp", "tp")), axes_of_entry(None)) == (
        ("dp",),
        ("dp", "tp"),
        (),
    )
