"""`named_jit`: what is static, donated, placed and compiled again."""

from __future__ import annotations

import warnings

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from automesh.errors import IllegalMapping, UsageError, WrongType
from automesh.partition import axis_mapping, current_thread_local_mapping, fsdp, named_jit, shard
from tests.support.partition_meshes import mesh_of

P = PartitionSpec
Rows, Columns = hax.Axis("rows", 8), hax.Axis("columns", 16)
MAPPING = {"rows": "data", "columns": "model"}


def ones() -> hax.NamedArray:
    return hax.ones((Rows, Columns))


def local_shape(array: hax.NamedArray) -> tuple[int, ...]:
    return array.array.addressable_data(0).shape


def test_arguments_that_are_no_arrays_are_static_and_told_apart() -> None:
    seen = []

    @named_jit
    def step(x, factor, *, label="a", scale=None):
        seen.append((factor, label))
        return x * factor, label, None, {"depth": 2}

    x = jnp.ones(4)
    for factor in (1, True, 1.0, 1, 0.0, -0.0):
        out, label, nothing, tree = step(x, factor, label="b")
        assert (label, nothing, tree) == ("b", None, {"depth": 2})
        np.testing.assert_array_equal(np.asarray(out), factor * np.ones(4))
    assert [str(factor) for factor, _ in seen] == ["1", "True", "1.0", "0.0", "-0.0"]
    before = len(seen)
    for factor in (float("nan"), float("nan"), complex("nan"), complex("nan"), 0j, -0j):
        assert np.isnan(step(x, factor)[0]).all() or factor == 0
    assert len(seen) == before + 4
    step(np.ones(4, np.float32), np.float32(2.0))
    step(np.ones(4, np.float32), np.float32(3.0))
    assert len(seen) == before + 5


def test_an_argument_that_cannot_be_a_key_is_named() -> None:
    with pytest.raises(WrongType, match="argument `0/options` is neither an array nor hashable"):
        named_jit(lambda tree: tree)({"options": {1, 2}})


def test_the_context_mapping_is_used_and_a_new_one_compiles_again() -> None:
    x = ones()
    split = named_jit(lambda x: x * 2)
    with jax.set_mesh(mesh_of()):
        for mapping, shape in (({"rows": "data"}, (2, 16)), (MAPPING, (2, 8))):
            with axis_mapping(mapping):
                assert local_shape(split(x)) == shape


def test_a_rematerialised_layer_follows_the_mapping_of_each_program() -> None:
    layer = jax.checkpoint(lambda x: shard(x * 2, names=("rows", "columns")))
    mesh, x = mesh_of(), jnp.ones((8, 16))
    for mapping, constraint in (
        ({"rows": "data"}, '[{"data"}, {}]'),
        ({"columns": "model"}, '[{}, {"model"}]'),
        ({"rows": "data"}, '[{"data"}, {}]'),
    ):
        text = named_jit(lambda x: layer(x), mapping, mesh=mesh).lower(x).as_text()
        (line,) = [line for line in text.splitlines() if "sdy.sharding_constraint" in line][:1]
        assert constraint in line


def test_a_mapping_of_its_own_is_traced_once_whatever_holds_outside() -> None:
    seen = []
    step = named_jit(lambda x: seen.append(1) or x, MAPPING, mesh=mesh_of())
    for outer in ({"rows": "data"}, {"rows": "model"}):
        with axis_mapping(outer):
            step(ones())
    step(ones())
    assert len(seen) == 1


def test_out_axis_resources_win_for_the_result() -> None:
    seen = []

    def body(x):
        seen.append(current_thread_local_mapping())
        return x * 2

    with jax.set_mesh(mesh_of()):
        out = named_jit(body, MAPPING, out_axis_resources={"rows": "model"})(ones())
    assert local_shape(out) == (4, 16)
    assert seen == [MAPPING]


def test_a_mesh_argument_needs_no_context_and_holds_inside() -> None:
    mesh = mesh_of()
    split = named_jit(lambda x: shard(x * 2, MAPPING), mesh=mesh)
    x = ones()
    assert split(x).array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    # Another mesh of the same sizes holds outside.
    with jax.set_mesh(mesh_of(order=-1)):
        assert named_jit(lambda x: x, MAPPING, mesh=mesh)(x).array.sharding.mesh == mesh


def test_one_wrapper_serves_several_meshes() -> None:
    split = named_jit(lambda x: x * 2, MAPPING)
    for mesh in (mesh_of(), mesh_of(order=-1), mesh_of()):
        with jax.set_mesh(mesh):
            assert split(ones()).array.sharding.mesh == mesh


def test_arguments_follow_in_axis_resources_and_plain_ones_stay() -> None:
    mesh = mesh_of()
    rows = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
    step = named_jit(lambda x, rows, one: x, in_axis_resources=MAPPING, out_axis_resources={})
    with jax.set_mesh(mesh):
        compiled = step.lower(ones(), rows, jnp.ones(3)).compile()
        assert step(ones(), rows, jnp.ones(3)).array.sharding.is_fully_replicated
    # `jit` drops the arguments that the function does not use: ask for those it keeps.
    keeping = named_jit(
        lambda x, rows, one: x, in_axis_resources=MAPPING, keep_unused=True, mesh=mesh
    )
    compiled = keeping.lower(ones(), rows, jnp.ones(3)).compile()
    specs = [one.spec for one in jax.tree.leaves(compiled.input_shardings)]
    assert specs == [P("data", "model"), P("data"), P()]


