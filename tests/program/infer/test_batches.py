"""Batches that lie end to end, are cut into parts, are repeated, or train weights of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from automesh.program.infer.search.layout import Layout, lay_out
from tests.support.infer_models import Model, argument, descended, f32, i32

B, WIDTH, VOCAB = 8, 32, 96


def said(found: StepClasses, kind: CautionKind) -> str:
    return "; ".join(one.text for one in found.cautions if one.kind == kind)


def layout(found: StepClasses) -> Layout:
    return lay_out(found, num_devices=8, script="train.py")


def splits(found: StepClasses) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {one.name: one.split for one in layout(found).arguments}


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def multi_crop(*, is_listed: bool) -> StepClasses:
    """A student sees two large and six small views of each image, its teacher the large ones."""

    def net(p: Any, x: Any) -> Any:
        h = x @ p["patch"]
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, p[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("blhd,bshd->bhls", q, k))
        return jnp.einsum("bhls,bshd->blhd", weights, v).mean(1).reshape(-1, WIDTH) @ p["head"]

    def step(p: Any, teacher: Any, large: Any, small: Any) -> Any:
        if is_listed:
            large, small = jnp.concatenate(large), jnp.concatenate(small)
        targets = jnp.split(jax.nn.softmax(jax.lax.stop_gradient(net(teacher, large))), 2)

        def loss(p: Any) -> Any:
            views = jnp.split(jnp.concatenate([net(p, large), net(p, small)]), 8)
            pairs = [(t, v) for i, t in enumerate(targets) for j, v in enumerate(views) if i != j]
            return sum(-jnp.mean(jnp.sum(t * jax.nn.log_softmax(v), -1)) for t, v in pairs)

        p, value = descended(loss, p)
        return p, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, p), value

    p = {name: f32(WIDTH, 4, 8) for name in "kqv"} | {
        "head": f32(WIDTH, 64),
        "patch": f32(48, WIDTH),
    }
    large, small = f32(2 * B, 16, 48), f32(6 * B, 4, 48)
    if is_listed:
        large, small = [f32(B, 16, 48)] * 2, [f32(B, 4, 48)] * 6
    return Model(
        step=step, args=(p, p, large, small), names=("p", "teacher", "large", "small"), num_state=2
    ).classes()


def test_views_of_two_sizes_end_to_end_are_split_like_one_batch() -> None:
    found = multi_crop(is_listed=False)
    large, small = argument(found, "large"), argument(found, "small")
    assert large.role == small.role == Role.DATA
    assert (large.dims[0], small.dims[0]) == ("batch_x2", "batch_x6")
    assert found.named("batch_x6").pieces == (("batch", B),) * 6
    assert argument(found, "p['q']").dims[1] == "heads"
    assert splits(found)["large"][0] == splits(found)["small"][0] == ("batch",)
    # The results of the networks are cut, not what goes into them.
    text = said(found, CautionKind.STACKED_BATCHES)
    assert "2 and 6 batches of 8 are put end to end (16 and 48)" in text
    assert "(2, 8, ...) and (6, 8, ...)" in text
    assert not said(found, CautionKind.BATCH_INSIDE)


def test_views_of_two_sizes_in_lists_are_one_batch() -> None:
    found = multi_crop(is_listed=True)
    names = [one.name for one in found.arguments if one.role == Role.DATA]
    assert len(names) == 8
    assert {argument(found, name).dims[0] for name in names} == {"batch"}
    assert all(splits(found)[name][0] == ("batch",) for name in names)


def test_answers_that_are_compared_are_one_batch_with_one_vocabulary() -> None:
    def scores(p: Any, x: Any) -> Any:
        h = jnp.tanh(p["embed"][x] @ p["up"]) @ p["out"]
        return jnp.take_along_axis(jax.nn.log_softmax(h)[:, :-1], x[:, 1:, None], -1).sum((1, 2))

    def step(p: Any, frozen: Any, chosen: Any, rejected: Any) -> Any:
        both = jnp.concatenate([chosen, rejected])

        def loss(p: Any) -> Any:
            apart = scores(p, both) - scores(frozen, both)
            return -jnp.mean(jax.nn.log_sigmoid(apart[:B] - apart[B:]))

        return descended(loss, p)

    p = {"embed": f32(VOCAB, WIDTH), "out": f32(64, VOCAB), "up": f32(WIDTH, 64)}
    found = Model(
        step=step,
        args=(p, p, i32(B, 16), i32(B, 16)),
        names=("p", "frozen", "chosen", "rejected"),
        num_state=1,
    ).classes()
    assert argument(found, "frozen['embed']").dims[0] == argument(found, "p['embed']").dims[0]
    assert argument(found, "p['out']").dims[1] == "vocab"
    assert splits(found)["rejected"][0] == ("batch",)


@pytest.mark.parametrize("source", ["drawn", "given", "split"])
def test_points_that_are_cut_into_parts_are_batches(source: str) -> None:
    def step(p: Any, points: Any) -> Any:
        if source == "drawn":
            points = jax.random.uniform(points, (512, 2))
        if source == "split":
            inside, edge, start = jnp.split(points, [384, 448])
        else:
            inside, edge, start = points[:384], points[384:448], points[448:]

        def at(p: Any, point: Any) -> Any:
            return (jnp.tanh(point @ p["up"]) @ p["down"])[0]

        def loss(p: Any) -> Any:
            slopes = jax.vmap(jax.grad(at, 1), (None, 0))(p, inside)
            ends = [jax.vmap(at, (None, 0))(p, one) for one in (edge, start)]
            return jnp.mean((slopes[:, 0] - slopes[:, 1]) ** 2) + sum(jnp.mean(e**2) for e in ends)

        return descended(loss, p)

    p = {"down": f32(64, 1), "up": f32(2, 64)}
    points = key() if source == "drawn" else f32(512, 2)
    found = Model(step=step, args=(p, points), names=("p", "points"), num_state=1).classes()
    assert [one.size for one in found.batches] == [384, 64, 64]
    names = [one.name for one in found.batches]
    assert [one.dims for one in found.inner if one.shape[0] < 512] == [(name, "") for name in names]
    assert not said(found, CautionKind.NO_BATCH)
    assert set(names) <= {one.name for one in layout(found).logical}
    text = said(found, CautionKind.STACKED_BATCHES)
    assert ("slices of 384, 64, 64 from the 512 rows" in text) == (source != "drawn")


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_repeated_batch_is_told_where_its_copies_are_outside(is_outside: bool) -> None:
    copies = 4

    def step(p: Any, x: Any, key: Any) -> Any:
        rows = jnp.tile(x, (copies, 1)) if is_outside else jnp.repeat(x, copies, axis=0)

        def loss(p: Any) -> Any:
            made = jnp.tanh(rows @ p["up"] + jax.random.normal(key, (copies * B, 64))) @ p["down"]
            score = jnp.sum((made - rows) ** 2, -1)
            groups = score.reshape(copies, B).T if is_outside else score.reshape(B, copies)
            return jnp.mean(jax.nn.softmax(groups, -1) * groups)

        return descended(loss, p)

    p = {"down": f32(64, WIDTH), "up": f32(WIDTH, 64)}
    args = (p, f32(B, WIDTH), key())
    found = Model(step=step, args=args, names=("p", "x", "key"), num_state=1).classes()
    assert [(one.name, one.size) for one in found.batches] == [("batch", B)]
    text = said(found, CautionKind.INNER_BATCH)
    assert ("batch (8) is the inner part of 32 rows" in text) == is_outside
    assert bool(text) == is_outside


@pytest.mark.parametrize("is_loop", [True, False])
def test_each_task_has_weights_of_its_own_after_its_inner_steps(is_loop: bool) -> None:
    def error(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2)

    def learn(p: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(error)(p, x, y))

    def task(p: Any, x: Any, y: Any, later: Any, wanted: Any) -> Any:
        if is_loop:
            own, _ = jax.lax.scan(lambda own, _: (learn(own, x, y), None), p, None, 3)
        else:
            own = learn(learn(p, x, y), x, y)
        return error(own, later, wanted)

    def step(p: Any, *rows: Any) -> Any:
        return descended(lambda p: jax.vmap(task, (None, 0, 0, 0, 0))(p, *rows).mean(), p)

    p = {"down": f32(64, 5), "up": f32(12, 64)}
    rows = (f32(B, 10, 12), f32(B, 10, 5), f32(B, 14, 12), f32(B, 14, 5))
    found = Model(step=step, args=(p, *rows), names=("p", *"abcd"), num_state=1).classes()
    # Rows of a task, which its own gradient sums up, are no batch.
    assert [(one.name, one.size) for one in found.batches] == [("tasks", B)]
    assert argument(found, "a").dims[2] == argument(found, "p['up']").dims[0] == "features"
    assert argument(found, "p['up']").dims[1].startswith("d")  # No state of a recurrent network.
    numbers = B * (64 * 5 + 12 * 64)
    assert (
        f"each of the 8 tasks of the batch trains weights of its own in inner steps ({numbers:,} "
        in (said(found, CautionKind.INNER_STEPS))
    )
    kinds = {one.kind for one in found.cautions}
    assert not kinds & {CautionKind.PER_EXAMPLE_GRADIENTS, CautionKind.GRADIENT_IN_LOOP}


@pytest.mark.parametrize("has_positions", [True, False])
def test_the_only_sequence_attends_to_itself_and_is_no_batch(has_positions: bool) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = p["embed"][x] + p.get("positions", 0)
            q, k, v = (jnp.einsum("te,ehd->thd", h, p[name]) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
            scores = jnp.einsum("hts,shd->thd", weights, v).reshape(-1, WIDTH) @ p["out"]
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], -1))

        return descended(loss, p)

    p = {name: f32(WIDTH, 4, 8) for name in "kqv"}
    p |= {"embed": f32(VOCAB, WIDTH), "out": f32(WIDTH, VOCAB)}
    p |= {"positions": f32(64, WIDTH)} if has_positions else {}
    found = Model(
        step=step, args=(p, i32(64), i32(64)), names=("p", "x", "y"), num_state=1
    ).classes()
    assert argument(found, "x").dims == argument(found, "y").dims == ("sequence",)
    assert argument(found, "p['q']").dims[1:] == ("heads", "head_dim")
    assert said(found, CautionKind.NO_BATCH)
    assert splits(found)["x"] == (("sequence",),)


def choices(found: StepClasses) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {one.name: one.choices for one in layout(found).logical}


def test_tokens_of_sequences_that_never_meet_are_split_over_another_axis() -> None:
    """Windows of a text that the step holds, and a network of each token alone: both dimensions of
    what is taken are batches, and one axis cannot split both."""
    text = jnp.arange(20000) % VOCAB
    windows = jax.vmap(jax.lax.dynamic_slice, in_axes=(None, 0, None))

    def step(p: Any, key: Any) -> Any:
        at = jax.random.randint(key, (32, 1), 0, len(text) - 64)
        x, y = windows(text, at, (64,)), windows(text, at + 1, (64,))

        def loss(p: Any) -> Any:
            h = p["embed"][x]
            h = h + jax.nn.relu(h @ p["up"]) @ p["down"]
            scores = jax.nn.log_softmax(h @ p["embed"].T)
            return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

        return descended(loss, p)

    p = {"down": f32(128, WIDTH), "embed": f32(VOCAB, WIDTH), "up": f32(WIDTH, 128)}
    found = Model(step=step, args=(p, key()), names=("p", "key"), num_state=1).classes()
    assert [one.dims for one in found.inner] == [("batch", "batch2")] * 2
    assert choices(found)["batch"] == (("dp", "fsdp"),)
    assert choices(found)["batch2"] == ((), ("sp",))


@pytest.mark.parametrize(("rows", "wanted"), [(100, ((), ("dp",))), (96, (("dp",), ()))])
def test_the_first_mapping_is_legal_on_all_devices(rows: int, wanted: Any) -> None:
    """Points inside of an area, and fewer at its edge: eight devices divide 96, not 100."""

    def step(p: Any, inside: Any, edge: Any) -> Any:
        def net(p: Any, x: Any) -> Any:
            return jnp.tanh(x @ p["up"]) @ p["down"]

        def loss(p: Any) -> Any:
            return jnp.mean((net(p, inside) - 1) ** 2) + jnp.mean(net(p, edge) ** 2)

        return descended(loss, p)

    args = ({"down": f32(256, 1), "up": f32(2, 256)}, f32(8192, 2), f32(rows, 2))
    found = Model(step=step, args=args, names=("p", "inside", "edge"), num_state=1).classes()
    assert choices(found)["batch"] == (("dp",),)
    assert choices(found)["batch2"] == wanted


@pytest.mark.parametrize("is_twice", [False, True])
def test_columns_at_places_that_are_always_the_same_are_no_rows_of_a_data_set(
    is_twice: bool,
) -> None:
    def step(p: Any, points: Any, targets: Any) -> Any:
        def loss(p: Any) -> Any:
            t, x = points[:, [0]], points[:, [2, 1]]
            if is_twice:
                x = x[:, jnp.array([1, 0])]  # Chosen twice, as between the layers of a flow.
            h = jnp.concatenate([t, x], 1) @ p["up"]
            return jnp.mean((jnp.tanh(h) @ p["down"] - targets[:, jnp.array([3, 0])]) ** 2)

        return descended(loss, p)

    args = ({"down": f32(256, 2), "up": f32(3, 256)}, f32(4096, 3), f32(4096, 5))
    found = Model(step=step, args=args, names=("p", "points", "targets"), num_state=1).classes()
    assert [one.dims[0] for one in found.arguments if one.role == Role.DATA] == ["batch"] * 2
    assert not said(found, CautionKind.GATHERS_DATA_SET)
    assert found.inner == ()


def test_batches_beyond_those_that_are_searched_are_named() -> None:
    def step(p: Any, *sets: Any) -> Any:
        def loss(p: Any) -> Any:
            return sum(jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2) for x in sets)

        return descended(loss, p)

    sets = [f32(rows, 2) for rows in (4096, 96, 104, 112, 120)]
    args = ({"down": f32(256, 1), "up": f32(2, 256)}, *sets)
    found = Model(step=step, args=args, names=("p", *"abcde"), num_state=1).classes()
    said = [one for one in layout(found).notices if "at most 3 batches are searched" in one]
    assert len(said) == 1
    assert "; whole: batch4 (dimension 0 of" in said[0]


def test_data_that_the_step_holds_are_split_over_one_axis_along_each_dimension() -> None:
    """Functions and the points at which they are known, all of them in each step."""
    functions, points, values = (jnp.ones(shape) for shape in ((152, 100), (104, 1), (152, 104)))

    def step(p: Any) -> Any:
        def loss(p: Any) -> Any:
            branch = jax.nn.relu(functions @ p["b1"]) @ p["b2"]
            trunk = jax.nn.relu(points @ p["t1"]) @ p["t2"]
            return jnp.mean((branch @ trunk.T - values) ** 2)

        return descended(loss, p)

    p = {"b1": f32(100, 256), "b2": f32(256, 64), "t1": f32(1, 256), "t2": f32(256, 64)}
    found = Model(step=step, args=(p,), names=("p",), num_state=1).classes()
    (both,) = (one.dims for one in found.held if one.shape == (152, 104))
    over = choices(found)
    assert [over[name] for name in both] == [(("dp", "fsdp"),), ((), ("sp",))]


def points_step(p: Any, *sets: Any) -> Any:
    def loss(p: Any) -> Any:
        losses = [jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2) for x in jax.tree.leaves(sets)]
        return jnp.sum(jnp.stack(losses))

    return descended(loss, p)


POINTS = {"down": f32(256, 1), "up": f32(2, 256)}


def test_batches_of_equal_size_in_a_list_are_one_decision() -> None:
    """A net of physics: points inside, and as many at each of three edges."""
    args = (POINTS, f32(8192, 2), [f32(96, 2) for _ in range(3)])
    found = Model(
        step=points_step, args=args, names=("p", "inside", "edges"), num_state=1
    ).classes()
    assert choices(found)["batch"] == (("dp",),)
    assert choices(found)["batch2"] == (("dp",), ())
    assert "batch3" not in choices(found)
    assert splits(found)["edges[2]"] == (("batch2",), ())


@pytest.mark.parametrize("rows", [64, 96])
def test_a_batch_as_large_as_an_inner_one_is_still_split(rows: int) -> None:
    args = (POINTS, f32(rows, 2), f32(32, 64, 2))
    found = Model(step=points_step, args=args, names=("p", "x", "y"), num_state=1).classes()
    ((own,), _) = splits(found)["x"]
    assert ("dp",) in choices(found)[own]


def test_a_small_batch_of_long_sequences_is_over_dp() -> None:
    """Four sequences whose tokens never meet, for eight devices."""

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jax.nn.relu(p["embed"][x] @ p["up"]) @ p["down"]
            scores = jax.nn.log_softmax(h @ p["embed"].T)
            return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

        return descended(loss, p)

    p = {"down": f32(128, WIDTH), "embed": f32(VOCAB, WIDTH), "up": f32(WIDTH, 128)}
    args = (p, i32(4, 64), i32(4, 64))
    found = Model(step=step, args=args, names=("p", "x", "y"), num_state=1).classes()
    assert choices(found)["batch"] == (("dp", "fsdp"),)
    assert () in choices(found)["sequence"] and ("sp",) in choices(found)["sequence"]
    assert layout(found).batch_parts == 4


def test_radii_of_columns_are_no_rows_of_a_data_set() -> None:
    def step(p: Any, points: Any) -> Any:
        def loss(p: Any) -> Any:
            radius = jnp.sqrt(jnp.sum(points[:, [1, 2]] ** 2, axis=1, keepdims=True))
            h = jnp.concatenate([points[:, [0]], radius], 1) @ p["up"]
            return jnp.mean((jnp.tanh(h) @ p["down"]) ** 2)

        return descended(loss, p)

    args = ({"down": f32(256, 1), "up": f32(2, 256)}, f32(4096, 3))
    found = Model(step=step, args=args, names=("p", "points"), num_state=1).classes()
    assert not said(found, CautionKind.GATHERS_DATA_SET)
    assert found.inner == ()
