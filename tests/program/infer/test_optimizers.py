"""Optimizers that multiply or factorize matrices, and parameters that none of them changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from automesh.program.infer.search.layout import lay_out
from tests.support.infer_models import Model, argument, f32, i32

WIDTH, VOCAB = 32, 96
PARAMS = {"embed": f32(VOCAB, WIDTH), "out": f32(64, VOCAB), "up": f32(WIDTH, 64)}


def loss(p: Any, x: Any) -> Any:
    scores = jax.nn.log_softmax(jax.nn.gelu(p["embed"][x] @ p["up"]) @ p["out"])
    return -jnp.mean(jnp.take_along_axis(scores[:, :-1], x[:, 1:, None], -1))


def said(found: StepClasses, kind: CautionKind) -> str:
    return "; ".join(one.text for one in found.cautions if one.kind == kind)


def squares(side: int) -> Any:
    return jax.tree.map(lambda one: f32(one.shape[side], one.shape[side]), PARAMS)


def test_roots_that_precondition_gradients_leave_the_parameters_free() -> None:
    def root(matrix: Any) -> Any:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * values**-0.25) @ vectors.T

    def step(p: Any, left: Any, right: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        left = jax.tree.map(lambda m, g: m + g @ g.T, left, grads)
        right = jax.tree.map(lambda m, g: m + g.T @ g, right, grads)
        p = jax.tree.map(lambda p, a, b, g: p - root(a) @ g @ root(b), p, left, right, grads)
        return p, left, right, value

    found = Model(
        step=step,
        args=(PARAMS, squares(0), squares(1), i32(8, 16)),
        names=("p", "left", "right", "x"),
        num_state=3,
    ).classes()
    assert argument(found, "p['up']").dims == ("embed", argument(found, "p['out']").dims[0])
    assert argument(found, "left['up']").dims == ("embed", "embed")
    assert argument(found, "left['up']").role == Role.MOMENT
    assert not any(one.whole for one in found.classes)
    assert "embed" in [one.name for one in lay_out(found, num_devices=8, script="x").logical]
    text = said(found, CautionKind.OPTIMIZER_MATRICES)
    assert "factorizes 6 matrices (of up to 96 rows)" in text
    # Of each of three arrays two statistics, two roots, and two products with the gradient.
    assert "multiplies matrices 18 times" in text


def test_statistics_for_the_bases_of_the_next_step_are_moments() -> None:
    def step(p: Any, stats: Any, basis: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        stats = jax.tree.map(lambda m, g: 0.9 * m + g @ g.T, stats, grads)
        turned = jax.tree.map(lambda q, g: q @ jnp.tanh(q.T @ g), basis, grads)
        basis = jax.tree.map(lambda m, q: jnp.linalg.qr(m @ q)[0], stats, basis)
        return jax.tree.map(lambda p, g: p - g, p, turned), stats, basis, value

    found = Model(
        step=step,
        args=(PARAMS, squares(0), squares(0), i32(8, 16)),
        names=("p", "stats", "basis", "x"),
        num_state=3,
    ).classes()
    roles = {one.name: one.role for one in found.arguments}
    assert roles["stats['up']"] == roles["basis['up']"] == Role.MOMENT
    assert not any(one.whole for one in found.classes)


def test_iterations_that_make_a_step_orthogonal_are_counted_and_no_branches() -> None:
    def orthogonal(m: Any) -> Any:
        def turn(_: Any, m: Any) -> Any:
            square = m @ m.mT
            return 2 * m + (square @ square - square) @ m

        return jax.lax.fori_loop(0, 5, turn, m / jnp.linalg.norm(m))

    def step(p: Any, momentum: Any, x: Any) -> Any:
        def stacked(p: Any) -> Any:
            h = x
            for number in range(4):
                h = h + jax.nn.gelu(h @ p["up"][number]) @ p["down"][number]
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(stacked)(p)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - orthogonal(m), p, momentum), momentum, value

    p = {"down": f32(4, 64, WIDTH), "up": f32(4, WIDTH, 64)}
    found = Model(
        step=step, args=(p, p, f32(8, WIDTH)), names=("p", "momentum", "x"), num_state=2
    ).classes()
    assert "branch" not in {one.name for one in found.classes}
    assert "multiplies matrices 30 times" in said(found, CautionKind.OPTIMIZER_MATRICES)


def test_steps_of_zero_leave_frozen_weights_and_what_the_loss_is_not_made_of_is_told() -> None:
    labels = dict.fromkeys((*PARAMS, "unused"), "train") | {"embed": "keep"}
    optimizer = optax.multi_transform(
        {"keep": optax.set_to_zero(), "train": optax.adam(1e-3)}, labels
    )

    def step(p: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    p = PARAMS | {"unused": f32(64, 64)}
    found = Model(
        step=step,
        args=(p, jax.eval_shape(optimizer.init, p), i32(8, 16)),
        names=("p", "state", "x"),
        num_state=2,
    ).classes()
    roles = {one.name: one.role for one in found.arguments}
    assert roles["p['embed']"] == Role.FROZEN
    assert roles["p['up']"] == Role.PARAMETER
    assert {role for name, role in roles.items() if "unused" in name} == {Role.DEAD}
    text = said(found, CautionKind.UNTRAINED)
    assert text.startswith("no gradient reaches p['unused'] and 2 more (12,288 numbers)")


def test_a_matrix_of_the_rows_of_the_data_is_solved_whole() -> None:
    """Natural gradients by a kernel of the rows: what is factorized is made of gradients, too."""

    def step(p: Any, x: Any, y: Any) -> Any:
        def out(p: Any, row: Any) -> Any:
            return jnp.tanh(row @ p).sum()

        slopes = jax.vmap(jax.grad(out), (None, 0))(p, x)
        rows = slopes.reshape(len(x), -1)
        values, vectors = jnp.linalg.eigh(rows @ rows.T)
        error = jax.vmap(out, (None, 0))(p, x) - y
        change = vectors @ ((vectors.T @ error) / values)
        return p - jnp.einsum("b,bij->ij", change, slopes), jnp.mean(error**2)

    args = (f32(WIDTH, 8), f32(16, WIDTH), f32(16))
    found = Model(step=step, args=args, names=("p", "x", "y"), num_state=1).classes()
    assert "factorized" in found.named(argument(found, "x").dims[0]).whole


def test_a_population_whose_noise_is_drawn_is_a_batch() -> None:
    """Evolution strategies have no gradient; each of a population sees all rows."""

    def step(p: Any, x: Any, y: Any, key: Any) -> Any:
        noise = jax.random.normal(key, (64, *p.shape))
        score = jax.vmap(lambda e: -jnp.mean((jnp.tanh(x @ (p + 0.1 * e)) - y) ** 2))(noise)
        return p + jnp.tensordot(score - score.mean(), noise, 1), score.mean()

    args = (f32(12, 32), f32(16, 12), f32(16, 32), jax.eval_shape(lambda: jax.random.key(0)))
    found = Model(step=step, args=args, names=("p", "x", "y", "key"), num_state=1).classes()
    assert {one.size for one in found.batches} == {16, 64}
    (drawn,) = [one for one in found.inner if one.shape[0] == 64]
    layout = lay_out(found, num_devices=8, script="train.py")
    assert {drawn.dims[0]} <= {one.name for one in layout.logical}


def test_what_is_trained_by_a_population_is_parameters_with_their_moments() -> None:
    """Mirrored noise: each draw is used twice, end to end."""

    def step(p: Any, m: Any, x: Any, y: Any, key: Any) -> Any:
        drawn = jax.random.normal(key, (32, *p.shape))
        noise = jnp.concatenate([drawn, -drawn])
        score = jax.vmap(lambda e: -jnp.mean((jnp.tanh(x @ (p + 0.1 * e)) - y) ** 2))(noise)
        m = 0.9 * m + jnp.tensordot(score, noise, 1)
        return p + 0.1 * m, m, score.mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (f32(12, 32), f32(12, 32), f32(16, 12), f32(16, 32), key)
    names = ("p", "m", "x", "y", "key")
    found = Model(step=step, args=args, names=names, num_state=2).classes()
    roles = [one.role for one in found.arguments]
    assert roles == [Role.PARAMETER, Role.MOMENT, Role.DATA, Role.DATA, Role.KEY]
    assert argument(found, "p").dims[0] == argument(found, "x").dims[1] == "features"
    assert [one.size for one in found.batches] == [16, 32]
    assert any(one.shape[0] == 32 and one.dims[0] == "batch2" for one in found.inner)


def test_mirrored_noise_is_a_batch_though_it_is_summed_up_with_its_mirror_image_alone() -> None:
    """A policy that acts in a simulator: no data, and scores are compared with their mean."""

    def step(p: Any, key: Any) -> Any:
        drawn = jax.random.normal(key, (32, *p.shape))
        noise = jnp.concatenate([drawn, -drawn])

        def score_of(e: Any) -> Any:
            def turn(state: Any, _: Any) -> Any:
                state = jnp.tanh(state @ (p + 0.1 * e))
                return state, -jnp.sum(state**2)

            return jax.lax.scan(turn, jnp.ones(p.shape[0]), None, length=5)[1].sum()

        score = jax.vmap(score_of)(noise)
        score = (score - score.mean()) / score.std()
        return p + 0.1 * jnp.tensordot(score, noise, 1), score.max()

    args = (f32(24, 24), jax.eval_shape(lambda: jax.random.key(0)))
    found = Model(step=step, args=args, names=("p", "key"), num_state=1).classes()
    assert [one.size for one in found.batches] == [32]
    assert any(one.shape[0] == 32 and one.dims[0] == "batch" for one in found.inner)


def test_a_gradient_that_an_optimizer_keeps_for_its_next_step_is_a_moment() -> None:
    """Before, the parameters were copies of it: each moves by what is made of the kept gradient."""
    solver = optax.lbfgs(memory_size=4)

    def step(p: Any, state: Any, x: Any) -> Any:
        def own(p: Any) -> Any:
            return loss(p, x)

        value, grad = optax.value_and_grad_from_state(own)(p, state=state)
        updates, state = solver.update(grad, state, p, value=value, grad=grad, value_fn=own)
        return optax.apply_updates(p, updates), state, value

    found = Model(
        step=step,
        args=(PARAMS, jax.eval_shape(solver.init, PARAMS), i32(8, 16)),
        names=("p", "state", "x"),
        num_state=2,
    ).classes()
    roles = {one.name: one.role for one in found.arguments if one.shape}
    assert {role for name, role in roles.items() if name[0] == "p"} == {Role.PARAMETER}
    assert {role for name, role in roles.items() if name[0] == "s"} == {Role.MOMENT}


def test_placeholders_of_an_optimizer_need_no_word() -> None:
    """Adafactor has arrays of one element for what it does not factorize, and for what it does."""
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)

    def step(p: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    found = Model(
        step=step,
        args=(PARAMS, jax.eval_shape(optimizer.init, PARAMS), i32(8, 16)),
        names=("p", "state", "x"),
        num_state=2,
    ).classes()
    assert not said(found, CautionKind.UNTRAINED)
