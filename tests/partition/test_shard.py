"""`shard` acts wherever it is called, and never silently does nothing."""

from __future__ import annotations

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from automesh.errors import IllegalMapping, UnknownMeshAxis, UsageError, WrongType
from automesh.partition import (
    auto_sharded,
    axis_mapping,
    current_thread_local_mapping,
    infer_resource_partitions,
    mesh_context,
    pspec_for,
    pspec_for_axis,
    set_mesh,
    shard,
    shard_with_axis_mapping,
)
from tests.support.partition_meshes import AUTO, CONTEXTS, EXPLICIT, MIXED, legacy, mesh_of

P = PartitionSpec
MAPPING = {"embed": "data", "mlp": "model", "both": ("data", "model")}
NAMES = ("embed", "mlp")


def test_values_stay_as_they_are() -> None:
    value = np.arange(128.0).reshape(8, 16)
    split = shard(value, MAPPING, mesh_of(), names=NAMES)
    assert split.addressable_data(0).shape == (2, 8)
    np.testing.assert_array_equal(np.asarray(split), value)


def jax_can_differentiate_at_once(types: tuple[AxisType, ...], context: str) -> bool:
    return types == AUTO or context in ("set_mesh", "both")


@pytest.mark.parametrize("types", [AUTO, EXPLICIT, MIXED])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("where", ["outside", "jit", "grad", "jit of grad"])
def test_it_acts_in_every_context(context: str, where: str, types: tuple[AxisType, ...]) -> None:
    mesh = mesh_of(types)
    enter, argument = CONTEXTS[context]

    def split(x: jax.Array) -> jax.Array:
        return shard(x, MAPPING, argument(mesh), names=NAMES)

    def total(x: jax.Array) -> jax.Array:
        return (split(x) ** 2).sum()

    run = {
        "outside": split,
        "jit": jax.jit(split),
        "grad": jax.grad(total),
        "jit of grad": jax.jit(jax.grad(total)),
    }[where]
    # A program over explicit axes needs an argument on the mesh, if not a context.
    x = shard(jnp.ones((8, 16)), {}, mesh, names=NAMES)
    with enter(mesh):
        if where == "grad" and not jax_can_differentiate_at_once(types, context):
            # Outside `jit` jax derives a reshard only under `set_mesh`.
            with pytest.raises(ValueError, match=r"cotangent|set_mesh|cannot reshape"):
                run(x)
            return
        result = run(x)
    if where in ("outside", "jit"):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    np.testing.assert_array_equal(np.asarray(result), 2.0 if "grad" in where else 1.0)


@pytest.mark.parametrize("context", ["set_mesh", "legacy", "argument"])
def test_the_constraint_reaches_the_compiled_program(context: str) -> None:
    mesh = mesh_of()
    enter, argument = CONTEXTS[context]
    with enter(mesh):
        step = jax.jit(lambda x: shard(x * 2, MAPPING, argument(mesh), names=NAMES))
        compiled = step.lower(jnp.ones((8, 16))).compile()
    (sharding,) = jax.tree.leaves(compiled.output_shardings)
    assert sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_vmap_leaves_the_new_dimension_alone() -> None:
    mesh = mesh_of()
    split = jax.vmap(lambda x: shard(x, MAPPING, mesh, names=NAMES))(jnp.ones((3, 8, 16)))
    assert split.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data", "model")), 3)


def test_one_program_serves_meshes_of_the_same_sizes() -> None:
    split = jax.jit(lambda x: shard(x, MAPPING, names=NAMES))
    for mesh in (mesh_of(), mesh_of(order=-1), mesh_of()):
        with jax.set_mesh(mesh):
            assert split(jnp.ones((8, 16))).sharding.mesh == mesh


def test_an_existing_sharding_is_overwritten_and_an_empty_mapping_replicates() -> None:
    mesh = mesh_of()
    split = shard(jnp.ones((8, 16)), MAPPING, mesh, names=NAMES)
    assert shard(split, {}, mesh, names=NAMES).sharding.is_fully_replicated
    assert shard(split, {"mlp": "data"}, mesh, names=NAMES).sharding.spec == P(None, "data")


def test_an_array_that_is_there_is_not_copied() -> None:
    mesh = mesh_of()
    split = shard(jnp.ones((8, 16)), MAPPING, mesh, names=NAMES)
    assert shard(split, MAPPING, mesh, names=NAMES) is split


