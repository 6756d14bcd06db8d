"""Samples that follow a gradient, rows that a step draws or cuts out, many small matrices, and
networks side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind, Role
from automesh.program.infer.search.layout import lay_out
from tests.support.infer_models import Model, argument, descended, f32


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def batches(model: Model) -> dict[str, int]:
    return {one.name: one.size for one in model.classes().classes if one.is_batch}


def energy(p: Any, x: Any) -> Any:
    return (jnp.tanh(x @ p["w1"]) @ p["w2"])[..., 0]


def moved(p: Any, x: Any, key: Any) -> Any:
    """Three turns of Langevin dynamics."""

    def turn(x: Any, key: Any) -> Any:
        slope = jax.grad(lambda x: energy(p, x).sum())(x)
        return x - 0.1 * slope + 0.1 * jax.random.normal(key, x.shape), None

    return jax.lax.scan(turn, x, jax.random.split(key, 3))[0]


NETWORK = {"w1": f32(24, 128), "w2": f32(128, 1)}


def test_walkers_that_follow_their_own_gradient_are_no_parameters() -> None:
    """Before, they were split over tp, and the step had no batch."""

    def step(p: Any, walkers: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        walkers = moved(p, walkers, own)
        return *descended(lambda p: jnp.mean(energy(p, walkers)), p), walkers, key

    def ordered(p: Any, walkers: Any, key: Any) -> Any:
        p, loss, walkers, key = step(p, walkers, key)
        return p, walkers, key, loss

    model = Model(
        step=ordered, args=(NETWORK, f32(256, 24), KEY), names=("p", "x", "key"), num_state=3
    )
    assert argument(model.classes(), "x").role is Role.STATISTIC
    assert batches(model) == {"batch": 256}


def test_a_buffer_of_samples_that_follow_a_gradient_is_a_data_set() -> None:
    def step(p: Any, buffer: Any, key: Any, x: Any) -> Any:
        key, pick, own = jax.random.split(key, 3)
        rows = jax.random.randint(pick, (64,), 0, 1024)
        drawn = moved(p, buffer[rows], own)
        p, loss = descended(lambda p: jnp.mean(energy(p, x)) - jnp.mean(energy(p, drawn)), p)
        return p, buffer.at[rows].set(drawn), key, loss

    model = Model(
        step=step,
        args=(NETWORK, f32(1024, 24), KEY, f32(64, 24)),
        names=("p", "buffer", "key", "x"),
        num_state=3,
    )
    found = model.classes()
    assert argument(found, "buffer").role is Role.STATISTIC
    assert CautionKind.GATHERS_DATA_SET in {one.kind for one in found.cautions}
    assert batches(model)["batch"] == 64


@pytest.mark.parametrize("which", ["all", "one"])
def test_parameters_with_noise_in_their_gradients_stay_parameters(which: str) -> None:
    def noisy(w: Any, g: Any, key: Any) -> Any:
        if which == "one" and w.shape != (24, 128):
            return w - 0.1 * g
        return w - 0.1 * (g + jax.random.normal(key, g.shape))

    def step(p: Any, key: Any, x: Any) -> Any:
        key, own = jax.random.split(key)
        loss, slopes = jax.value_and_grad(lambda p: jnp.mean(energy(p, x)))(p)
        return (
            jax.tree.map(lambda w, g: w - 0.1 * (g + jax.random.normal(own, g.shape)), p, slopes),
            key,
            loss,
        )

    model = Model(step=step, args=(NETWORK, KEY, f32(64, 24)), names=("p", "key", "x"), num_state=2)
    assert argument(model.classes(), "p['w1']").role is Role.PARAMETER


@pytest.mark.parametrize("where", ["before the loss", "in a walk"])
def test_a_batch_of_small_matrices_stays_a_batch(where: str) -> None:
    """Before, factorizing one matrix for each example kept the whole batch together."""

    def step(p: Any, x: Any, y: Any) -> Any:
        u, _, v = jnp.linalg.svd(jnp.einsum("bni,bnj->bij", x, y))
        turned = jnp.einsum("bni,bij->bnj", x, u @ v).reshape(64, 96)
        if where == "in a walk":
            turned = turned * jnp.linalg.slogdet(x[:, :3])[1][:, None]
        return descended(lambda p: jnp.mean(jnp.tanh(turned @ p["w1"]) @ p["w2"]), p)

    weights = {"w1": f32(96, 256), "w2": f32(256, 96)}
    model = Model(
        step=step,
        args=(weights, f32(64, 32, 3), f32(64, 32, 3)),
        names=("p", "x", "y"),
        num_state=1,
    )
    found = model.classes()
    assert batches(model) == {"batch": 64}
    assert [argument(found, name).role for name in "xy"] == [Role.DATA] * 2
    assert CautionKind.OPTIMIZER_MATRICES not in {one.kind for one in found.cautions}


@pytest.mark.parametrize("kind", ["windows", "members", "tokens"])
def test_floats_that_several_dimensions_choose_are_a_table_only_for_tokens(kind: str) -> None:
    stack = (8,) if kind == "members" else ()
    weights = {"w1": f32(*stack, 16, 128), "w2": f32(*stack, 128, 16)}

    def step(p: Any, table: Any, rows: Any) -> Any:
        if kind == "windows":
            rows = rows[:, :1] + jnp.arange(32)
        taken = table[rows]

        def loss(p: Any) -> Any:
            if kind == "members":
                made = jnp.einsum(
                    "mbh,mho->mbo", jnp.einsum("mbi,mih->mbh", taken, p["w1"]), p["w2"]
                )
            else:
                made = jnp.tanh(taken @ p["w1"]) @ p["w2"]
            return jnp.mean(made**2)

        return descended(loss, p)

    shape = (8, 64) if kind == "members" else (64, 32)
    model = Model(
        step=step,
        args=(weights, f32(4096, 16), int32(*shape)),
        names=("p", "table", "rows"),
        num_state=1,
    )
    expected = Role.FROZEN if kind == "tokens" else Role.DATA
    assert argument(model.classes(), "table").role is expected
    assert batches(model)["batch"] == 64


@pytest.mark.parametrize("kind", ["masked tokens", "positions"])
def test_a_frozen_table_of_tokens_or_positions_is_no_data_set(kind: str) -> None:
    weights = {"w1": f32(16, 128), "w2": f32(128, 16)}

    def step(p: Any, table: Any, tokens: Any, at: Any, key: Any) -> Any:
        if kind == "masked tokens":
            other = jax.random.randint(key, tokens.shape, 0, 512)
            x = table[jnp.where(jax.random.uniform(key, tokens.shape) < 0.1, other, tokens)]
        else:
            x = table[at[:, None] + jnp.arange(32)] * tokens[..., None]
        return descended(lambda p: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"]) ** 2), p)

    model = Model(
        step=step,
        args=(weights, f32(512, 16), int32(64, 32), int32(64), KEY),
        names=("p", "table", "tokens", "at", "key"),
        num_state=1,
    )
    assert argument(model.classes(), "table").role is Role.FROZEN


def test_networks_side_by_side_need_one_decision() -> None:
    """Before, a coarse and a fine network doubled the classes that were searched."""

    def network(p: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w3"]

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            coarse = network(p["coarse"], x)
            fine = network(p["fine"], x + coarse.sum())
            return jnp.mean((coarse - y) ** 2) + jnp.mean((fine - y) ** 2)

        return descended(loss, p)

    one = {"w1": f32(16, 128), "w2": f32(128, 256), "w3": f32(256, 4)}
    model = Model(
        step=step,
        args=({"coarse": one, "fine": one}, f32(64, 16), f32(64, 4)),
        names=("p", "x", "y"),
        num_state=1,
    )
    found = model.classes()
    for name in one:
        dims = argument(found, f"p['coarse']['{name}']").dims
        assert argument(found, f"p['fine']['{name}']").dims == dims


def test_a_momentum_encoder_that_is_moved_before_the_loss_is_a_copy() -> None:
    def step(p: Any, slow: Any, x: Any) -> Any:
        slow = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, slow, p)
        keys = x @ slow["w1"]
        p, loss = descended(lambda p: jnp.mean((x @ p["w1"] - keys) ** 2), p)
        return p, slow, loss

    own = {"w1": f32(24, 128)}
    model = Model(step=step, args=(own, own, f32(64, 24)), names=("p", "slow", "x"), num_state=2)
    assert argument(model.classes(), "slow['w1']").role is Role.COPY


def test_modes_of_a_field_are_no_branches() -> None:
    """Before, they were searched over ep and tp, and the field over sp: 384 mappings."""

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            seen = jnp.fft.rfft2(x[..., None] @ p["lift"], axes=(1, 2))
            low = jnp.einsum("bxyi,ioxy->bxyo", seen[:, :8, :8], p["low"] + 0j)
            made = jnp.fft.irfft2(jnp.zeros_like(seen).at[:, :8, :8].set(low), axes=(1, 2))
            return jnp.mean(((made @ p["out"])[..., 0] - y) ** 2)

        return descended(loss, p)

    weights = {"lift": f32(1, 64), "low": f32(64, 64, 8, 8), "out": f32(64, 1)}
    model = Model(
        step=step,
        args=(weights, f32(16, 32, 32), f32(16, 32, 32)),
        names=("p", "x", "y"),
        num_state=1,
    )
    found = model.classes()
    assert batches(model) == {"batch": 16}
    assert argument(found, "p['low']").dims[2:] == ("modes", "modes2")
    assert argument(found, "x").dims == ("batch", "space", "space2")
    layout = lay_out(found, num_devices=8, script="train.py")
    assert not {one.name for one in layout.logical} & {"modes", "modes2", "space", "space2"}


def test_states_of_environments_are_no_copies_of_a_policy_of_their_shape() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["w1"].T) @ p["w2"]) ** 2)

        acted = x + 0.1 * jnp.tanh(x @ p["w1"].T) @ p["w2"]
        p, value = descended(loss, p)
        return p, acted, value

    weights = {"w1": f32(64, 8), "w2": f32(64, 8)}
    model = Model(step=step, args=(weights, f32(64, 8)), names=("p", "x"), num_state=2)
    assert argument(model.classes(), "x").role is Role.STATISTIC
