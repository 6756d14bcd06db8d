"""Training steps of many kinds, small, for one device and without any sharding.

Each function gives a step, its abstract arguments and how many of these are state, which the first
results replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import ArrayClasses, StepClasses
from automesh.program.infer.search.layout import lay_out

ADAM = optax.adamw(1e-3)
B, T, D, H, K, F, V = 8, 32, 64, 4, 16, 256, 1000
XENT = optax.softmax_cross_entropy_with_integer_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A step.

    Attributes:
      names: what its arguments are called.
      num_state: leading arguments that the leading results replace.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...]
    num_state: int

    @property
    def leaf_names(self) -> list[str]:
        return [
            name + jax.tree_util.keystr(path)
            for name, arg in zip(self.names, self.args, strict=True)
            for path, _ in jax.tree_util.tree_leaves_with_path(arg)
        ]

    @property
    def carried(self) -> dict[int, int]:
        count = len(jax.tree.leaves(self.args[: self.num_state]))
        return {place: place for place in range(count)}

    def classes(self, *, with_names: bool = True) -> StepClasses:
        traced = jax.jit(self.step).trace(*self.args)
        names = self.leaf_names if with_names else ()
        return classes_of(traced.jaxpr, carried=self.carried, names=names)


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def trained(
    loss: Callable[..., Any], params: Any, *batch: Any, optimizer: Any = ADAM, names: str = "x y"
) -> Model:
    """A step that trains parameters by their gradient."""

    def step(params: Any, opt: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, slopes = jax.value_and_grad(loss)(params, *batch)
        updates, opt = optimizer.update(slopes, opt, params)
        return optax.apply_updates(params, updates), opt, value

    args = (params, jax.eval_shape(optimizer.init, params), *batch)
    return Model(step=step, args=args, names=("params", "opt", *names.split()), num_state=2)


def norm(x: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def attend(x: Any, memory: Any, p: Any, heads: int = H) -> Any:
    def parts(rows: Any) -> Any:
        return rows.reshape(*rows.shape[:2], heads, rows.shape[2] // heads)

    q, k, v = parts(x @ p["q"]), parts(memory @ p["k"]), parts(memory @ p["v"])
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*x.shape[:2], -1)


def transformer(layers: int = 2) -> Model:
    def layer() -> dict[str, Any]:
        return {
            **{name: f32(D, H * K) for name in "qkv"},
            "o": f32(H * K, D),
            "up": f32(D, F),
            "down": f32(F, D),
            "norm": f32(D),
        }

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["embed"][x] + p["pos"]
        for one in p["layers"]:
            n = norm(h, one["norm"])
            h = h + attend(n, n, one) @ one["o"]
            h = h + jax.nn.gelu(norm(h, one["norm"]) @ one["up"]) @ one["down"]
        return XENT(h @ p["out"], y).mean()

    params = {
        "embed": f32(V, D),
        "pos": f32(T, D),
        "layers": [layer() for _ in range(layers)],
        "out": f32(D, V),
    }
    return trained(loss, params, i32(B, T), i32(B, T))


def scanned_layers() -> Model:
    """Layers stacked and rematerialized, fewer heads of keys, gates in a dimension of their own,
    one table for lookup and head."""
    count, kv = 4, 2

    def loss(p: Any, x: Any, y: Any) -> Any:
        @jax.checkpoint
        def block(h: Any, one: Any) -> Any:
            n = norm(h, one["norm"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", n, one[name]) for name in "qkv")
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            h = h + jnp.einsum("bthk,hkd->btd", a, one["o"])
            g = jnp.einsum("btd,dcf->btcf", h, one["up"])
            return h + (jax.nn.silu(g[:, :, 0]) * g[:, :, 1]) @ one["down"], None

        h, _ = jax.lax.scan(block, p["embed"][x], p["layers"])
        return XENT(h @ p["embed"].T, y).mean()

    layers = {
        "q": f32(count, D, H, K),
        "k": f32(count, D, kv, K),
        "v": f32(count, D, kv, K),
        "o": f32(count, H, K, D),
        "up": f32(count, D, 2, F),
        "down": f32(count, F, D),
        "norm": f32(count, D),
    }
    return trained(loss, {"embed": f32(V, D), "layers": layers}, i32(B, T), i32(B, T))


def experts() -> Model:
    """One-hot dispatch of all tokens to experts with a capacity."""
    count, capacity = 8, 16

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["embed"][x].reshape(B * T, D)
        gate = jax.nn.softmax(h @ p["router"])
        one = jax.nn.one_hot(jnp.argmax(gate, -1), count)
        place = ((jnp.cumsum(one, 0) - 1) * one).sum(-1).astype(int)
        to = one[..., None] * jax.nn.one_hot(place, capacity)[:, None]
        inside = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", to, h), p["up"]))
        back = jnp.einsum("ecf,efd->ecd", inside, p["down"])
        h = h + jnp.einsum("tec,ecd->td", to * gate.max(-1)[:, None, None], back)
        return XENT((h @ p["out"]).reshape(B, T, V), y).mean()

    params = {
        "embed": f32(V, D),
        "router": f32(D, count),
        "up": f32(count, D, 2 * D),
        "down": f32(count, 2 * D, D),
        "out": f32(D, V),
    }
    return trained(loss, params, i32(B, T), i32(B, T))


def vision() -> Model:
    """Patches by a convolution, a class token, q, k and v in one dimension."""
    side, patch, channels, labels = 32, 8, 3, 10
    count = (side // patch) ** 2

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jax.lax.conv_general_dilated(
            x,
            p["patch"],
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ).reshape(B, count, D)
        h = jnp.concatenate([jnp.broadcast_to(p["cls"], (B, 1, D)), h], 1) + p["pos"]
        q, k, v = (one.reshape(B, count + 1, H, K) for one in jnp.split(h @ p["qkv"], 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        a = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, count + 1, D)
        h = h + a @ p["o"]
        h = h + jax.nn.gelu(h @ p["up"]) @ p["down"]
        return XENT(h[:, 0] @ p["head"], y).mean()

    params = {
        "patch": f32(patch, patch, channels, D),
        "cls": f32(1, 1, D),
        "pos": f32(1, count + 1, D),
        "qkv": f32(D, 3 * D),
        "o": f32(D, D),
        "up": f32(D, F),
        "down": f32(F, D),
        "head": f32(D, labels),
    }
    return trained(loss, params, f32(B, side, side, channels), i32(B))


def _conv(x: Any, w: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def unet() -> Model:
    side = 32

    def loss(p: Any, x: Any, t: Any) -> Any:
        a = jax.nn.relu(_conv(x + t[:, None, None, None], p["a"]))
        c = _conv(jax.nn.relu(_conv(a, p["b"], 2)), p["c"])
        up = jax.image.resize(c, (B, side, side, 32), "nearest")
        back = jax.nn.relu(_conv(jnp.concatenate([up, a], -1), p["up"]))
        return jnp.mean((_conv(back, p["out"]) - x) ** 2)

    params = {
        "a": f32(3, 3, 3, 16),
        "b": f32(3, 3, 16, 32),
        "c": f32(3, 3, 32, 32),
        "up": f32(3, 3, 48, 16),
        "out": f32(3, 3, 16, 3),
    }
    return trained(loss, params, f32(B, side, side, 3), f32(B), names="x t")


def recurrent() -> Model:
    """Batch first; the scan walks over the second dimension."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        def cell(h: Any, one: Any) -> Any:
            h = jnp.tanh(p["embed"][one] @ p["into"] + h @ p["again"])
            return h, h

        _, all_h = jax.lax.scan(cell, jnp.zeros((B, F)), x.T)
        return XENT(all_h.swapaxes(0, 1) @ p["out"], y).mean()

    params = {"embed": f32(V, D), "into": f32(D, F), "again": f32(F, F), "out": f32(F, V)}
    return trained(loss, params, i32(B, T), i32(B, T))