def test_plain_results_are_replicated_where_a_mapping_holds() -> None:
    mesh = mesh_of()
    rows = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        assert named_jit(lambda x: x * 2, {})(rows).sharding.is_fully_replicated
        assert named_jit(lambda x: x * 2)(rows).sharding.spec == P("data")


@pytest.mark.parametrize(
    ("donate_args", "donate_kwargs", "gone"),
    [
        (True, None, "abc"),
        ((True,), None, "ab"),
        ([False, True], {"d": True}, "cd"),
        (({"a": True, "b": False},), None, "a"),
        ((lambda leaf: leaf.size == 8, lambda leaf: True), True, "abcd"),
        (None, {"d": lambda leaf: True}, "d"),
        (None, None, ""),
    ],
)
def test_donation_by_bool_tree_and_function(donate_args, donate_kwargs, gone: str) -> None:
    mesh = mesh_of()
    arrays = {name: jax.device_put(jnp.ones(8), NamedSharding(mesh, P())) for name in "abcd"}
    step = named_jit(
        lambda ab, c, *, d: [ab["a"] + 1, ab["b"] + 1, c + 1, d + 1],
        donate_args=donate_args,
        donate_kwargs=donate_kwargs,
    )
    jax.block_until_ready(step({"a": arrays["a"], "b": arrays["b"]}, arrays["c"], d=arrays["d"]))
    assert {name for name, array in arrays.items() if array.is_deleted()} == set(gone)


def test_donated_named_arrays_are_reused() -> None:
    with jax.set_mesh(mesh_of()):
        x = shard(ones(), MAPPING)
        step = named_jit(lambda x: x + 1, MAPPING, in_axis_resources=MAPPING, donate_args=True)
        step(x)
    assert x.array.is_deleted()


def copies() -> dict[str, jax.Array]:
    """Arrays that `in_axis_resources` must move: from one device, or from another sharding."""
    turned = NamedSharding(mesh_of(), P("model"))
    return {"one": jnp.zeros((8, 16)), "split": jax.device_put(jnp.zeros((8, 16)), turned)}


@pytest.mark.parametrize("kept", ["", "one", "split"])
@pytest.mark.parametrize("mapping", [MAPPING, {}], ids=["split", "replicated"])
def test_donated_arguments_are_freed_when_they_move(mapping, kept: str) -> None:
    arrays, axes = copies(), (Rows, Columns)
    wishes = tuple(name != kept for name in arrays)
    step = named_jit(
        lambda x, y: (x + 1, y + 1), mapping, in_axis_resources=mapping, donate_args=wishes
    )
    with jax.set_mesh(mesh_of()):
        out = step(*(hax.NamedArray(array, axes) for array in arrays.values()))
    assert {name for name in arrays if not arrays[name].is_deleted()} == {kept} - {""}
    for array in (one.array for one in out):
        np.testing.assert_array_equal(np.asarray(array), 1.0)


def test_donated_arguments_that_move_are_freed_before_the_program_runs() -> None:
    deleted, x = [], ones()
    step = named_jit(
        lambda x: deleted.append(source.is_deleted()) or x.sum(),
        in_axis_resources=MAPPING, donate_args=True, mesh=mesh_of(),
    )  # fmt: skip
    source = x.array
    assert step(x).item() == 128
    assert deleted == [True]


def test_an_argument_that_is_passed_twice_outlives_the_first_move() -> None:
    x = ones()
    step = named_jit(
        lambda x, y: x + y, in_axis_resources=MAPPING, donate_args=(True, False), mesh=mesh_of()
    )
    np.testing.assert_array_equal(np.asarray(step(x, x).array), 2.0)


def test_nothing_is_freed_by_a_call_that_cannot_be_placed() -> None:
    x, odd = ones(), hax.ones(hax.Axis("rows", 6))
    step = named_jit(lambda x, y: x, in_axis_resources=MAPPING, donate_args=True, mesh=mesh_of())
    with pytest.raises(IllegalMapping, match="has size 6"):
        step(x, odd)
    with pytest.raises(WrongType, match="neither an array nor hashable"):
        step(x, [set()])
    assert not x.array.is_deleted()
    inside = jax.jit(lambda: step(x, ones()))()
    assert not x.array.is_deleted() and inside.axes == x.axes


