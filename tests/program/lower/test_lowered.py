"""What is read off a lowered program: fingerprint, used axes, coarsest floats."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.mesh.axes import DEFAULT_AXES, parse_mesh
from automesh.program.lower import lowered as adapter
from automesh.program.lower.lowered import communicated_axes, loss_dtype, sharded_axes
from automesh.program.lower.lowering import lower
from automesh.program.script.build import build_on


def data_parallel(mesh):
    """Batch over dp and fsdp, weights over neither: the same program for dp:8 and fsdp:8."""
    batch = NamedSharding(mesh, P(("dp", "fsdp")))

    def step(w, x):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), batch)
        grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return {"w": w - 0.1 * grad}, hidden.sum()

    weights = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    return step, (weights, jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=batch))


def program(build, mesh):
    return lower(build_on(build, parse_mesh(mesh, DEFAULT_AXES)))


def test_programs_that_differ_in_axis_names_alone_are_one():
    prints = {mesh: program(data_parallel, mesh).fingerprint(()) for mesh in ("dp:8", "fsdp:8")}
    assert prints["dp:8"] == prints["fsdp:8"]
    others = [program(data_parallel, mesh).fingerprint(()) for mesh in ("dp:1", "dp:4", "tp:8")]
    assert len({*others, prints["dp:8"]}) == 4


def test_fingerprint_covers_options_devices_and_platform(monkeypatch):
    step = program(data_parallel, "dp:8")
    base = {"device_ids": range(8), "compiler_options": (), "platform": "cpu"}
    changes = [
        {},
        {"device_ids": [1, 0, *range(2, 8)]},
        {"compiler_options": (("level", 1),)},
        {"compiler_options": (("level", True),)},
        {"compiler_options": (("level", "1"),)},
        {"platform": "tpu"},
    ]
    prints = [adapter.fingerprint(step.lowered, **{**base, **change}) for change in changes]
    assert len(set(prints)) == len(changes)
    swapped = {"compiler_options": (("a", 1), ("b", 2))}, {"compiler_options": (("b", 2), ("a", 1))}
    assert len({adapter.fingerprint(step.lowered, **{**base, **one}) for one in swapped}) == 1
    # Versions of the compiler, too.
    monkeypatch.setattr(adapter.jaxlib, "__version__", "9.9.9")
    assert adapter.fingerprint(step.lowered, **base) not in prints


AXES = ("dp", "fsdp", "tp")


@st.composite
def specs(draw):
    """How two matrices and their product are sharded over three axes, and the axes' sizes."""
    groups = [(), ("dp",), ("fsdp",), ("tp",), ("dp", "tp"), ("fsdp", "dp")]

    def spec():
        first = draw(st.sampled_from(groups))
        second = draw(st.sampled_from([g for g in groups if not set(g) & set(first)]))
        return first, second

    sizes = draw(st.sampled_from([(2, 2, 2), (4, 2, 1), (1, 2, 4), (8, 1, 1), (2, 1, 2)]))
    return (spec(), spec(), spec()), sizes


def sharded(chosen, names):
    rename = dict(zip(AXES, names))

    def build(mesh):
        places = [
            NamedSharding(mesh, P(*(tuple(rename[axis] for axis in group) for group in one)))
            for one in chosen
        ]

        def step(x, y):
            return jax.lax.with_sharding_constraint(x @ y, places[2]).sum()

        return step, [jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=p) for p in places[:2]]

    return build


def meaning(chosen, sizes):
    """What is left of the shardings without axes of size 1 and without names."""
    size_of = dict(zip(AXES, sizes))
    order = [axis for axis in AXES if size_of[axis] > 1]
    kept = [[[order.index(a) for a in g if a in order] for g in one] for one in chosen]
    return repr((kept, [size_of[axis] for axis in order]))


def print_of(chosen, sizes, names=AXES):
    mesh = ",".join(f"{name}:{size}" for name, size in zip(names, sizes))
    build = sharded(chosen, names)
    return lower(build_on(build, parse_mesh(mesh, names))).fingerprint(())


@settings(max_examples=25, deadline=None)
@given(first=specs(), second=specs(), names=st.permutations(["u", "v", "w"]))
def test_equal_fingerprints_mean_equal_programs(first, second, names):
    prints = print_of(*first), print_of(*second)
    assert (prints[0] == prints[1]) == (meaning(*first) == meaning(*second))
    assert print_of(*first, tuple(names)) == prints[0]


def test_without_shardys_bindings_names_stay_and_all_axes_count(monkeypatch):
    monkeypatch.setattr(adapter, "_bindings", lambda: None)
    first, second = (program(data_parallel, mesh) for mesh in ("dp:8", "fsdp:8"))
    assert first.fingerprint(()) != second.fingerprint(())
    assert sharded_axes(first.lowered, DEFAULT_AXES) == DEFAULT_AXES
    assert loss_dtype(first.lowered) == "float32"


def talking(mesh):
    """Manual over all axes, sharded over dp, summed over tp, position asked for on sp."""

    def body(x):
        return jax.lax.psum(x, "tp") + jax.lax.axis_index("sp")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    return mapped, (jax.ShapeDtypeStruct((16, 4), jnp.float32),)


def test_manual_axes_count_where_data_is_split_or_devices_talk():
    step = program(talking, "dp:2")
    assert sharded_axes(step.lowered, DEFAULT_AXES) == ("dp",)
    assert communicated_axes(step.traced) == {"tp", "sp"}


def inside(wrap):
    def build(mesh):
        place = NamedSharding(mesh, P("ep"))

        def constrained(x):
            return jax.lax.with_sharding_constraint(x * 2, place)

        return wrap(constrained), (jax.ShapeDtypeStruct((8, 8), jnp.float32),)

    return build


WRAPS = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=3)[0],
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x, x),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_constraints_inside_control_flow_are_found(wrap):
    assert sharded_axes(program(inside(WRAPS[wrap]), "ep:2").lowered, DEFAULT_AXES) == ("ep",)


@pytest.mark.parametrize(
    ("arguments", "inner", "expected"),
    [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "float8_e4m3fn", "float8_e4m3fn"),
        ("float16", "float8_e5m2", "float8_e5m2"),
    ],
)
def test_coarsest_float_of_arguments_and_matrix_products(arguments, inner, expected):
    def step(x):
        return jnp.dot(x.astype(inner), x.astype(inner)).astype(jnp.float32).sum()

    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), arguments))
    assert loss_dtype(lowered) == expected


def test_step_without_floats_has_the_default_type():
    assert (
        loss_dtype(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.int32)))
        == "float32"
    )


def test_order_of_combined_axes_tells_programs_apart():
    def build(order):
        return sharded(((order, ()), ((), ()), ((), ())), AXES)

    prints = {
        lower(build_on(build(order), parse_mesh("dp:2,fsdp:2", AXES))).fingerprint(())
        for order in itertools.permutations(("dp", "fsdp"))
    }
    assert len(prints) == 2


def test_every_way_to_shard_one_matrix_has_its_own_fingerprint():
    groups = [(), ("dp",), ("fsdp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("fsdp", "dp")]
    ways = [one for one in itertools.product(groups, groups) if not set(one[0]) & set(one[1])]
    other = ((), ("tp",))
    for sizes in ((2, 1, 2), (2, 2, 2)):
        by_meaning = {}
        for way in ways:
            chosen = (way, other, other)
            by_meaning.setdefault(meaning(chosen, sizes), set()).add(print_of(chosen, sizes))
        assert all(len(prints) == 1 for prints in by_meaning.values())
        assert len(set.union(*by_meaning.values())) == len(by_meaning)