def state_space() -> Model:
    states = 16

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["embed"][x]
        a = jnp.exp(-jnp.exp(p["a"]))[None, None] * jnp.ones((B, T, 1, 1))
        b = h[..., None] * (h @ p["b"])[:, :, None]

        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, s = jax.lax.associative_scan(join, (a, b), axis=1)
        out = jnp.einsum("btdn,btn->btd", s, h @ p["c"])
        return XENT((h + out) @ p["out"], y).mean()

    params = {"embed": f32(V, D), **{name: f32(D, states) for name in "abc"}, "out": f32(D, V)}
    return trained(loss, params, i32(B, T), i32(B, T))


def graph() -> Model:
    edges, nodes, graphs, features = 256, 64, 8, 16

    def loss(p: Any, x: Any, weight: Any, s: Any, r: Any, owner: Any, y: Any) -> Any:
        h = jax.nn.relu(x @ p["enc"])
        sent = jnp.tanh(jnp.concatenate([h[s], h[r]], -1) @ p["message"]) * weight
        got = jax.ops.segment_sum(sent, r, nodes)
        h = h + jnp.tanh(jnp.concatenate([h, got], -1) @ p["update"])
        return jnp.mean((jax.ops.segment_sum(h, owner, graphs) @ p["out"] - y) ** 2)

    params = {
        "enc": f32(features, D),
        "message": f32(2 * D, D),
        "update": f32(2 * D, D),
        "out": f32(D, 1),
    }
    batch = (f32(nodes, features), f32(edges, 1), i32(edges), i32(edges), i32(nodes))
    return trained(loss, params, *batch, f32(graphs, 1), names="x weight s r owner y")