@pytest.mark.parametrize(
    ("wish", "got"),
    [
        (("x",), "a str: 'x'"),
        ((1,), "an int: 1"),
        (({"a": "no"},), "a str: 'no'"),
        ((lambda leaf: "no",), "a str: 'no'"),
        ((lambda leaf: None,), "a NoneType: None"),
    ],
)
def test_only_bools_donate(wish, got: str) -> None:
    x = {"a": jnp.ones(2)}
    for donation, told in (
        ({"donate_args": wish}, "args"),
        ({"donate_kwargs": {"x": wish[0]}}, ""),
    ):
        step = named_jit(lambda x: x["a"] + 1, **donation)
        with pytest.raises(WrongType) as error:
            step(x) if told else step(x=x)
        assert f"must say by bools what is donated, got {got}" in str(error.value)
    assert not x["a"].is_deleted()
    named_jit(lambda x: x["a"] + 1, donate_args=(lambda leaf: np.bool_(True),))(x)
    assert x["a"].is_deleted()


def test_wrong_donations_are_told() -> None:
    add = named_jit(lambda x, y: x + y, donate_args=(True, False, True))
    with pytest.raises(UsageError, match="expected 2 donate_args, got 3"):
        add(jnp.ones(2), jnp.ones(2))
    with pytest.raises(UsageError, match=r"`donate_args\[0\]` does not fit its argument"):
        named_jit(lambda x: x, donate_args=({"a": True},))({"b": jnp.ones(2)})
    with pytest.raises(WrongType, match="`donate_args` must be"):
        named_jit(lambda x: x, donate_args="x")(jnp.ones(2))
    with pytest.raises(WrongType, match="`donate_kwargs` must be"):
        named_jit(lambda x: x, donate_kwargs=["x"])(x=jnp.ones(2))
    with pytest.raises(UsageError, match="`donate_kwargs` names `y`, which"):
        named_jit(lambda x: x, donate_kwargs={"y": True})(x=jnp.ones(2))


def test_lower_gives_text_cost_and_the_name_of_the_function() -> None:
    def my_step(x, y):
        return x @ y

    lowered = named_jit(my_step, donate_args=(True, False)).lower(
        jnp.ones((8, 8)), jnp.ones((8, 8))
    )
    assert "@jit_my_step" in lowered.as_text()
    assert lowered.cost_analysis()["flops"] >= 1024
    assert named_jit(my_step).__name__ == "my_step"
    assert named_jit(my_step).__wrapped__ is my_step


def test_lower_takes_abstract_arguments() -> None:
    mesh = mesh_of()
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ones())
    compiled = named_jit(lambda x: x * 2, MAPPING, in_axis_resources=MAPPING, mesh=mesh).lower(x)
    (sharding,) = jax.tree.leaves(compiled.compile().input_shardings)
    assert sharding.spec == P("data", "model")


def test_it_works_as_a_method_and_on_modules() -> None:
    class Model(eqx.Module):
        w: jax.Array

        @named_jit
        def forward(self, x):
            return self.w * x

        def __call__(self, x):
            return self.w * x

    model = Model(jnp.full(4, 3.0))
    np.testing.assert_array_equal(np.asarray(model.forward(jnp.ones(4))), 3.0)
    called = named_jit(model)
    np.testing.assert_array_equal(np.asarray(called(jnp.ones(4))), 3.0)
    # Its arrays are arguments, not constants of the program.
    assert called.lower(jnp.ones(4)).as_text().count("%arg") >= 2


def test_it_works_inside_jit_and_grad() -> None:
    mesh = mesh_of()
    double = named_jit(lambda x: x * 2, MAPPING, in_axis_resources={"rows": "model"})
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda x: double(x) * 2)(ones())
        slope = jax.grad(lambda x: double(x).sum().scalar())(ones())
    assert inside.array.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    np.testing.assert_array_equal(np.asarray(slope.array), 2.0)


def test_the_options_of_jit_are_passed_on() -> None:
    options = {"xla_cpu_enable_fast_math": True}
    assert (
        named_jit(lambda x: x + 1, compiler_options=options, inline=True)(1.0 * jnp.ones(2))[0] == 2
    )
    with pytest.raises(Exception, match="no_such_option"):
        named_jit(lambda x: x + 1, compiler_options={"no_such_option": 1})(jnp.ones(2))
    with pytest.raises(RuntimeError, match="nowhere"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        named_jit(lambda x: x + 1, backend="nowhere")(jnp.ones(2))


def test_a_mapping_needs_a_mesh() -> None:
    with pytest.raises(UsageError, match="no mesh found"):
        named_jit(lambda x: x, MAPPING)(ones())
    assert named_jit(lambda x: x)(ones()).axes == (Rows, Columns)


def test_wrong_functions_are_told() -> None:
    with pytest.raises(WrongType, match="`named_jit` needs a function, got a dict"):
        named_jit(MAPPING)


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        (({},), {}, "`compute_mapping` is missing"),
        ((len, {}), {}, "`compute_mapping` is missing"),
        ((), {}, "`parameter_mapping` is missing"),
        ((len, {}, {}), {"compute_mapping": {}}, "got `compute_mapping` twice"),
        ((len, {}, {}), {"fn": len}, "got `fn` twice"),
        ((len, {}, {}, {}), {}, "got 4 arguments"),
        (({}, {}), {"donate": True}, "got `donate` though it does not take it"),
    ],
)
def test_wrong_calls_of_fsdp_are_told(args, kwargs, told: str) -> None:
    with pytest.raises(WrongType) as error:
        fsdp(*args, **kwargs)
    assert told in str(error.value)
