"""Kinds of training that public scripts have: acting before learning, ensembles, quantized weights,
state spaces, scaled losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from automesh.program.infer.nouns import CautionKind, Role
from automesh.program.infer.search.layout import lay_out
from tests.support.infer_models import ADAM, Model, argument, descended, f32

ENVS, STEPS, SEEN, WIDTH = 16, 4, 8, 32


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def acting() -> Model:
    """The state goes through a loop of actions; then epochs take its rows in a drawn order."""

    def policy(p: Any, seen: Any) -> Any:
        return jnp.tanh(seen @ p["up"]) @ p["down"]

    def step(p: Any, opt: Any, seen: Any, key: Any) -> Any:
        def act(state: Any, key: Any) -> Any:
            p, opt, seen = state
            action = policy(p, seen) + jax.random.normal(key, (ENVS, SEEN))
            return (p, opt, jnp.tanh(seen + action)), (seen, action)

        own, drawn, key = jax.random.split(key, 3)
        (p, opt, seen), rows = jax.lax.scan(act, (p, opt, seen), jax.random.split(own, STEPS))
        places = jax.random.permutation(drawn, ENVS * STEPS)
        rows = jax.tree.map(lambda x: x.reshape(ENVS * STEPS, SEEN)[places], rows)
        parts = jax.tree.map(lambda x: x.reshape(2, -1, SEEN), rows)

        def learn(state: Any, part: Any) -> Any:
            p, opt = state
            grads = jax.grad(lambda p: jnp.mean((policy(p, part[0]) - part[1]) ** 2))(p)
            updates, opt = ADAM.update(grads, opt, p)
            return (jax.tree.map(jnp.add, p, updates), opt), None

        (p, opt), _ = jax.lax.scan(learn, (p, opt), parts)
        return p, opt, seen, key

    p = {"down": f32(WIDTH, SEEN), "up": f32(SEEN, WIDTH)}
    return Model(
        step=step,
        args=(p, jax.eval_shape(ADAM.init, p), f32(ENVS, SEEN), key()),
        names=("p", "opt", "seen", "key"),
        num_state=4,
    )


def test_who_acts_before_learning_has_moments_and_two_batches() -> None:
    found = acting().classes()
    roles = {one.name: one.role for one in found.arguments}
    assert {role for name, role in roles.items() if name.startswith("p[")} == {Role.PARAMETER}
    assert {role for name, role in roles.items() if "mu" in name or "nu" in name} == {Role.MOMENT}
    assert {(one.name, one.parts) for one in found.batches} == {("batch", 32), ("envs", ENVS)}
    assert argument(found, "seen").dims[0] == "envs"
    assert ((2, 32, SEEN), ("", "batch", "")) in [(one.shape, one.dims) for one in found.inner]
    layout = lay_out(found, num_devices=8, script="train.py")
    assert {"batch", "envs"} <= {one.name for one in layout.logical}


def test_rows_that_are_drawn_by_priority_are_a_batch() -> None:
    """`jax.random.choice` searches sorted numbers, which is one operation in newer releases."""

    def step(w: Any, seen: Any, priority: Any, key: Any) -> Any:
        places = jax.random.choice(key, 256, (64,), p=priority)
        return *descended(lambda w, x: jnp.mean((x @ w) ** 2), w, seen[places]), key

    found = Model(
        step=step,
        args=(f32(SEEN, WIDTH), f32(256, SEEN), f32(256), key()),
        names=("w", "seen", "priority", "key"),
        num_state=1,
    ).classes()
    assert [(one.name, one.size) for one in found.batches] == [("batch", 64)]
    assert CautionKind.UNKNOWN_OPERATION not in {one.kind for one in found.cautions}


def test_frozen_weights_of_integers_are_split_like_those_of_floats() -> None:
    def step(a: Any, frozen: Any, x: Any) -> Any:
        def loss(a: Any) -> Any:
            blocks = frozen["q"].astype(jnp.float32) * frozen["scale"]
            return jnp.mean((x @ (blocks.reshape(WIDTH, 64) + a)) ** 2)

        return descended(loss, a)

    q = jax.ShapeDtypeStruct((4, 8, 64), jnp.int8)
    frozen = {"q": q, "scale": f32(4, 1, 64)}
    found = Model(
        step=step,
        args=(f32(WIDTH, 64), frozen, f32(16, WIDTH)),
        names=("a", "frozen", "x"),
        num_state=1,
    ).classes()
    assert argument(found, "frozen['q']").role == Role.FROZEN
    assert argument(found, "frozen['scale']").role == Role.FROZEN
    layout = lay_out(found, num_devices=8, script="train.py")
    (q_split,) = [one.split for one in layout.arguments if one.name == "frozen['q']"]
    assert any("params" in part for part in q_split)


def test_data_that_is_solved_is_no_frozen_weight() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            apart = (x[:, None] / p - x[None] / p) ** 2
            kernel = jnp.exp(-apart.sum(-1)) + jnp.eye(WIDTH)
            return y @ jnp.linalg.solve(kernel, y)

        return descended(loss, p)

    found = Model(
        step=step, args=(f32(4), f32(WIDTH, 4), f32(WIDTH)), names=("p", "x", "y"), num_state=1
    ).classes()
    assert [one.role for one in found.arguments] == [Role.PARAMETER, Role.DATA, Role.DATA]


def test_experts_of_tokens_that_are_sorted_have_an_axis_of_their_own() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            rows = x.reshape(-1, WIDTH)
            weight, chosen = jax.lax.top_k(jax.nn.softmax(rows @ p["router"]), 1)
            order = jnp.argsort(chosen[:, 0])
            sizes = jnp.bincount(chosen[:, 0], length=8)
            made = jax.nn.silu(jax.lax.ragged_dot(rows[order], p["up"], sizes))
            made = jax.lax.ragged_dot(made, p["down"], sizes) * weight[order]
            return jnp.mean(jnp.zeros_like(rows).at[order].add(made) ** 2)

        return descended(loss, p)

    p = {"down": f32(8, 64, WIDTH), "router": f32(WIDTH, 8), "up": f32(8, WIDTH, 64)}
    found = Model(step=step, args=(p, f32(8, 16, WIDTH)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['up']").dims[0] == "expert"
    assert argument(found, "p['router']").dims[1] == "expert"
    layout = lay_out(found, num_devices=8, script="train.py")
    (choices,) = [one.choices for one in layout.logical if one.name == "expert"]
    assert choices == ((), ("ep",))


def test_what_is_trained_side_by_side_has_branches_and_no_experts() -> None:
    def step(p: Any, rate: Any, x: Any) -> Any:
        def one(p: Any, rate: Any) -> Any:
            grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(p)
            return jax.tree.map(lambda p, g: p - rate * g, p, grads)

        return jax.vmap(one)(p, rate)

    p = {"down": f32(8, 64, SEEN), "up": f32(8, WIDTH, 64)}
    found = Model(
        step=step, args=(p, f32(8), f32(16, WIDTH)), names=("p", "rate", "x"), num_state=1
    ).classes()
    assert argument(found, "p['up']").dims[0] == argument(found, "rate").dims[0] == "branch"
    layout = lay_out(found, num_devices=8, script="train.py")
    assert ("branch", ((), ("ep",))) in [(one.name, one.choices) for one in layout.logical]


def state_space() -> Model:
    """Each of 64 channels has a state of 4 numbers with rates of its own, in the style of Mamba."""

    def block(p: Any, x: Any) -> Any:
        gate, h = jnp.split(x @ p["into"], 2, -1)
        keep = jnp.exp(jnp.einsum("btd,dn->btdn", jax.nn.softplus(h), -p["rates"]))
        b, c = jnp.split(h @ p["both"], 2, -1)
        write = jnp.einsum("btd,btn,btd->btdn", h, b, h)

        def turn(state: Any, now: Any) -> Any:
            state = now[0] * state + now[1]
            return state, jnp.einsum("bdn,bn->bd", state, now[2])

        by_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (keep, write, c))
        _, made = jax.lax.scan(turn, jnp.zeros((len(x), 64, 4)), by_time)
        return x + (made.swapaxes(0, 1) * jax.nn.silu(gate)) @ p["out"]

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = block(p["two"], block(p["one"], p["embed"][x]))
            scores = jax.nn.log_softmax(h @ p["embed"].T)
            return -jnp.mean(jnp.take_along_axis(scores[:, :-1], x[:, 1:, None], -1))

        return descended(loss, p)

    p = {"both": f32(64, 8), "into": f32(WIDTH, 128), "out": f32(64, WIDTH), "rates": f32(64, 4)}
    state = {"embed": f32(96, WIDTH), "one": p, "two": p}
    return Model(step=step, args=(state, int32(8, 16)), names=("p", "x"), num_state=1)


def test_channels_of_a_state_space_are_no_experts_and_no_heads() -> None:
    found = state_space().classes()
    # A scan carries them.
    assert argument(found, "p['one']['out']").dims == ("hidden", "embed")
    assert argument(found, "p['one']['into']").dims == ("embed", "hidden_x2")
    assert argument(found, "p['one']['rates']").dims == ("hidden", "hidden2")
    # The gradient of the carried state has the classes of the rates, and is no gradient of them.
    assert CautionKind.PER_EXAMPLE_GRADIENTS not in {one.kind for one in found.cautions}


def test_the_scale_of_a_loss_is_no_parameter_and_a_constant_is_no_loss() -> None:
    def step(w: Any, scale: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: scale * jnp.mean((x @ w) ** 2))(w)
        grad = grad / scale
        is_finite = jnp.isfinite(grad).all()
        w = jnp.where(is_finite, w - 0.1 * grad, w)
        return w, jnp.where(is_finite, scale * 2, scale / 2), jnp.float32(0.9), value

    found = Model(
        step=step,
        args=(f32(WIDTH, 64), f32(), f32(16, WIDTH)),
        names=("w", "scale", "x"),
        num_state=2,
    ).classes()
    assert [one.role for one in found.arguments] == [Role.PARAMETER, Role.STATISTIC, Role.DATA]
    assert [one.role for one in found.results][2:] == [Role.OUTPUT, Role.LOSS]
    assert found.loss == 3


def test_gates_end_to_end_count_for_the_name_of_what_they_are_of() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = p["embed"][x]
            gate, up = jnp.split(h @ p["gates"], 2, -1)
            scores = jax.nn.log_softmax((h + jax.nn.silu(gate) * up @ p["down"]) @ p["out"])
            return -jnp.mean(jnp.take_along_axis(scores[:, :-1], x[:, 1:, None], -1))

        return descended(loss, p)

    p = {"down": f32(64, WIDTH), "embed": f32(96, WIDTH), "gates": f32(WIDTH, 128)}
    p |= {"out": f32(WIDTH, 96)}
    found = Model(step=step, args=(p, int32(8, 16)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['gates']").dims == ("embed", "mlp_x2")
    assert argument(found, "p['down']").dims == ("mlp", "embed")


def test_the_rank_of_an_adapter_is_a_bottleneck() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = p["embed"][x]
            for one in p["layers"]:
                h = h + jax.nn.gelu(h @ one["up"]) @ one["down"] + h @ one["a"] @ one["b"]
            scores = jax.nn.log_softmax(h @ p["embed"].T)
            return -jnp.mean(jnp.take_along_axis(scores[:, :-1], x[:, 1:, None], -1))

        return descended(loss, p)

    layer = {"a": f32(WIDTH, 4), "b": f32(4, WIDTH), "down": f32(64, WIDTH), "up": f32(WIDTH, 64)}
    p = {"embed": f32(96, WIDTH), "layers": [layer, layer]}
    found = Model(step=step, args=(p, int32(8, 16)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['layers'][0]['a']").dims == ("embed", "bottleneck")
    assert argument(found, "p['layers'][1]['up']").dims == ("embed", "mlp")


def test_latents_that_attend_to_rows_with_learned_positions_have_heads_without_groups() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            rows = x @ p["in"] + p["positions"]
            latents = jnp.broadcast_to(p["latents"], (8, 6, WIDTH))
            q = jnp.einsum("ble,ehd->blhd", latents, p["q"])
            k, v = (jnp.einsum("bse,ehd->bshd", rows, p[name]) for name in "kv")
            weights = jax.nn.softmax(jnp.einsum("blhd,bshd->bhls", q, k))
            made = jnp.einsum("bhls,bshd->blhd", weights, v)
            return jnp.mean(jnp.einsum("blhd,hde->ble", made, p["o"]) ** 2)

        return descended(loss, p)

    p = {name: f32(WIDTH, 4, 8) for name in "kqv"} | {"o": f32(4, 8, WIDTH)}
    p |= {"in": f32(12, WIDTH), "latents": f32(6, WIDTH), "positions": f32(20, WIDTH)}
    found = Model(step=step, args=(p, f32(8, 20, 12)), names=("p", "x"), num_state=1).classes()
    for name in "kqv":
        assert argument(found, f"p['{name}']").dims[1] == "heads"
        assert argument(found, f"p['{name}']").dims[2].startswith("head_dim")


def test_queries_without_a_batch_have_heads_and_no_branches() -> None:
    """Latents are projected before any row of the data is: their queries have no batch."""

    def one(p: Any, x: Any) -> Any:
        rows = x @ p["in"]
        q = (p["latents"] @ p["q"]).reshape(6, 4, 8)
        k, v = ((rows @ p[name]).reshape(-1, 4, 8) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("lhd,shd->hls", q, k))
        h = p["latents"] + jnp.einsum("hls,shd->lhd", weights, v).reshape(6, -1) @ p["o"]
        seen = jax.nn.softmax(jnp.einsum("hd,lhd->hl", p["query"], (h @ p["k2"]).reshape(6, 4, 8)))
        return jnp.einsum("hl,lhd->hd", seen, (h @ p["v2"]).reshape(6, 4, 8)).reshape(-1) @ p["out"]

    def step(p: Any, x: Any, y: Any) -> Any:
        return descended(lambda p: jnp.mean((jax.vmap(one, (None, 0))(p, x) - y) ** 2), p)

    p = {name: f32(WIDTH, 32) for name in ("k", "q", "v", "o", "k2", "v2")}
    p |= {"in": f32(12, WIDTH), "latents": f32(6, WIDTH), "out": f32(32, 10), "query": f32(4, 8)}
    found = Model(
        step=step, args=(p, f32(8, 20, 12), f32(8, 10)), names=("p", "x", "y"), num_state=1
    ).classes()
    assert "branch" not in {one.name for one in found.classes}
    for name in ("k", "q", "v", "k2", "v2"):
        assert argument(found, f"p['{name}']").dims[1].startswith("heads")
    first, second = argument(found, "p['query']").dims
    assert (first[:5], second[:8]) == ("heads", "head_dim")


def test_an_ensemble_that_attends_has_branches_and_heads() -> None:
    def one(p: Any, x: Any) -> Any:
        rows = x @ p["in"]
        q, k, v = (jnp.einsum("bse,ehd->bshd", rows, p[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("blhd,bshd->bhls", q, k))
        return jnp.mean(
            (jnp.einsum("bhls,bshd->blhd", weights, v).reshape(8, 20, -1) @ p["o"]) ** 2
        )

    def step(p: Any, x: Any) -> Any:
        return descended(lambda p: jax.vmap(one, (0, None))(p, x).sum(), p)

    p = {name: f32(4, WIDTH, 4, 8) for name in "kqv"} | {
        "in": f32(4, 12, WIDTH),
        "o": f32(4, 32, 10),
    }
    found = Model(step=step, args=(p, f32(8, 20, 12)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['q']").dims == ("branch", "embed", "heads", "head_dim")


def test_blocks_of_an_image_network_have_a_width_inside() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            names = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(x, p["stem"], (4, 4), "VALID", dimension_numbers=names)
            inside = jax.lax.conv_general_dilated(
                h, p["deep"], (1, 1), "SAME", dimension_numbers=names, feature_group_count=16
            )
            return jnp.mean((h + jax.nn.gelu(inside @ p["up"]) @ p["down"]) ** 2)

        return descended(loss, p)

    p = {"deep": f32(7, 7, 1, 16), "down": f32(64, 16), "stem": f32(4, 4, 3, 16), "up": f32(16, 64)}
    found = Model(step=step, args=(p, f32(8, 32, 32, 3)), names=("p", "x"), num_state=1).classes()
    channels, width = argument(found, "p['up']").dims
    assert (channels[:8], width) == ("channels", "mlp")