def frozen() -> Model:
    """A low-rank update of weights that stay."""
    rank = 4

    def loss(p: Any, base: Any, x: Any, y: Any) -> Any:
        h = base["embed"][x]
        h = h + jax.nn.relu(h @ base["up"] + base["bias"] + h @ p["a"] @ p["b"]) @ base["down"]
        return XENT(h @ base["out"], y).mean()

    base = {
        "embed": f32(V, D),
        "up": f32(D, F),
        "bias": f32(F),
        "down": f32(F, D),
        "out": f32(D, V),
    }
    params = {"a": f32(D, rank), "b": f32(rank, F)}
    return trained(loss, params, base, i32(B, T), i32(B, T), names="base x y")


def recommender() -> Model:
    """Tables of several sizes; the columns of the ids look up in one each."""

    def loss(p: Any, dense: Any, ids: Any, y: Any) -> Any:
        looked = [table[ids[:, place]] for place, table in enumerate(p["tables"])]
        h = jax.nn.relu(jnp.concatenate([*looked, dense], -1) @ p["up"])
        return jnp.mean(optax.sigmoid_binary_cross_entropy((h @ p["out"])[:, 0], y))

    params = {
        "tables": [f32(size, 16) for size in (1000, 1000, 5000)],
        "up": f32(3 * 16 + 13, 64),
        "out": f32(64, 1),
    }
    batch = (f32(64, 13), i32(64, 3), f32(64))
    return trained(loss, params, *batch, optimizer=optax.adagrad(1e-2), names="dense ids y")


def encoder_decoder() -> Model:
    source, target = 24, 16

    def loss(p: Any, x: Any, y: Any) -> Any:
        memory = p["source"][x]
        memory = memory + attend(memory, memory, p["enc"]) @ p["enc"]["o"]
        h = p["target"][y[:, :-1]]
        h = h + attend(h, memory, p["cross"]) @ p["cross"]["o"]
        return XENT(h @ p["out"], y[:, 1:]).mean()

    layer = {**{name: f32(D, H * K) for name in "qkv"}, "o": f32(H * K, D)}
    params = {
        "source": f32(V, D),
        "target": f32(V, D),
        "enc": layer,
        "cross": layer,
        "out": f32(D, V),
    }
    return trained(loss, params, i32(B, source), i32(B, target))


def two_optimizers() -> Model:
    rows, noise = 32, 16
    adam, sgd = optax.adam(1e-3), optax.sgd(1e-2, momentum=0.9)

    def made(g: Any, z: Any) -> Any:
        return jnp.tanh(jax.nn.relu(z @ g["up"]) @ g["down"])

    def score(d: Any, x: Any) -> Any:
        return jax.nn.relu(x @ d["up"]) @ d["down"]

    def step(g: Any, d: Any, for_g: Any, for_d: Any, slow: Any, key: Any, x: Any) -> Any:
        z = jax.random.normal(key, (rows, noise))

        def loss_d(d: Any) -> Any:
            return jnp.mean(jax.nn.softplus(-score(d, x)) + jax.nn.softplus(score(d, made(g, z))))

        lost, slopes = jax.value_and_grad(loss_d)(d)
        updates, for_d = sgd.update(slopes, for_d, d)
        d = optax.apply_updates(d, updates)
        slopes = jax.grad(lambda g: jnp.mean(jax.nn.softplus(-score(d, made(g, z)))))(g)
        updates, for_g = adam.update(slopes, for_g, g)
        g = optax.apply_updates(g, updates)
        slow = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, slow, g)
        return g, d, for_g, for_d, slow, lost

    g = {"up": f32(noise, 128), "down": f32(128, D)}
    d = {"up": f32(D, 96), "down": f32(96, 1)}
    key = jax.eval_shape(jax.random.key, 0)
    args = (
        g,
        d,
        jax.eval_shape(adam.init, g),
        jax.eval_shape(sgd.init, d),
        g,
        key,
        f32(rows, D),
    )
    names = ("g", "d", "for_g", "for_d", "slow", "key", "x")
    return Model(step=step, args=args, names=names, num_state=5)