def test_abstract_arrays_get_their_sharding_noted() -> None:
    mesh = mesh_of()
    struct = shard(jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), MAPPING, mesh, names=NAMES)
    assert struct.sharding == NamedSharding(mesh, P("data", "model"))
    assert struct.dtype == jnp.bfloat16
    abstract = AbstractMesh((4, 2), ("data", "model"))
    assert shard(struct, {}, abstract, names=NAMES).sharding.mesh == abstract


def test_a_dimension_may_be_split_over_several_axes_in_their_order() -> None:
    mesh = mesh_of()
    names, x = ("both",), np.arange(8)
    split = shard(x, {"both": ("model", "data")}, mesh, names=names)
    assert split.sharding.spec == P(("model", "data"))
    first = mesh.devices[:, 0].tolist()
    assert [int(s.data[0]) for s in split.addressable_shards if s.device in first] == [0, 1, 2, 3]


def test_without_a_mapping_or_a_mesh_it_says_so() -> None:
    x = {"w": jnp.ones((8, 16))}
    names = {"w": NAMES}
    with pytest.warns(RuntimeWarning, match="no axis mapping found"):
        assert shard(x, names=names) is x
    with pytest.warns(RuntimeWarning, match="no mesh found"):
        assert shard(x, MAPPING, names=names) is x
    with pytest.warns(RuntimeWarning, match="no mesh found"):
        jax.jit(lambda x: shard(x, MAPPING, names=names))(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: shard(x, names=names))(x)
        assert auto_sharded(x) is x


