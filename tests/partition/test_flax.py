"""Flax variables that carry logical names: nnx and linen, real and abstract."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from automesh.errors import IllegalMapping
from automesh.partition import (
    infer_resource_partitions,
    named_jit,
    pspec_for,
    shard,
)
from tests.support.partition_meshes import AUTO, EXPLICIT, mesh_of

P = PartitionSpec
MAPPING = {"embed": "data", "mlp": "model"}
INIT = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    """With a weight that is used twice, and one without names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(
            16, 32, kernel_init=nnx.with_partitioning(INIT, ("embed", "mlp")), rngs=rngs
        )
        self.tied = self.up.kernel
        self.scale = nnx.Param(jnp.ones(16), out_sharding=("embed",))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x * self.scale) @ self.tied.T


def block() -> Block:
    # Flax would shard by these names at once, taking them for mesh axes.
    with nnx.use_eager_sharding(False):
        return Block(nnx.Rngs(0))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        logical = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(32, kernel_init=logical)(x)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        return nn.Dense(16, kernel_init=boxed)(x)


def variables() -> dict:
    return Dense().init(jax.random.key(0), jnp.ones((4, 16)))


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("traced", [False, True])
def test_nnx_state_follows_its_names(traced: bool, types) -> None:
    mesh = mesh_of(types)
    graph, state = nnx.split(block())
    with jax.set_mesh(mesh):
        run = jax.jit(lambda s: shard(s, MAPPING)) if traced else lambda s: shard(s, MAPPING)
        split = run(state)
    assert split["tied"].get_value().sharding.spec == P("data", "model")
    assert split["scale"].get_value().sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert type(split["scale"]) is nnx.Param
    assert split["scale"].get_metadata("out_sharding") == ("embed",)
    np.testing.assert_array_equal(
        np.asarray(split["tied"].get_value()), np.asarray(state["tied"].get_value())
    )
    assert isinstance(nnx.merge(graph, split), Block)


def test_an_nnx_module_is_split_and_a_shared_variable_stays_shared() -> None:
    model = block()
    split = shard(model, MAPPING, mesh_of())
    assert isinstance(split, Block) and split is not model
    assert split.tied is split.up.kernel
    assert split.tied.get_value().sharding.spec == P("data", "model")
    assert split.up.bias.get_value().sharding == model.up.bias.get_value().sharding
    assert split.count.get_value().shape == ()
    x = jnp.ones((4, 16))
    np.testing.assert_allclose(np.asarray(split(x)), np.asarray(model(x)), rtol=1e-5)


def test_abstract_nnx_models_and_their_optimizer_states() -> None:
    mesh = mesh_of()
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(block(), optax.adam(1e-3), wrt=nnx.Param))
    assert shard(model, MAPPING, mesh).tied.get_value().sharding.spec == P("data", "model")
    state = shard(nnx.state(optimizer), MAPPING, mesh)
    kernels = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (16, 32)]
    assert len(kernels) == 2  # Adam's two moments.
    assert all(leaf.sharding.spec == P("data", "model") for leaf in kernels)


def test_nnx_specs_and_shardings_fit_jit() -> None:
    mesh, state = mesh_of(), nnx.state(block())
    specs = pspec_for(state, MAPPING, False)
    assert (specs["scale"], specs["up"]["bias"]) == (P("data"), P(None))
    shardings = infer_resource_partitions(state, MAPPING, False, mesh)
    out = jax.jit(lambda s: s, out_shardings=shardings)(state)
    assert out["tied"].get_value().sharding.spec == P("data", "model")
    step = named_jit(lambda s: jax.tree.map(lambda x: x + 1, s), MAPPING, mesh=mesh)
    assert step(state)["tied"].get_value().sharding.spec == P("data", "model")


@pytest.mark.parametrize("traced", [False, True])
def test_linen_boxes_follow_their_names_and_stay(traced: bool) -> None:
    mesh, boxed = mesh_of(), variables()
    run = (
        jax.jit(lambda v: shard(v, MAPPING, mesh)) if traced else lambda v: shard(v, MAPPING, mesh)
    )
    split = run(boxed)["params"]
    assert type(split["Dense_0"]["kernel"]) is nn.LogicallyPartitioned
    assert split["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")
    assert split["Dense_1"]["kernel"].value.sharding.spec == P("model", "data")
    assert split["Dense_1"]["kernel"].names == ("mlp", "embed")
    out = Dense().apply(nn.unbox({"params": split}), jnp.ones((4, 16)))
    wanted = Dense().apply(nn.unbox(boxed), jnp.ones((4, 16)))
    # A split product adds up in another order.
    np.testing.assert_allclose(np.asarray(out), np.asarray(wanted), rtol=1e-5, atol=1e-6)


def test_linen_specs_and_flaxs_own_names_as_a_parallel_tree() -> None:
    mesh = mesh_of()
    boxed = jax.eval_shape(variables)
    specs = pspec_for(boxed, MAPPING)["params"]
    assert specs["Dense_0"] == {"bias": P(None), "kernel": P("data", "model")}
    plain = shard(nn.unbox(boxed), MAPPING, mesh, names=nn.get_partition_spec(boxed))["params"]
    assert plain["Dense_1"]["kernel"].sharding.spec == P("model", "data")
    assert plain["Dense_1"]["bias"].sharding.is_fully_replicated


def test_errors_name_the_variable() -> None:
    mesh = mesh_of()
    with pytest.raises(IllegalMapping, match=r"of array `tied` .* both mapped to the mesh axis"):
        shard(nnx.state(block()), {"embed": "data", "mlp": "data"}, mesh)
    with pytest.raises(
        IllegalMapping, match="`embed` of array `params/Dense_0/kernel` has size 15"
    ):
        odd = jax.eval_shape(lambda: Dense().init(jax.random.key(0), jnp.ones((4, 15))))
        shard(odd, MAPPING, mesh)