def stencil() -> Model:
    """No gradient: neighbours by rolls, slices and padding."""
    side = 256

    def step(u: Any, p: Any) -> Any:
        around = sum(jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)) - 4 * u
        inner = u[1:-1, 1:-1] - 0.1 * (u[1:-1, 1:-1] - u[:-2, 1:-1]) + 0.01 * around[1:-1, 1:-1]
        u = u.at[1:-1, 1:-1].set(inner)
        return u, p + jnp.pad(u[1:] - u[:-1], ((0, 1), (0, 0)))

    return Model(step=step, args=(f32(side, side),) * 2, names=("u", "p"), num_state=2)


def batch_norm() -> Model:
    def step(params: Any, means: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p["up"]
            mean, var = h.mean(0), h.var(0)
            h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-5) * p["scale"])
            new = {
                "mean": 0.9 * means["mean"] + 0.1 * mean,
                "var": 0.9 * means["var"] + 0.1 * var,
            }
            return XENT(h @ p["out"], y).mean(), new

        (value, new), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes), new, value

    params = {"up": f32(D, F), "scale": f32(F), "out": f32(F, 10)}
    means = {"mean": f32(F), "var": f32(F)}
    args = (params, means, f32(B, D), i32(B))
    return Model(step=step, args=args, names=("params", "means", "x", "y"), num_state=2)


def target_network() -> Model:
    """Of reinforcement learning: each row looks up at its own place and its action's."""
    rows, seen, actions = 32, 16, 4

    def value(p: Any, seen: Any) -> Any:
        return jax.nn.relu(seen @ p["up"]) @ p["out"]

    def step(p: Any, target: Any, opt: Any, n: Any, now: Any, act: Any, won: Any, then: Any) -> Any:
        def loss(p: Any) -> Any:
            wanted = won + 0.99 * value(target, then).max(-1)
            return jnp.mean((value(p, now)[jnp.arange(rows), act] - wanted) ** 2)

        lost, slopes = jax.value_and_grad(loss)(p)
        updates, opt = ADAM.update(slopes, opt, p)
        p = optax.apply_updates(p, updates)
        target = jax.tree.map(lambda old, new: jnp.where(n % 100 == 0, new, old), target, p)
        return p, target, opt, n + 1, lost

    p = {"up": f32(seen, D), "out": f32(D, actions)}
    batch = (f32(rows, seen), i32(rows), f32(rows), f32(rows, seen))
    args = (p, p, jax.eval_shape(ADAM.init, p), i32(), *batch)
    names = ("p", "target", "opt", "n", "now", "act", "won", "then")
    return Model(step=step, args=args, names=names, num_state=4)


MODELS: Sequence[Callable[[], Model]] = (
    transformer,
    scanned_layers,
    experts,
    vision,
    unet,
    recurrent,
    state_space,
    graph,
    frozen,
    recommender,
    encoder_decoder,
    two_optimizers,
    stencil,
    batch_norm,
    target_network,
)


def argument(found: StepClasses, name: str) -> ArrayClasses:
    """Returns the classes of an argument."""
    return next(one for one in found.arguments if one.name == name)


def searched(found: StepClasses) -> list[str]:
    """Returns the names of the classes that a search splits over mesh axes of their own."""
    return [one.name for one in lay_out(found, num_devices=8, script="train.py").logical]


def descended(loss: Any, p: Any, *args: Any) -> Any:
    """Returns parameters after a step of gradient descent, and the loss."""
    value, grads = jax.value_and_grad(loss)(p, *args)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value