@pytest.mark.parametrize("types", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
@pytest.mark.parametrize("context", ["legacy", "argument"])
def test_jit_over_explicit_axes_takes_arguments_of_one_device(
    context: str, types: tuple[AxisType, ...]
) -> None:
    mesh = mesh_of(types)
    enter, argument = CONTEXTS[context]

    def split(x: jax.Array) -> jax.Array:
        return shard(x, MAPPING, argument(mesh), names=NAMES)

    x = jnp.ones((8, 16))
    with enter(mesh):
        split_x = jax.jit(split)(x)
        of_three = jax.jit(jax.vmap(split))(jnp.stack([x] * 3))
        slope = jax.jit(jax.grad(lambda x: (split(x) ** 2).sum()))(x)
    assert split_x.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert of_three.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data", "model")), 3)
    np.testing.assert_array_equal(np.asarray(slope), 2.0)


def test_strict_refuses_a_tree_in_which_nothing_has_names() -> None:
    mesh = mesh_of()
    for tree in (jnp.ones(8), {"w": [jnp.ones(8)]}, {"w": object()}):
        assert shard(tree, MAPPING, mesh) is not None
        with pytest.raises(UsageError, match="nothing in the tree has names"):
            shard(tree, MAPPING, mesh, strict=True)
    for empty in (None, {}, {"w": None}):
        assert shard(empty, MAPPING, mesh, strict=True) == empty
    tree = {"w": jnp.ones(8), "b": jnp.ones(3)}
    split = shard(tree, MAPPING, mesh, names={"w": ("embed",), "b": None}, strict=True)
    assert split["w"].sharding.spec == P("data")


@pytest.mark.parametrize("missing", ["mapping", "mesh"])
def test_strict_raises_instead(missing: str) -> None:
    arguments = (None, mesh_of()) if missing == "mapping" else (MAPPING, None)
    with pytest.raises(UsageError, match="nothing can be sharded"):
        shard(jnp.ones((8, 16)), *arguments, names=NAMES, strict=True)
    with pytest.raises(UsageError, match="nothing can be sharded"):
        jax.jit(lambda x: shard(x, *arguments, names=NAMES, strict=True))(jnp.ones((8, 16)))


@pytest.mark.parametrize("traced", [False, True])
def test_what_cannot_be_split_is_an_error_that_names_it(traced: bool) -> None:
    mesh = mesh_of()

    def attempt(shape, mapping, names):
        run = lambda x: shard({"layer": [x]}, mapping, mesh, names={"layer": [names]})  # noqa: E731
        (jax.jit(run) if traced else run)(jnp.ones(shape))

    with pytest.raises(IllegalMapping) as error:
        attempt((8, 6), {"mlp": "data"}, NAMES)
    assert str(error.value).startswith(
        "axis `mlp` of array `layer/0` has size 6, which the size 4 of mesh axis `data` does not"
    )
    with pytest.raises(IllegalMapping) as error:
        attempt((12, 6), {"embed": ("model", "data")}, NAMES)
    assert "size 12, which the size 2 * 4 = 8 of mesh axes `model`, `data`" in str(error.value)
    with pytest.raises(UnknownMeshAxis) as unknown:
        attempt((8, 16), {"mlp": "modle"}, NAMES)
    assert str(unknown.value).startswith(
        "axis `mlp` of array `layer/0` is mapped to the mesh axis `modle`, which is none of: "
        "data, model (did you mean `model`?)"
    )
    with pytest.raises(IllegalMapping) as error:
        attempt((8, 16), {"embed": "data", "mlp": ("model", "data")}, NAMES)
    assert str(error.value).startswith(
        "axes `embed` and `mlp` of array `layer/0` (sizes 8 and 16) are both mapped to the mesh "
        "axis `data`"
    )
    with pytest.raises(IllegalMapping, match="is mapped to the mesh axis `data` twice"):
        attempt((16, 16), {"embed": ("data", "data")}, NAMES)
    with pytest.raises(UsageError, match="has the 1 names"):
        attempt((8, 16), MAPPING, ("embed",))


def test_errors_are_what_the_seeds_promise() -> None:
    assert issubclass(IllegalMapping, ValueError)
    assert issubclass(UnknownMeshAxis, KeyError)
    assert issubclass(WrongType, TypeError)


def test_best_effort_splits_as_far_as_the_sizes_allow() -> None:
    mesh = mesh_of()
    for size, entry in ((6, None), (4, "data"), (12, "data"), (16, ("data", "model")), (3, None)):
        split = shard(jnp.ones(size), MAPPING, mesh, names=("both",), best_effort=True)
        assert split.sharding.is_equivalent_to(NamedSharding(mesh, P(entry)), 1), size
    with pytest.raises(UnknownMeshAxis):
        shard(jnp.ones(6), {"both": "absent"}, mesh, names=("both",), best_effort=True)


WRONG_MAPPINGS = [
    "data",
    [("embed", "data")],
    {3: "data"},
    {"embed": 3},
    {"embed": ["data", 3]},
    {"embed": {"data": 4}},
]


@pytest.mark.parametrize("wrong", WRONG_MAPPINGS, ids=str)
def test_a_wrong_mapping_is_told(wrong) -> None:
    for call in (
        lambda: shard(jnp.ones(8), wrong, mesh_of()),
        lambda: pspec_for(jnp.ones(8), wrong),
        lambda: infer_resource_partitions(jnp.ones(8), wrong, mesh=mesh_of()),
        lambda: axis_mapping(wrong).__enter__(),
    ):
        with pytest.raises(WrongType, match="mapp"):
            call()


def test_a_wrong_mesh_is_told() -> None:
    with pytest.raises(WrongType, match=r"must be a jax\.sharding\.Mesh, got a dict"):
        shard(jnp.ones(8), MAPPING, MAPPING, names=("embed",))
    with pytest.raises(WrongType, match=r"must be a jax\.sharding\.Mesh"):
        mesh_context(3)
    with pytest.raises(UsageError, match="abstract mesh, which has no devices"):
        shard(jnp.ones(8), MAPPING, mesh_of().abstract_mesh, names=("embed",))


def test_inside_shard_map_manual_axes_are_refused_and_others_split() -> None:
    mesh = mesh_of()

    def over(axis: str):
        return jax.jit(
            jax.shard_map(
                lambda x: shard(x, {"embed": axis}, names=NAMES),
                mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
            )
        )(jnp.ones((8, 16)))  # fmt: skip

    with pytest.raises(IllegalMapping, match="manual here"):
        over("data")
    assert over("model").sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "model"))), 2)


def test_explicit_axes_come_first_in_a_dimension_of_a_mixed_mesh() -> None:
    def over(*axes: str):
        split = jax.jit(lambda x: shard(x, {"both": axes}, names=("both", "rest")))
        return split(jnp.ones((8, 4)))

    with jax.set_mesh(mesh_of(MIXED)):
        assert over("data", "model").sharding.spec == P(("data", "model"))
        with pytest.raises(IllegalMapping, match="`data` is of type explicit and must come before"):
            over("model", "data")


def test_auto_sharded_and_the_older_name_do_the_same() -> None:
    mesh, x = mesh_of(), {"w": jnp.ones(8)}
    with axis_mapping(MAPPING):
        assert auto_sharded(x, mesh)["w"] is x["w"]
    assert shard_with_axis_mapping(x, MAPPING, mesh)["w"] is x["w"]
    assert set_mesh is mesh_context


