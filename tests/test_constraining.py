"""`with_sharding_constraint`: inside and outside jit, in every context, on every kind of axis."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.mesh.constraining import with_sharding_constraint
from automesh.mesh.context import mesh_in_force
from automesh.mesh.creating import mesh_on

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
    assert with_sharding_constraint(x, P("other"), mesh=one) is x


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
