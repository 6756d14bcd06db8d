"""The examples of Haliax's documentation of partitioning, with `automesh.partition`."""

from __future__ import annotations

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh import partition
from automesh.partition import (
    ResourceAxis,
    ResourceMapping,
    auto_sharded,
    axis_mapping,
    fsdp,
    named_jit,
    physical_axis_name,
    physical_axis_size,
    round_axis_for_partitioning,
    shard,
    shard_with_axis_mapping,
    sharding_for_axis,
)

Batch = hax.Axis("batch", 32)
SeqLen = hax.Axis("seqlen", 512)
Embed = hax.Axis("embed", 16)
BY_DATA: ResourceMapping = {"batch": "data"}


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:16]).reshape((-1, 2)), ("data", "model"))


@pytest.fixture
def here(mesh):
    with jax.set_mesh(mesh):
        yield mesh


def split(array, *spec):
    return array.array.sharding.is_equivalent_to(
        NamedSharding(array.array.sharding.mesh, PartitionSpec(*spec)), array.array.ndim
    )


def test_a_device_mesh_and_a_batch_on_it(mesh):
    assert dict(mesh.shape) == {"data": 8, "model": 2}
    batch = jnp.zeros((32, 512), dtype=jnp.float32)
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data", None)))
    assert batch.addressable_data(0).shape == (4, 512)


def test_in_a_nutshell(here):
    batch = hax.zeros((Batch, SeqLen), dtype=jnp.float32)
    assert split(shard(batch, BY_DATA), "data")
    # We also have "auto_sharded" and support context mappings for axis mappings.
    with axis_mapping(BY_DATA):
        batch = hax.zeros((Batch, SeqLen), dtype=jnp.float32)
        assert split(shard(batch), "data")
        assert split(auto_sharded(batch), "data")
        assert split(shard_with_axis_mapping(batch, {"seqlen": "model"}), None, "model")


def test_one_function_inside_and_outside_of_jit(here):
    batch = hax.ones((Batch, SeqLen))

    @jax.jit
    def inside(x):
        return shard(x * 2, BY_DATA)

    assert split(inside(batch), "data")
    assert split(shard(batch * 2, BY_DATA), "data")


def test_a_context_mapping_is_for_its_block_alone(here):
    with axis_mapping({"batch": "data"}):
        with axis_mapping({"embed": "model"}, merge=True, seqlen="data"):
            held = partition.current_thread_local_mapping()
        assert held == {"batch": "data", "embed": "model", "seqlen": "data"}
        assert partition.current_thread_local_mapping() == {"batch": "data"}
    assert partition.current_thread_local_mapping() is None


def test_auto_sharded_without_a_mapping_does_nothing(here):
    batch = hax.zeros((Batch, SeqLen))
    assert auto_sharded(batch) is batch


def values(*axes):
    sizes = [axis.size for axis in axes]
    return hax.named(np.sin(np.arange(np.prod(sizes)), dtype=np.float32).reshape(sizes), axes)


def by_hand(fn, arg, *, before, during, after):
    """What the documentation says that `named_jit` is like."""

    def wrapped(x):
        return shard(fn(x), after)

    arg = shard(arg, before)
    with axis_mapping(during):
        return jax.jit(wrapped)(arg)


def double(x):
    return auto_sharded(x * 2)


def test_named_jit_is_what_its_documentation_says(here):
    batch = values(Batch, Embed)
    mappings = {"before": {"embed": "data"}, "during": BY_DATA, "after": {"embed": "model"}}
    wanted = by_hand(double, batch, **mappings)
    jitted = named_jit(
        double,
        axis_resources=mappings["during"],
        in_axis_resources=mappings["before"],
        out_axis_resources=mappings["after"],
    )
    got = jitted(batch)
    assert split(got, None, "model")
    assert split(wanted, None, "model")
    assert (got.array == wanted.array).all()


def test_named_jit_as_a_decorator(here):
    @named_jit(axis_resources=BY_DATA)
    def twice(x):
        return x * 2

    @named_jit
    def thrice(x):
        return x * 3

    batch = hax.ones((Batch, Embed))
    assert split(twice(batch), "data")
    with axis_mapping(BY_DATA):
        assert split(thrice(batch), "data")


def test_arguments_are_donated(here):
    mapping = {"batch": "data"}
    batch, other = (shard(hax.ones((Batch, Embed)), mapping) for _ in range(2))
    add = named_jit(lambda x, y: x + y, mapping, donate_args=(True, False))
    assert add(batch, other).array.sum() == 2 * Batch.size * Embed.size
    assert batch.array.is_deleted()
    assert not other.array.is_deleted()


PARAMETERS: ResourceMapping = {"embed": "data"}
COMPUTE: ResourceMapping = {"batch": "data"}


def step(weights, batch):
    activations = auto_sharded(hax.dot(batch, weights, axis=Embed))
    return weights - 0.1 * hax.mean(activations), activations


def equivalent():
    @named_jit(in_axis_resources=PARAMETERS, out_axis_resources=PARAMETERS, axis_resources=COMPUTE)
    def f(*args, **kwargs):
        return step(*args, **kwargs)

    return f


@pytest.mark.parametrize(
    "make",
    [
        lambda: fsdp(step, PARAMETERS, COMPUTE),
        lambda: fsdp(step, parameter_mapping=PARAMETERS, compute_mapping=COMPUTE),
        lambda: fsdp(PARAMETERS, COMPUTE)(step),
        lambda: fsdp(parameter_mapping=PARAMETERS, compute_mapping=COMPUTE)(step),
    ],
    ids=["positional", "keywords", "decorator", "decorator by keywords"],
)
def test_fsdp_is_named_jit_with_two_mappings(here, make):
    head = hax.Axis("head", 4)
    weights, batch = values(Embed, head), values(Batch, Embed)
    wanted, got = equivalent()(weights, batch), make()(weights, batch)
    for one, other in zip(wanted, got, strict=True):
        np.testing.assert_allclose(one.array, other.array, rtol=1e-6)
    assert split(got[0], "data")


def test_what_an_axis_is_mapped_to(here):
    mapping = {"batch": (ResourceAxis.DATA, ResourceAxis.MODEL), "embed": "model"}
    assert physical_axis_name(Batch, mapping) == ("data", "model")
    assert physical_axis_name("seqlen", mapping) is None
    assert physical_axis_size(Batch, mapping) == 16
    assert physical_axis_size("embed", mapping) == 2
    assert sharding_for_axis(Batch, mapping).spec == PartitionSpec(("data", "model"))
    assert sharding_for_axis((SeqLen, Embed), mapping).spec == PartitionSpec(None, "model")


def test_an_axis_is_rounded_so_that_it_can_be_split(here):
    vocab = round_axis_for_partitioning(hax.Axis("vocab", 50257), {"vocab": "data"})
    assert (vocab.name, vocab.size) == ("vocab", 50264)
    assert split(shard(hax.zeros((vocab,)), {"vocab": "data"}), "data")
