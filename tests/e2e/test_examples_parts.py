"""What the examples are made of: attention, routing, AdamW, batches; and the shipped spaces."""

from __future__ import annotations

import tomllib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from automesh.plugins.offered import FRAMEWORKS, offered
from tests.support.example_runs import EXAMPLES, NAMES, build, device_mesh, module

SPACES = EXAMPLES.parent / "search_spaces"


def plain_attention(queries, keys_values):
    """Softmax over all keys at once."""
    keys, values = keys_values
    scores = jnp.einsum("bskgh,btkh->bskgt", queries, keys) / np.sqrt(queries.shape[-1])
    seen = np.tril(np.ones((queries.shape[1], keys.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf))
    return jnp.einsum("bskgt,btkh->bskgh", weights, values)


def attentions():
    mesh = device_mesh({"dp": 2, "tp": 2, "sp": 4})
    alone = device_mesh({})
    layout = module("lm.layout").Layout
    gathered = module("lm.attention").gathered_attention
    ring = module("long_context").ring_attention
    return {
        "gathered, chunks of 8": partial(gathered, layout=layout(mesh=mesh), chunk=8),
        "ring of 4, whole pieces": partial(ring, layout=layout(mesh=mesh), chunk=32),
        "ring of 4, chunks of 2": partial(ring, layout=layout(mesh=mesh), chunk=2),
        "ring of 1, chunks of 8": partial(ring, layout=layout(mesh=alone), chunk=8),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(attentions()))
def test_attention_and_its_gradients_equal_plain_softmax(kind):
    keys = jax.random.split(jax.random.key(1), 3)
    queries = 3 * jax.random.normal(keys[0], (2, 32, 2, 3, 8))
    keys_values = 3 * jax.random.normal(keys[1], (2, 2, 32, 2, 8))
    weights = jax.random.normal(keys[2], queries.shape)

    def value(attention, queries, keys_values):
        return jnp.sum(attention(queries, keys_values) * weights)

    slopes = jax.jit(jax.grad(value, argnums=(1, 2)), static_argnums=0)
    attention = attentions()[kind]
    expected = plain_attention(queries, keys_values)
    np.testing.assert_allclose(jax.jit(attention)(queries, keys_values), expected, atol=2e-5)
    for got, wanted in zip(
        slopes(attention, queries, keys_values), slopes(plain_attention, queries, keys_values)
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-4)


def test_rotation_depends_on_the_distance_alone():
    rotated = module("lm.attention").rotated
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

    def score(query_at, key_at):
        turned = (
            rotated(query[None], jnp.array([query_at])),
            rotated(key[None], jnp.array([key_at])),
        )
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(14, 10), rel=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-2)


