"""`with_sharding_constraint`: inside and outside jit, in every context, on every kind of axis."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.layout.constraint import with_sharding_constraint
from automesh.mesh.layout.context import mesh_in_force
from automesh.mesh.layout.create import mesh_on

P = PartitionSpec


def mesh_of(kind="auto"):
    return mesh_on(jax.devices()[:8], (4, 2), ("data", "model"), axis_types=kind)


@contextlib.contextmanager
def legacy(mesh):
    with pytest.warns(DeprecationWarning, match="with jax.set_mesh"):
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


CONTEXTS = {"set": jax.set_mesh, "legacy": legacy, "given": lambda _: contextlib.nullcontext()}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "plain"])
def test_arrays_are_split_in_every_context(context, wrap):
    mesh = mesh_of()
    given = mesh if context == "given" else None
    with CONTEXTS[context](mesh):
        split = wrap(lambda x: with_sharding_constraint(x * 2, P("data", "model"), mesh=given))(
            jnp.ones((8, 4))
        )
    assert split.sharding.shard_shape(split.shape) == (2, 2)
    assert (split == 2).all()


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "plain"])
def test_explicit_axes_are_resharded(wrap):
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.ones((8, 4)), P("data"))
        columns = wrap(lambda x: with_sharding_constraint(x, P(None, "model")))(rows)
    assert columns.sharding.shard_shape(columns.shape) == (8, 2)


def test_a_traced_function_serves_meshes_of_other_devices():
    split = jax.jit(lambda x: with_sharding_constraint(x, P("data")))
    for devices in (jax.devices()[:4], jax.devices()[4:8], jax.devices()[3::-1]):
        mesh = mesh_on(devices, (4,), ("data",))
        with jax.set_mesh(mesh):
            rows = split(jax.device_put(jnp.ones((8, 4)), P()))
        assert rows.sharding.device_set == set(devices)
        assert rows.sharding.shard_shape(rows.shape) == (2, 4)


def test_manual_axes_are_refused():
    mesh = mesh_of()

    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def inside(x):
        return with_sharding_constraint(x, P("data"))

    with pytest.raises(UsageError, match="names `data`, which is manual here"):
        inside(jnp.ones((8, 4)))


def test_gradients_go_through():
    mesh = mesh_of()
    gradient = jax.grad(lambda x: with_sharding_constraint(x, P("data"), mesh=mesh).sum())(
        jnp.ones((8, 4))
    )
    assert (gradient == 1).all()


def test_a_tree_takes_one_sharding_or_one_each():
    mesh, tree = mesh_of(), {"w": jnp.ones((8, 4)), "b": [jnp.ones(4), jnp.ones(8)]}

    def shapes(shardings):
        split = with_sharding_constraint(tree, shardings, mesh=mesh)
        return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(split)]

    assert shapes(P("data")) == [(1,), (2,), (2, 4)]
    assert shapes({"w": P(None, "model"), "b": P("data")}) == [(1,), (2,), (8, 2)]
    assert shapes({"w": None, "b": NamedSharding(mesh, P("model"))}) == [(2,), (4,), (8, 4)]


def test_without_devices_to_split_over_nothing_happens():
    x = jnp.ones(3)
    assert with_sharding_constraint(x, P("data")) is x
    one = mesh_on(jax.devices()[:1], (1,), ("data",))
    assert with_sharding_constraint(x, P("data"), mesh=one) is x


def test_without_devices_to_split_over_a_complete_sharding_is_obeyed():
    placed, one = NamedSharding(mesh_of(), P("data")), mesh_on(jax.devices()[:1], (1,), ("data",))
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    for mesh in (None, one):
        assert with_sharding_constraint(jnp.ones(8), placed, mesh=mesh).sharding == placed
        moved = with_sharding_constraint({"w": jnp.ones(8)}, {"w": alone}, mesh=mesh)
        assert moved["w"].devices() == {jax.devices()[3]}


@pytest.mark.parametrize("mesh", [None, mesh_on(jax.devices()[:1], (1, 1), ("data", "model"))])
@pytest.mark.parametrize(
    ("shardings", "said"),
    [
        (5, "must be a PartitionSpec or a Sharding, got an int: 5"),
        (P("data", "data"), "uses the mesh axis `data` 2 times"),
        (P("data", None, "model"), "shape (8, 4) has 2 dimensions, but"),
        ({"w": P(), "v": P()}, "the tree of shardings does not fit the tree of arrays"),
    ],
)
def test_without_devices_to_split_over_all_is_checked(mesh, shardings, said):
    with pytest.raises(UsageError) as caught:
        with_sharding_constraint({"w": jnp.ones((8, 4))}, shardings, mesh=mesh)
    assert said in caught.value.message


def test_a_mesh_of_one_device_has_its_axes_only():
    one = mesh_on(jax.devices()[:1], (1,), ("data",))
    with pytest.raises(UsageError, match="names `nope`, which is not an axis of the mesh; it has"):
        with_sharding_constraint(jnp.ones(3), P("nope"), mesh=one)


OPEN = P.UNCONSTRAINED
KINDS = ["auto", "explicit", ("explicit", "auto"), ("auto", "explicit")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "plain"])
def test_what_is_left_open_stays_split_on_every_kind_of_axis(kind, wrap):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.ones((8, 4)), P("data"))
        both = wrap(lambda x: with_sharding_constraint(x, P(OPEN, "model")))(rows)
        closed = wrap(lambda x: with_sharding_constraint(x, P(None, "model")))(rows)
    assert both.sharding.shard_shape(both.shape) == (2, 2)
    assert closed.sharding.shard_shape(closed.shape) == (8, 2)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "plain"])
@pytest.mark.parametrize("given", [P("data", "model"), P("model", "data"), P(None, "model")])
def test_axes_of_every_kind_split_where_they_are_told_to(kind, wrap, given):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        for before in (P(), P("data"), P("model", "data")):
            x = jax.device_put(jnp.ones((8, 4)), before)
            after = wrap(lambda x: with_sharding_constraint(x, given))(x)
            assert after.sharding.is_equivalent_to(NamedSharding(mesh, given), 2)
            slope = jax.grad(lambda x: with_sharding_constraint(x * x, given).sum())(x)
            assert (slope == 2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_that_is_nowhere_yet_is_split_over_the_mesh_that_is_given(kind):
    mesh = mesh_of(kind)
    for spec, shard in ((P("data", "model"), (2, 2)), (P(OPEN, "model"), (8, 2))):
        split = with_sharding_constraint(jnp.ones((8, 4)), spec, mesh=mesh)
        assert split.sharding.shard_shape(split.shape) == shard


@pytest.mark.parametrize("kind", ["explicit", ("explicit", "auto")])
def test_what_is_left_open_gives_up_an_axis_that_is_asked_for_elsewhere(kind):
    with jax.set_mesh(mesh_of(kind)):
        rows = jax.device_put(jnp.ones((8, 4)), P("data"))
        columns = with_sharding_constraint(rows, P(OPEN, "data"))
    assert columns.sharding.shard_shape(columns.shape) == (8, 1)


def test_what_is_left_open_is_checked_as_the_rest_is():
    said = pytest.raises(UsageError, match="has 2 dimensions, but")
    with jax.set_mesh(mesh_of("explicit")), said:
        with_sharding_constraint(jnp.ones((8, 4)), P(OPEN, None, OPEN))


def test_an_error_that_is_not_of_the_tree_is_not_told_as_one():
    elsewhere = jax.sharding.SingleDeviceSharding(jax.devices()[1])

    def move(x):
        return with_sharding_constraint(x * 2, {"w": elsewhere}["w"], mesh=mesh_of())

    placed = jax.device_put(jnp.ones(8), NamedSharding(mesh_of(), P()))
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        jax.jit(move)(placed)
    assert not isinstance(caught.value, UsageError)


def test_an_abstract_mesh_serves_inside_jit_only():
    mesh = mesh_of()
    rows = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P()))

    def split(x):
        return with_sharding_constraint(x, P("data"), mesh=mesh.abstract_mesh)

    assert jax.jit(split)(rows).sharding.shard_shape((8, 4)) == (2, 4)
    for call in (split, jax.grad(lambda x: split(x).sum())):
        with pytest.raises(UsageError, match="`x` cannot be put on an abstract mesh, which has no"):
            call(rows)


def test_what_is_no_array_is_told_with_its_place():
    for mesh in (None, mesh_of()):
        with pytest.raises(
            TypeError, match=r"array `\['name'\]` is a str, not an array of numbers"
        ):
            with_sharding_constraint({"name": "s"}, P(), mesh=mesh)
        with pytest.raises(TypeError, match="array `x` is a ShapeDtypeStruct, not an array"):
            with_sharding_constraint(jax.ShapeDtypeStruct((8,), "float32"), P(), mesh=mesh)
    mixed = {"w": np.ones(8, np.float32), "count": 3, "name": "s"}
    split = with_sharding_constraint(mixed, {"w": P("data"), "count": P(), "name": None}, mesh=mesh)
    assert split["w"].sharding.shard_shape((8,)) == (2,)
    assert (int(split["count"]), split["name"]) == (3, "s")


@pytest.mark.parametrize(
    ("shardings", "said"),
    [
        (P("dta"), "names `dta`, which is not an axis of the mesh (did you mean `data`?)"),
        (P("rows"), "names `rows`, which is not an axis of the mesh; it has data, model"),
        (P("data", ("model", "data")), "uses the mesh axis `data` 2 times"),
        (P("data", None, "model"), "shape (6, 4) has 2 dimensions, but"),
        (P("data"), "dimension 0 of array `['w']` has size 6, which the 4 devices along data do"),
        (P(("model", "data")), "which the 8 devices along model, data do not divide"),
        ({"w": P(), "v": P()}, "the tree of shardings does not fit the tree of arrays"),
    ],
)
def test_what_cannot_be_is_refused_inside_jit_as_outside(shardings, said):
    def constrain(tree):
        return with_sharding_constraint(tree, shardings, mesh=mesh_of())

    for call in (constrain, jax.jit(constrain)):
        with pytest.raises(UsageError) as caught:
            call({"w": jnp.ones((6, 4))})
        assert said in caught.value.message


def test_a_sharding_must_be_one():
    with pytest.raises(TypeError, match="must be a PartitionSpec or a Sharding, got a str: 'data'"):
        with_sharding_constraint(jnp.ones(8), "data", mesh=mesh_of())


def test_the_mesh_in_force_is_the_innermost():
    outer, inner = mesh_of(), mesh_on(jax.devices()[:2], (2,), ("x",))
    assert mesh_in_force() is None
    with legacy(outer):
        assert mesh_in_force() is outer
        with jax.set_mesh(inner):
            assert mesh_in_force() is inner
            assert mesh_in_force(outer) is outer
            assert jax.jit(lambda x: x * mesh_in_force().size)(2) == 4
    assert mesh_of("explicit").axis_types == (AxisType.Explicit,) * 2
