"""A partitioned program as a graph."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Monomial
from automesh.hlo.linear import executions
from automesh.program.refused import StepRefused
from automesh.sharding import passes as shardy
from automesh.sharding.mlir.axes import MeshReader
from automesh.sharding.mlir.module import read_graph
from automesh.sharding.propagate import same_program


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(
        devices.reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def array(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def lowered(step, *args, **options):
    return jax.jit(step, **options).lower(*args).compiler_ir("stablehlo")


def graph_of(step, *args, sizes=None, **options):
    return read_graph(shardy.partitioned(lowered(step, *args, **options), sizes=sizes))


def operations(block):
    for one in block.operations:
        yield one
        for body in one.bodies:
            yield from operations(body)


def the(graph, name):
    (found,) = [one for one in operations(graph.top) if one.name == name]
    return found


def test_a_matrix_product_split_three_ways():
    mesh = mesh_of(dp=2, tp=4)
    x, w = array(mesh, (64, 32), "dp", "tp"), array(mesh, (32, 16), "tp", None)
    graph = graph_of(lambda x, w: x @ w, x, w)
    assert graph.mesh == (("dp", 2), ("tp", 4))
    dot = the(graph, "dot_general")
    assert dot.attributes["lhs_contracting"] == (1,) and dot.attributes["rhs_contracting"] == (0,)
    assert [one.axes for one in dot.operands] == [(("dp",), ("tp",)), (("tp",), ())]
    assert dot.operands[0].bytes == Monomial(
        coefficient=64 * 32 * 4, powers=(("dp", -1), ("tp", -1))
    )
    assert dot.operands[0].dimension(1) == Monomial(coefficient=32, powers=(("tp", -1),))
    reduce = the(graph, "all_reduce")
    assert reduce.attributes["axes"] == ("tp",) and reduce.attributes["group"] == 4
    assert reduce.operands == dot.results and dot.results[0].users == [reduce]
    assert graph.top.returned == reduce.results
    line = (lambda: 0).__code__.co_firstlineno
    name, number = dot.source.split(":")
    assert name == "test_mlir.py" and line - 30 < int(number) < line


def test_other_sizes_than_those_of_the_lowering():
    mesh = mesh_of(dp=2, tp=1)
    x, w = array(mesh, (64, 32), "dp", "tp"), array(mesh, (32, 16), "tp", None)
    graph = graph_of(lambda x, w: x @ w, x, w, sizes={"dp": 1, "tp": 512})
    assert graph.mesh == (("dp", 1), ("tp", 512))
    graph = graph_of(lambda x, w: x @ w, x, w, sizes={"tp": 8})
    assert the(graph, "all_reduce").attributes["group"] == 8
    assert same_program(graph, graph_of(lambda x, w: x @ w, x, w, sizes={"tp": 16}))
    assert not same_program(graph, graph_of(lambda x, w: x @ w, x, w))


def test_gathers_and_slices_name_the_axes_of_each_dimension():
    mesh = mesh_of(dp=2, tp=4)
    here = NamedSharding(mesh, P(None, "tp"))

    def step(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), here)

    graph = graph_of(step, array(mesh, (64, 32), "dp", None))
    named = {one.name: one.attributes for one in operations(graph.top)}
    found = [named[name]["per_dimension"] for name in named if name.startswith("all_")]
    assert found and all(set(itertools.chain(*one)) <= {"dp", "tp"} for one in found)


@pytest.mark.parametrize("length", [1, 5])
def test_a_scan_keeps_its_body_once_and_its_trips(length):
    mesh = mesh_of(dp=2)

    def step(x, w):
        return jax.lax.scan(lambda y, one: (jnp.tanh(y @ one), None), x, w)[0]

    graph = graph_of(step, array(mesh, (8, 8), "dp"), array(mesh, (length, 8, 8)))
    loop = the(graph, "while")
    assert loop.trips == length
    assert loop.times == (Monomial(coefficient=float(length)),)
    (body,) = loop.bodies
    assert len(body.arguments) == len(body.returned) == len(loop.results)
    assert sum(one.name == "dot_general" for one in operations(graph.top)) == 1


def test_a_loop_that_the_data_end_has_no_trips():
    graph = graph_of(lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, jnp.sin, x), jnp.ones(3))
    loop = the(graph, "while")
    assert loop.trips is None and loop.times is None


def test_calls_are_inlined_and_branches_kept():
    inner = jax.jit(lambda x: x @ x)

    def step(x, flag):
        return jax.lax.cond(flag, inner, lambda y: y + 1, inner(x))

    graph = graph_of(step, jnp.ones((4, 4)), True)
    branches = the(graph, "case").bodies
    assert sorted(len(list(operations(one))) for one in branches) != []
    assert sum(one.name == "dot_general" for one in operations(graph.top)) == 2
    assert not any(one.name == "call" for one in operations(graph.top))


def test_constants_are_known_and_positions_are_none():
    mesh = mesh_of(dp=2)

    def step(x):
        def body(y):
            return y + jax.lax.axis_index("dp") + jnp.zeros(y.shape, y.dtype)

        return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

    graph = graph_of(step, array(mesh, (8,), "dp"))
    for one in operations(graph.top):
        if one.name in ("constant", "iota"):
            assert one.results[0].is_constant
        if one.name == "partition_id":
            assert not one.results[0].is_constant
    assert not any(one.is_constant for one in graph.top.returned)
    constants = [one for one in operations(graph.top) if one.name == "constant"]
    assert 0.0 in [one.attributes["splat"] for one in constants]


def test_values_of_a_manual_region_keep_the_split_of_what_enters():
    mesh = mesh_of(dp=2, tp=2)

    def step(x):
        body = jax.shard_map(
            lambda y: y.sum(axis=0), mesh=mesh, in_specs=P("tp", "dp"), out_specs=P(("dp",)),
            check_vma=False,
        )  # fmt: skip
        return body(x)

    graph = graph_of(step, array(mesh, (8, 6), "tp", "dp"))
    enter, leave = the(graph, "enter_manual"), the(graph, "leave_manual")
    (inside,) = enter.results
    assert inside.axes == (("tp",), ("dp",)) and inside.shape == (8, 6)
    assert set(inside.manual) == {"dp", "tp"} and leave.results[0].manual == ()
    # Without a fit the region's own values are what one device has at the sampled sizes.
    assert leave.operands[0].shape == (3,) and leave.results[0].shape == (6,)


def test_donated_aliased_and_host_arguments():
    mesh = mesh_of(dp=2)
    host = NamedSharding(mesh, P("dp"), memory_kind="pinned_host")
    args = (
        array(mesh, (8,), "dp"),
        jax.ShapeDtypeStruct((8,), jnp.float32, sharding=host),
        array(mesh, (8,), "dp"),
    )
    module = (
        jax.jit(lambda a, b, c: (c + 1, a.sum()), donate_argnums=(2,), keep_unused=True)
        .trace(*args)
        .lower(lowering_platforms=("tpu",))
        .compiler_ir("stablehlo")
    )
    graph = read_graph(shardy.partitioned(module))
    assert graph.donated == (2,) and graph.host == (1,)
    assert graph.aliased in ((), ((2, 0),))


def test_an_axis_that_splits_a_dimension_in_part_is_noted():
    mesh = mesh_of(tp=8)

    def step(x, w):
        heads = (x @ w).reshape(16, 4, 64)
        return jnp.einsum("bhd,chd->bhc", heads, heads)

    graph = graph_of(step, array(mesh, (16, 32)), array(mesh, (32, 256), None, "tp"))
    assert graph.sub_axes == ("tp",)
    products = [one for one in operations(graph.top) if one.name == "dot_general"]
    heads = products[-1].operands[0]
    assert math.prod(heads.shape) <= 16 * 4 * 64 / 4


def test_text_with_locations_gives_the_same_graph():
    mesh = mesh_of(dp=2, tp=4)
    x, w = array(mesh, (64, 32), "dp", "tp"), array(mesh, (32, 16), "tp", None)
    module = lowered(lambda x, w: x @ w, x, w)
    text = module.operation.get_asm(enable_debug_info=True)
    read = read_graph(shardy.partitioned(text))
    assert same_program(read, read_graph(shardy.partitioned(module)))
    assert the(read, "dot_general").source.startswith("test_mlir.py:")


def test_what_is_prepared_once_is_partitioned_as_if_it_were_prepared_each_time():
    mesh = mesh_of(dp=2, tp=2)

    def step(x, w):
        def body(x, _):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, None, length=3)[0].sum()

    module = lowered(step, array(mesh, (64, 32), "dp", "tp"), array(mesh, (32, 32), None, "tp"))
    ready = shardy.prepared(shardy.plain(module), is_plain=True)
    for sizes in ({"dp": 4, "tp": 2}, {"dp": 1, "tp": 8}):
        known = len(ready.sources)
        shared = read_graph(shardy.partitioned(ready, sizes=sizes), ready.sources)
        apart = read_graph(shardy.partitioned(module, sizes=sizes))
        assert dict(shared.mesh) == sizes == dict(apart.mesh)
        assert same_program(shared, apart)
        assert [one.source for one in operations(shared.top)] == [
            one.source for one in operations(apart.top)
        ]
    assert known and the(shared, "tanh").source.startswith("test_mlir.py:")


def test_a_program_that_passes_leave_broken_is_refused(monkeypatch):
    def break_it(operations, ir, sdy):
        for name, operation in operations:
            if name == "stablehlo.dot_general":
                operation.operands[0] = operation.results[0]  # of another shape, and after its use

    monkeypatch.setattr(shardy, "reshard_before_elementwise", break_it)
    module = lowered(lambda x, w: x @ w, jnp.ones((4, 8)), jnp.ones((8, 2)))
    with pytest.raises(StepRefused) as caught:
        shardy.partitioned(module)
    reason = caught.value.outcome.reason
    assert reason.startswith("Shardy could not partition it: contracting dimension")


def test_a_jaxlib_without_a_pass_is_named(monkeypatch):
    module = lowered(jnp.sin, 1.0)
    monkeypatch.setattr(shardy, "_PROPAGATION", ("sdy-no-such-pass",))
    with pytest.raises(StepRefused) as caught:
        shardy.partitioned(module)
    assert "cannot propagate shardings" in caught.value.outcome.reason
    assert caught.value.outcome.stage == "propagate"


def test_a_jaxlib_without_a_binding_is_named(monkeypatch):
    shardy.bindings.cache_clear()
    monkeypatch.setattr(shardy, "_CLASSES", ("NoSuchAttr",))
    with pytest.raises(StepRefused, match="NoSuchAttr"):
        shardy.bindings()
    monkeypatch.undo()
    shardy.bindings.cache_clear()
    assert shardy.bindings().sdy is not None


def reader_of(**sizes):
    reader = object.__new__(MeshReader)
    reader.mesh = tuple(sizes.items())
    reader._sizes = sizes
    reader._order = {name: place for place, name in enumerate(sizes)}
    return reader


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
)
def test_groups_of_every_set_of_axes_are_recognised(sizes, chosen):
    names = "abcd"[: len(sizes)]
    wanted = [place for place in sorted(chosen) if place < len(sizes)]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    moved = np.moveaxis(ids, wanted, list(range(len(sizes) - len(wanted), len(sizes))))
    group = math.prod(sizes[place] for place in wanted)
    axes, found, exact = reader_of(**dict(zip(names, sizes, strict=True))).of_groups(
        moved.reshape(-1, group).tolist()
    )
    assert axes == tuple(names[place] for place in wanted if sizes[place] > 1)
    assert found == group and exact


def test_groups_that_cut_an_axis_are_not_exact():
    axes, group, exact = reader_of(a=8).of_groups([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert (axes, group, exact) == (("a",), 2, False)


@given(
    st.integers(-20, 20),
    st.integers(-20, 20),
    st.integers(-5, 5).filter(bool),
    st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
)
def test_trips_are_those_of_a_loop_in_python(begin, limit, step, direction):
    holds = {
        "LT": lambda one: one < limit,
        "LE": lambda one: one <= limit,
        "GT": lambda one: one > limit,
        "GE": lambda one: one >= limit,
        "NE": lambda one: one != limit,
    }[direction]
    counter, count = begin, 0
    while holds(counter) and count < 200:
        counter, count = counter + step, count + 1
    found = executions(begin - limit, step, direction)
    assert found == (count if count < 200 else None)


def _sine(_, x):
    return jnp.sin(x @ x)


@pytest.mark.parametrize(
    ("step", "trips"),
    [
        (lambda x, n: jax.lax.fori_loop(n, n + 20, _sine, x), 20),
        (lambda x, n: jax.lax.fori_loop(n - 5, 2 * n + 20 - n, _sine, x), 25),
        (lambda x, n: jax.lax.fori_loop(n // 3, n // 3 + 7, _sine, x), 7),
        (lambda x, n: jax.lax.fori_loop(n, 2 * n, _sine, x), None),
        (
            lambda x, n: jax.lax.while_loop(
                lambda s: s[0] < s[1] + 6,
                lambda s: (s[0] + 2, s[1], _sine(0, s[2])),
                (n, n, x),
            ),
            3,
        ),
        (
            lambda x, n: jax.lax.while_loop(
                lambda s: s[0] - n > 0, lambda s: (s[0] - 2, _sine(0, s[1])), (n + 9, x)
            ),
            5,
        ),
        # The counter is compared, but so is what the data say.
        (
            lambda x, n: jax.lax.while_loop(
                lambda s: (s[0] < 20) & (s[1][0, 0] > n),
                lambda s: (s[0] + 1, _sine(0, s[1])),
                (0, x),
            ),
            None,
        ),
    ],
)
def test_bounds_may_depend_on_data_if_their_difference_does_not(step, trips):
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    graph = graph_of(step, jax.ShapeDtypeStruct((8, 8), jnp.float32), counter)
    (loop,) = [one for one in operations(graph.top) if one.name == "while"]
    assert loop.trips == trips


@pytest.mark.parametrize(
    "goes_on",
    [
        lambda i, n: i * i + i < 100,
        lambda i, n: i < jnp.minimum(n, 50),
        lambda i, n: jnp.minimum(i, 7) + i < 20,
    ],
)
def test_a_bound_that_changes_from_turn_to_turn_has_no_trips(goes_on):
    def step(x):
        def turn(state):
            return state[0] + 1, state[1] - 3, jnp.sin(state[2])

        return jax.lax.while_loop(lambda state: goes_on(*state[:2]), turn, (0, 100, x))

    graph = graph_of(step, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    (loop,) = [one for one in operations(graph.top) if one.name == "while"]
    assert loop.trips is None


def test_bounds_reach_a_loop_through_another_one_and_through_calls():
    inner = jax.jit(lambda x, low, high: jax.lax.fori_loop(low, high, _sine, x))

    def step(x, n):
        return jax.lax.fori_loop(0, 3, lambda _, y: inner(y, n, n + 4), x)

    counter = jax.ShapeDtypeStruct((), jnp.int32)
    graph = graph_of(step, jax.ShapeDtypeStruct((8, 8), jnp.float32), counter)
    loops = [one for one in operations(graph.top) if one.name == "while"]
    assert [loop.trips for loop in loops] == [3, 4]


@pytest.mark.parametrize(
    ("bounds", "trips", "differs"),
    [
        (lambda place: (0, place + 1), 4, True),
        (lambda place: (place, 4), 4, True),
        (lambda place: (place, place + 3), 3, False),
        (lambda place: (0, jnp.minimum(2 * place, 5)), 5, True),
        (lambda place: (0, 4), 4, False),
    ],
)
def test_where_the_bounds_depend_on_the_place_the_longest_loop_counts(bounds, trips, differs):
    mesh = mesh_of(dp=2, sp=4)

    def part(x):
        low, high = bounds(jax.lax.axis_index("sp"))
        return jax.lax.fori_loop(low, high, lambda _, y: jnp.sin(y), x)

    step = jax.shard_map(part, mesh=mesh, in_specs=P("dp", "sp"), out_specs=P("dp", "sp"))
    graph = graph_of(step, array(mesh, (8, 8), "dp", "sp"))
    (loop,) = [one for one in operations(graph.top) if one.name == "while"]
    assert (loop.trips, loop.attributes["trips_differ"]) == (trips, differs)


def test_frames_of_libraries_are_passed_over():
    from automesh.sharding.mlir.locations import SourceReader

    ir = shardy.bindings().ir
    with ir.Context():
        mine = ir.Location.file("/home/me/train.py", 7, 1)
        library = ir.Location.file(np.__file__, 3, 1)
        where = ir.Location.callsite(library, [mine])
        operation = types.SimpleNamespace(location=ir.Location.name("dot", where))
        assert SourceReader(shardy.bindings()).of(operation) == "train.py:7"
        operation = types.SimpleNamespace(location=library)
        assert SourceReader(shardy.bindings()).of(operation) == ""