def test_experts_take_no_more_than_their_capacity_first_come_first_served():
    moe = module("moe_lm")
    experts = moe.Experts(total=4, chosen=2)
    # Three tokens that all want expert 2 most, then expert 0.
    x = jnp.ones((1, 3, 2))
    router = jnp.array([[1.0, 0.0, 2.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    routes = moe.route(x, router, experts, capacity=2)
    dropped = 4 * 2
    assert routes.slot.tolist() == [[[2 * 2, 0], [2 * 2 + 1, 1], [dropped, dropped]]]
    e1, e2 = np.exp(1.0), np.exp(2.0)
    np.testing.assert_allclose(routes.share[0, 0], [e2 / (e1 + e2), e1 / (e1 + e2)], rtol=1e-6)
    # Half of the visits each to experts 2 and 0: 4 * (odds of 2 + odds of 0) / 2.
    odds = np.exp([1.0, 0.0, 2.0, -1.0]) / np.exp([1.0, 0.0, 2.0, -1.0]).sum()
    np.testing.assert_allclose(routes.balance, [2 * (odds[2] + odds[0])], rtol=1e-6)


def test_tokens_do_overflow_the_experts_of_the_tiny_preset():
    moe = module("moe_lm")
    experts = moe.EXPERTS["tiny"]
    x = jax.random.normal(jax.random.key(0), (48, 48, 48))
    router = jax.random.normal(jax.random.key(1), (48, 8)) / 48**0.5
    capacity = experts.capacity(48)
    slot = np.asarray(moe.route(x, router, experts, capacity).slot)
    kept = slot < experts.total * capacity
    assert 0.01 < 1 - kept.mean() < 0.3
    for row, used in zip(slot, kept):
        assert len(np.unique(row[used])) == used.sum()


def _start(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = module("lm.adamw").State
    return state(params=params, mean=zeros, square=zeros, count=jnp.zeros((), jnp.int32))


def test_adamw_takes_the_step_of_the_paper():
    adamw = module("lm.adamw")
    optimizer = adamw.AdamW(learning_rate=0.1, warmup=4, clip=1e9)
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(2, 3, 4)), "scale": rng.normal(size=(2, 3))}
    state = _start(jax.tree.map(jnp.float32, start))
    mean = {name: np.zeros_like(w) for name, w in start.items()}
    square = {name: np.zeros_like(w) for name, w in start.items()}
    params = dict(start)
    for t in (1, 2, 3):
        gradients = {name: rng.normal(size=w.shape) for name, w in start.items()}
        state = adamw.update(state, jax.tree.map(jnp.float32, gradients), optimizer)
        for name, g in gradients.items():
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g**2
            step = mean[name] / (1 - 0.9**t) / (np.sqrt(square[name] / (1 - 0.95**t)) + 1e-8)
            decay = 0.1 if name == "matrix" else 0.0
            params[name] = params[name] - 0.1 * t / 4 * (step + decay * params[name])
    for name, expected in params.items():
        np.testing.assert_allclose(state.params[name], expected, rtol=1e-4, atol=1e-6)


def test_adamw_clips_by_the_global_norm():
    adamw = module("lm.adamw")
    gradients = {"a": jnp.full((3,), 3.0), "b": jnp.full((1,), 3.0)}  # norm 6
    state = adamw.update(_start(gradients), gradients, adamw.AdamW(clip=1.0))
    np.testing.assert_allclose(state.mean["a"], np.full(3, 0.1 * 3 / 6), rtol=1e-5)


def test_sgd_takes_clipped_steps_and_keeps_no_moments():
    sgd, state = module("lm.sgd"), module("lm.adamw").State
    optimizer = sgd.SGD(learning_rate=0.2, warmup=2, clip=1.0)
    params = {"a": jnp.zeros((3,)), "b": jnp.ones((1,))}
    gradients = {"a": jnp.full((3,), 3.0), "b": jnp.full((1,), 3.0)}  # norm 6
    first = state(params=params, mean=None, square=None, count=jnp.zeros((), jnp.int32))
    second = sgd.update(first, gradients, optimizer)
    third = sgd.update(second, gradients, optimizer)
    assert (third.mean, third.square, int(third.count)) == (None, None, 2)
    np.testing.assert_allclose(second.params["a"], -0.1 * 3 / 6, rtol=1e-5)
    np.testing.assert_allclose(third.params["b"], 1 - (0.1 + 0.2) * 3 / 6, rtol=1e-5)
    unclipped = sgd.Unclipped(optimizer=optimizer)
    added, count = unclipped.update(gradients, unclipped.init(params), params)
    np.testing.assert_allclose(added["a"], -0.1 * 3, rtol=1e-5)
    assert int(count) == 1


def test_targets_are_the_next_bytes():
    batch = next(module("lm.text").batches(4, 32))
    assert batch["inputs"].shape == batch["targets"].shape == (4, 32)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    again = next(module("lm.text").batches(4, 32))
    np.testing.assert_array_equal(batch["inputs"], again["inputs"])


PIPELINES = {f"{name}_pipeline": name for name in NAMES if name != "long_context"}
SHIPPED = ("auto", *NAMES, *PIPELINES)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_space_names_what_there_is(name):
    space = tomllib.loads((SPACES / f"{name}.toml").read_text())
    axes = {"dp", "fsdp", "ep", "tp", "sp"} | ({"pp"} if name in PIPELINES else set())
    facts = {} if name == "auto" else build(PIPELINES.get(name, name), {}).facts
    assert set(space) <= {"axes", "batch_axes", "constraints", "knobs", "compiler_options"}
    assert set(space["batch_axes"]) <= set(space["axes"])
    assert set(space["axes"]) <= axes
    of_pipelines = {"schedule", "virtual_stages"} if name in PIPELINES else set[str]()
    assert set(space["knobs"]) - {"remat"} == {"microbatches"} | of_pipelines
    for product, condition in space.get("constraints", {}).items():
        assert set(product.split("*")) <= {*space["axes"], *space["knobs"]}
        assert set(condition) == {"divides"} and condition["divides"] in facts


def test_every_shipped_space_is_tested():
    # Those of frameworks have adapters, and tests, of their own: `plugins/frameworks/tests/steps`.
    assert {path.stem for path in SPACES.glob("*.toml")} == {*SHIPPED, *offered(FRAMEWORKS)}
