"""Haliax's own arrays and modules, and what its own partitioning tests assert."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.partitioning
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from packaging.version import Version

import automesh.partition
from automesh.errors import IllegalMapping, UnknownMeshAxis, UsageError
from automesh.partition import (
    Axis,
    ResourceAxis,
    axis_mapping,
    current_thread_local_mapping,
    fsdp,
    infer_resource_partitions,
    named_jit,
    physical_axis_name,
    physical_axis_size,
    pspec_for,
    pspec_for_axis,
    round_axis_for_partitioning,
    shard,
    sharding_for_axis,
)
from tests.support.partition_meshes import CONTEXTS, EXPLICIT, mesh_of

P = PartitionSpec
# Haliax looks for a mesh where jax no longer wants it to.
pytestmark = pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources")
Dim1, Dim2, Dim3 = hax.Axis("dim1", 8), hax.Axis("dim2", 16), hax.Axis("dim3", 32)
MAPPING = {"dim2": ResourceAxis.DATA, "dim3": ResourceAxis.MODEL}
# With the mesh as an argument of `named_jit` the context is jax's own, which the wrapper enters.
KNOWN = [name for name in CONTEXTS if name != "argument"]


class Module(eqx.Module):
    named: hax.NamedArray
    plain: jax.Array
    scalar: jax.Array
    static: int = eqx.field(static=True)

    def __init__(self, static: int = 1) -> None:
        self.named = hax.ones((Dim1, Dim2, Dim3))
        self.plain = jnp.ones(Dim2.size)
        self.scalar = jnp.ones(())
        self.static = static


class Outer(eqx.Module):
    inner: Module

    def __init__(self) -> None:
        self.inner = Module()


class Fields(eqx.Module):
    """Plain arrays whose names are said by their fields."""

    weight: jax.Array = hax.field(axis_names=("dim2", "dim3"))
    bias: jax.Array
    inner: Module


def test_every_public_name_of_haliax_is_here() -> None:
    theirs = set(haliax.partitioning.__all__) | {
        "physical_axis_size", "sharding_for_axis", "mesh_context", "set_mesh",
    }  # fmt: skip
    assert theirs <= set(automesh.partition.__all__)
    assert {axis.value for axis in ResourceAxis} == {
        getattr(haliax.partitioning.ResourceAxis, axis.name) for axis in ResourceAxis
    }


@pytest.mark.parametrize("kind", KNOWN)
def test_infer_named_axes(kind: str) -> None:
    mesh = mesh_of()
    with CONTEXTS[kind][0](mesh), axis_mapping(MAPPING):
        found = infer_resource_partitions(Module(), preserve_existing_shardings=False)
        nested = infer_resource_partitions(Outer(), preserve_existing_shardings=False)
    assert found.named == NamedSharding(mesh, P(None, "data", "model"))
    assert found.plain.is_fully_replicated and found.scalar.is_fully_replicated
    assert nested.inner.named == found.named


def test_existing_shardings_are_preserved_unless_asked() -> None:
    mesh = mesh_of()
    module = shard(Module(), MAPPING, mesh)
    kept = infer_resource_partitions(module, {}, mesh=mesh)
    assert kept.named == module.named.array.sharding
    assert pspec_for(module, {}).named is None
    assert pspec_for(module, {}, False).named == P(None, None, None)
    assert pspec_for(module, MAPPING, False).plain == P(None)
    abstract = eqx.filter_eval_shape(Module)
    assert pspec_for(abstract, MAPPING).named == P(None, "data", "model")
    with pytest.raises(UsageError, match="no axis mapping found"):
        pspec_for(module)
    with pytest.raises(UsageError, match="no mesh found"):
        infer_resource_partitions(module, MAPPING)


@pytest.mark.parametrize("kind", KNOWN)
def test_module_initialised_in_named_jit(kind: str) -> None:
    mesh = mesh_of()
    with CONTEXTS[kind][0](mesh), axis_mapping(MAPPING):
        module, outer, given = named_jit(Module)(), named_jit(Outer)(), named_jit(Module)(3)
    assert module.named.array.sharding.spec == P(None, "data", "model")
    assert module.plain.sharding.is_fully_replicated and module.scalar.shape == ()
    assert module.scalar.sharding.is_fully_replicated
    assert outer.inner.named.axes == (Dim1, Dim2, Dim3)
    assert given.static == 3 and isinstance(given, Module)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_shard_outside_and_inside_jit(kind: str) -> None:
    mesh = mesh_of()
    enter, argument = CONTEXTS[kind]
    x, y = hax.ones((Dim1, Dim2)), hax.ones((Dim2, Dim3))
    with enter(mesh):
        for split in (
            lambda one: shard(one, MAPPING, argument(mesh)),
            jax.jit(lambda one: shard(one, MAPPING, argument(mesh))),
            named_jit(lambda one: shard(one, MAPPING, argument(mesh)), out_axis_resources=MAPPING,
                      mesh=argument(mesh)),
        ):  # fmt: skip
            assert split(x).array.sharding.spec == P(None, "data")
            assert split(y).array.sharding.spec == P("data", "model")
            assert split(y).axes == y.axes


@pytest.mark.parametrize("kind", KNOWN)
def test_without_a_mapping_named_jit_leaves_results_alone_and_shard_inside_it_acts(kind) -> None:
    mesh = mesh_of()
    with CONTEXTS[kind][0](mesh):
        assert named_jit(lambda x: x)(hax.ones((Dim1, Dim2))).array.sharding.is_fully_replicated
        split = named_jit(lambda x: shard(x, MAPPING))(hax.ones((Dim1, Dim2)))
    assert split.array.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_haliaxs_own_shard_follows_inside_our_named_jit(kind: str) -> None:
    # In Haliax 1.4 it does nothing inside jit under a legacy context.
    mesh = mesh_of()
    enter, argument = CONTEXTS[kind]
    seen = []

    def step(x: hax.NamedArray) -> hax.NamedArray:
        seen.append(haliax.partitioning.current_thread_local_mapping())
        return hax.auto_sharded(x * 2) + 0.0

    with enter(mesh):
        step_jit = named_jit(step, MAPPING, out_axis_resources=MAPPING, mesh=argument(mesh))
        text = step_jit.lower(hax.ones((Dim2, Dim3))).as_text()
    assert seen == [MAPPING]
    # One constraint of Haliax's and one of ours.
    assert text.count("sdy.sharding_constraint") == 2


def test_axis_mapping_and_haliaxs_own_see_each_other() -> None:
    theirs = haliax.partitioning.current_thread_local_mapping
    with axis_mapping({"a": "data"}):
        assert theirs() == {"a": "data"}
        with hax.axis_mapping({"b": "model"}):
            assert current_thread_local_mapping() == {"b": "model"}
            with axis_mapping({"c": "data"}, merge=True):
                assert theirs() == current_thread_local_mapping() == {"b": "model", "c": "data"}
        assert current_thread_local_mapping() == {"a": "data"}
    assert theirs() is None and current_thread_local_mapping() is None


def test_explicit_axes_are_resharded_where_haliax_asserts() -> None:
    mesh, x = mesh_of(EXPLICIT), hax.ones((Dim2, Dim3))
    with jax.set_mesh(mesh):
        with pytest.raises(AssertionError):
            jax.jit(lambda x: hax.shard(x, MAPPING))(x)
        assert jax.jit(lambda x: shard(x, MAPPING))(x).array.sharding.spec == P("data", "model")


def test_what_haliax_lets_pass_inside_jit_is_an_error() -> None:
    x = hax.ones({"dim2": 6})
    with jax.set_mesh(mesh_of()):
        theirs = jax.jit(lambda x: hax.shard(x, MAPPING))
        if Version(jax.__version__) < Version("0.11"):
            assert theirs(x).array.sharding.is_fully_replicated
        else:  # jax itself refuses it, once the step has run.
            with pytest.raises(ValueError, match="dim_size=2 is not divisible by axis_size=4"):
                theirs(x)
        for run in (
            jax.jit(lambda x: shard({"w": x}, MAPPING)),
            named_jit(lambda x: {"w": x}, MAPPING),
            lambda x: infer_resource_partitions({"w": x}, MAPPING, False),
        ):
            with pytest.raises(IllegalMapping, match="`dim2` of array `w` has size 6, which the"):
                run(x)


def test_filtered_and_abstract_named_arrays() -> None:
    mesh = mesh_of()
    module = eqx.filter_eval_shape(Module)
    split = shard(module, MAPPING, mesh)
    assert split.named.array.sharding.spec == P(None, "data", "model")
    assert split.named.axes == module.named.axes
    nothing = eqx.filter(Module(), lambda _: False)
    assert shard(nothing, MAPPING, mesh).named.array is None
    assert pspec_for(nothing, MAPPING).named is None


def test_fields_may_say_the_names_of_plain_arrays() -> None:
    mesh = mesh_of()
    fields = Fields(weight=jnp.ones((16, 32)), bias=jnp.ones(32), inner=Module())
    specs = pspec_for([fields], MAPPING, False)[0]
    assert (specs.weight, specs.bias, specs.inner.named) == (
        P("data", "model"), P(None), P(None, "data", "model"),
    )  # fmt: skip
    theirs = haliax.partitioning.pspec_for(fields, MAPPING, False)
    assert (theirs.weight, theirs.bias, theirs.inner.named) == dataclasses.astuple(
        dataclasses.replace(specs, inner=specs.inner.named)
    )
    split = shard(fields, MAPPING, mesh)
    assert split.weight.sharding.spec == P("data", "model")
    assert split.inner.named.array.sharding.spec == P(None, "data", "model")
    with pytest.raises(IllegalMapping, match=r"array `0/weight`"):
        shard([fields], {"dim2": "data", "dim3": "data"}, mesh)


class WithArguments(eqx.Module):
    given: hax.NamedArray
    made: hax.NamedArray

    def __init__(self, given: hax.NamedArray) -> None:
        self.given = given
        self.made = hax.zeros(Dim3)


@pytest.mark.parametrize("kind", KNOWN)
def test_arguments_of_named_jit_and_its_own_results_are_taken(kind: str) -> None:
    with CONTEXTS[kind][0](mesh_of()), axis_mapping(MAPPING):
        module = named_jit(WithArguments)(hax.ones((Dim1, Dim2)))
        made = named_jit(lambda: hax.zeros((Dim1, Dim2, Dim3)), MAPPING)()
        again = named_jit(lambda x: x, MAPPING)(made)
    assert module.given.axes == (Dim1, Dim2) and module.made.axes == (Dim3,)
    assert module.made.array.sharding.spec == P("model")
    assert again.axes == made.axes == (Dim1, Dim2, Dim3)
    assert again.array.sharding == made.array.sharding


def test_arrays_of_one_device_are_moved_to_all() -> None:
    x = jax.device_put(hax.ones((Dim1, Dim2)), jax.devices()[3])
    mesh = mesh_of()
    for mapping in (MAPPING, {}):
        assert shard(x, mapping, mesh).array.devices() == set(mesh.devices.flat)


class Mlp(eqx.Module):
    """Haliax's own layers, as its tutorial uses them."""

    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(key: jax.Array) -> Mlp:
        first, second = jax.random.split(key)
        return Mlp(
            hax.nn.Linear.init(Dim2, Dim3, key=first), hax.nn.Linear.init(Dim3, Dim2, key=second)
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        return self.down(hax.nn.relu(self.up(hax.auto_sharded(x))))


def test_training_gives_the_same_on_a_mesh_as_on_one_device() -> None:
    optimizer = optax.adam(1e-2)
    x = hax.random.normal(jax.random.key(1), (Dim1, Dim2))

    def step(model: Mlp, state: optax.OptState, x: hax.NamedArray):
        loss, slope = eqx.filter_value_and_grad(lambda m: ((m(x) - x) ** 2).mean().scalar())(model)
        updates, state = optimizer.update(slope, state)
        return eqx.apply_updates(model, updates), state, loss

    def losses(run, model: Mlp, state: optax.OptState) -> list[float]:
        found = []
        for _ in range(3):
            model, state, loss = run(model, state, x)
            found.append(float(loss))
        if run is not alone:
            assert model.up.weight.array.addressable_data(0).size == 16 * 32 / 4
            assert state[0].mu.up.weight.array.addressable_data(0).size == 16 * 32 / 4
        return found

    model = Mlp.init(jax.random.key(0))
    alone = eqx.filter_jit(step)
    wanted = losses(alone, model, optimizer.init(model))
    split = fsdp(step, {"dim2": "data"}, {"dim1": "data", "dim3": "model"})
    with jax.set_mesh(mesh_of()):
        found = losses(split, model, optimizer.init(model))
    assert wanted[0] > wanted[2] > 0
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("form", ["positional", "keyword", "mixed", "decorator", "named decorator"])
def test_fsdp_in_every_form(form: str) -> None:
    parameters, compute = {"dim2": "data"}, {"dim1": "data"}
    seen = []

    def step(w: hax.NamedArray, x: hax.NamedArray) -> hax.NamedArray:
        seen.append(current_thread_local_mapping())
        return w + shard(x, MAPPING).sum("dim1")

    forms = {
        "positional": lambda: fsdp(step, parameters, compute),
        "keyword": lambda: fsdp(fn=step, parameter_mapping=parameters, compute_mapping=compute),
        "mixed": lambda: fsdp(step, parameter_mapping=parameters, compute_mapping=compute),
        "decorator": lambda: fsdp(parameters, compute)(step),
        "named decorator": lambda: fsdp(parameter_mapping=parameters, compute_mapping=compute)(
            step
        ),
    }
    with jax.set_mesh(mesh_of()):
        out = forms[form]()(hax.ones((Dim2, Dim3)), hax.ones((Dim1, Dim2)))
    assert seen == [compute]
    assert out.array.addressable_data(0).shape == (4, 32)
    np.testing.assert_array_equal(np.asarray(out.array), 9.0)


def test_queries_take_haliaxs_axes_and_ours() -> None:
    mapping = {"b": "data", "v": ("data", "model"), "n": None}
    with jax.set_mesh(mesh_of()), axis_mapping(mapping):
        for kind in (hax.Axis, Axis):
            rounded = round_axis_for_partitioning(kind("v", 50257))
            assert rounded == kind("v", 50264) and type(rounded) is kind
            assert round_axis_for_partitioning(kind("n", 5)) == kind("n", 5)
            assert physical_axis_size(kind("v", 1)) == 8
            assert physical_axis_name(kind("b", 1)) == "data"
        assert pspec_for_axis((Dim1, "b", Dim2)) == P(None, "data", None)
        assert pspec_for_axis({"b": 3, "x": None}) == P("data", None)
        assert pspec_for_axis(Dim1) == P(None)
        assert sharding_for_axis(("b", Dim1)).spec == P("data", None)
        with pytest.raises(IllegalMapping, match="axes `b` and `v` of the array are both mapped"):
            pspec_for_axis(("b", "v"))
    assert physical_axis_name("b", mapping) == "data"
    assert physical_axis_size("n", mapping) is None and physical_axis_size("x") is None
    assert round_axis_for_partitioning(Axis("x", 5), mapping) == Axis("x", 5)
    with pytest.raises(UsageError, match="no mesh found"):
        physical_axis_size("b", mapping)
    with jax.set_mesh(mesh_of()), pytest.raises(UnknownMeshAxis, match="`dat`, which is none of"):
        physical_axis_size("b", {"b": "dat"})