def test_mesh_context_takes_abstract_meshes_too() -> None:
    mesh = mesh_of()
    for one in (mesh, mesh.abstract_mesh):
        with mesh_context(one):
            assert dict(jax.sharding.get_abstract_mesh().shape) == {"data": 4, "model": 2}


def test_set_mesh_wins_over_a_legacy_context() -> None:
    new, old = mesh_of(), mesh_of(order=-1)
    with legacy(old), jax.set_mesh(new):
        assert shard(jnp.ones((8, 16)), MAPPING, names=NAMES).sharding.mesh == new


def test_axis_mapping_replaces_or_merges() -> None:
    with axis_mapping({"a": "data"}):
        with axis_mapping({"b": "model"}):
            assert current_thread_local_mapping() == {"b": "model"}
        with axis_mapping({"a": "model", "b": None}, merge=True):
            assert current_thread_local_mapping() == {"a": "model", "b": None}
        with axis_mapping({"a": "model"}, merge=True, outer_wins=True):
            assert current_thread_local_mapping() == {"a": "data"}
        with axis_mapping({"a": "x"}, merge=True, outer_wins=True, a="model"):
            assert current_thread_local_mapping() == {"a": "model"}
        with pytest.raises(KeyError), axis_mapping({}):
            raise KeyError
        assert current_thread_local_mapping() == {"a": "data"}
    assert current_thread_local_mapping() is None


def test_axis_mapping_is_of_its_thread() -> None:
    seen = []
    with axis_mapping({"a": "data"}):
        thread = threading.Thread(target=lambda: seen.append(current_thread_local_mapping()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_what_the_mapping_is_cannot_be_changed_from_outside() -> None:
    given = {"a": "data"}
    with axis_mapping(given):
        given["b"] = "model"
        current_thread_local_mapping()["c"] = "model"
        assert current_thread_local_mapping() == {"a": "data"}


def test_a_jitted_function_follows_the_mapping_of_each_call() -> None:
    mesh, x = mesh_of(), jnp.ones((8, 8))
    split = jax.jit(lambda x: shard(x * 2, names=("a", "b")))
    with jax.set_mesh(mesh):
        for mapping in ({"a": "data"}, {"a": "model"}, {"b": ["data"]}, {"a": "data"}):
            with axis_mapping(mapping):
                wanted = NamedSharding(mesh, pspec_for_axis(("a", "b")))
                assert split(x).sharding.is_equivalent_to(wanted, 2), mapping
        assert split(x).sharding.is_fully_replicated


@pytest.mark.parametrize("kind", ["checkpoint", "scan", "cond"])
def test_what_was_traced_under_one_mapping_is_not_used_under_another(kind: str) -> None:
    mesh, x = mesh_of(), jnp.ones((8, 8))
    split = lambda x: shard(x * 2, names=("a", "b"))  # noqa: E731
    body = lambda x, _: (split(x), None)  # noqa: E731
    # The function that jax remembers is one and the same; the program around it is a new one.
    inner = {
        "checkpoint": jax.checkpoint(split),
        "scan": lambda x: jax.lax.scan(body, x, length=2)[0],
        "cond": lambda x: jax.lax.cond(x[0, 0] > 0, split, split, x),
    }[kind]
    with jax.set_mesh(mesh):
        for mapping, entries in (
            ({"a": "data"}, '[{"data"}, {}]'),
            ({"a": "model"}, '[{"model"}, {}]'),
            ({"b": "data"}, '[{}, {"data"}]'),
            ({"a": "data"}, '[{"data"}, {}]'),
        ):
            with axis_mapping(mapping):
                text = jax.jit(lambda x: inner(x)).lower(x).as_text()
            found = [line for line in text.splitlines() if "sdy.sharding_constraint" in line]
            assert found and all(entries in line for line in found), mapping


def test_one_mapping_is_traced_once_however_it_is_written() -> None:
    traced = []

    @jax.jit
    def step(x):
        traced.append(current_thread_local_mapping())
        return x

    for mapping in ({"a": "x", "b": ("y", "z")}, {"b": ["y", "z"], "a": "x"}):
        with axis_mapping(mapping):
            step(1.0)
    with axis_mapping({"a": "x"}), axis_mapping({"b": ("y", "z")}, merge=True):
        step(1.0)
    assert len(traced) == 1
    step(1.0)
    with pytest.raises(KeyError), axis_mapping({"a": "x"}):
        raise KeyError
    step(1.0)
    assert traced[1:] == [None]
