"""Terms of small programs, and of real ones against what is compiled."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Monomial, flops, value_of
from automesh.hlo import count, read_module
from automesh.ir.graph import Block, Operation
from automesh.ir.terms.collect import collect
from automesh.sharding import passes as shardy
from automesh.sharding.mlir.module import read_graph
from tests.support.samples.graphs import SIZES, Program, array

ROWS = ("dp", "fsdp")


def terms_of(program, *returned, platform="none"):
    return collect(program.graph(*returned), active=tuple(SIZES), platform=platform)


def payloads(terms, sizes):
    """Bytes of a step by kind and axes."""
    found = {}
    for one in terms.collectives:
        each = value_of(one.count, sizes) * value_of(one.payload_bytes, sizes)
        found[one.kind, one.axes] = found.get((one.kind, one.axes), 0.0) + each
    return found


def step_flops(terms, sizes):
    return sum(value_of(one.count, sizes) * flops(one.matmuls, sizes) for one in terms.kernels)


def test_a_product_has_the_sides_of_one_device():
    program = Program()
    x = program.argument((64, 32), (ROWS, ("tp",)), "bf16")
    w = program.argument((32, 16), (("tp",), ()))
    (kernel,) = terms_of(program, program.dot(x, w)).kernels
    (product,) = kernel.matmuls
    sides = [side.at(SIZES) for side in (product.batch, product.m, product.n, product.k)]
    assert sides == [1, 64 / 8, 16, 32 / 2]
    assert product.dtype == "f32"
    assert kernel.source == "step.py:7"
    moved = 64 * 32 * 2 / 16 + 32 * 16 * 4 / 2 + 64 * 16 * 2 / 8
    assert value_of(kernel.bytes, SIZES) == moved


def test_a_combined_collective_is_named_after_its_largest_part():
    program = Program()
    split = program.argument((64, 32), (ROWS, ()))
    whole = program.argument((32, 32), ((), ()))
    reduced = [
        program("all_reduce", one, split=one.axes, axes=("tp",), group=2, exact=True, manual=True)
        for one in (split, whole)
    ]
    (term,) = terms_of(program, *reduced, platform="gpu").collectives
    assert value_of(term.payload_bytes, SIZES) == 64 * 32 * 4 / 8 + 32 * 32 * 4
    assert term.operand == "f32[32,32] and 1 more"


@given(st.lists(st.lists(st.integers(0, 11), max_size=3), min_size=2, max_size=12))
def test_collectives_that_need_each_other_are_not_combined(reads):
    """Each joins the first group of which none has to run before it."""
    program = Program()
    made, before, groups = [], [], []
    for number, read in enumerate(reads):
        places = sorted({place % number for place in read}) if number else []
        needed = set().union(*(before[place] for place in places))
        value = program.argument((64, 32), ((), ()))  # so that no two are the same
        for place in places:
            value = program("add", value, made[place], split=value.axes)
        made.append(
            program(
                "all_reduce",
                value,
                split=value.axes,
                axes=("tp",),
                group=2,
                exact=True,
                manual=True,
            )
        )
        before.append(needed | {number})
        for group in groups:
            if not needed & group:
                group.add(number)
                break
        else:
            groups.append({number})
    terms = terms_of(program, *made, platform="gpu").collectives
    sizes = [value_of(one.payload_bytes, SIZES) / (64 * 32 * 4) for one in terms]
    assert sizes == [len(group) for group in groups]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("all_gather", 64 * 32 * 4 / 2),
        ("all_reduce", 64 * 32 * 4 / 8),
        ("all_to_all", 64 * 32 * 4 / 8 * 4),
        ("collective_permute", 64 * 32 * 4 / 8),
        ("reduce_scatter", 64 * 32 * 4 / 8),
    ],
)
def test_payloads_are_those_of_one_group(kind, payload):
    program = Program()
    x = program.argument((64, 32), (("dp", "fsdp"), ()))
    split = (("dp",), ()) if kind == "all_gather" else x.axes
    y = program(
        kind, x, split=split, axes=("fsdp",), group=4, exact=True, manual=True,
        per_dimension=(("fsdp",), ()),
    )  # fmt: skip
    (term,) = terms_of(program, y).collectives
    assert term.kind == kind.replace("_", "-")
    assert value_of(term.payload_bytes, SIZES) == payload
    assert (term.axes, term.source, term.operand) == (("fsdp",), "step.py:7", "f32[64,32]")


@pytest.mark.parametrize(
    ("platform", "hidden"),
    [
        ("none", [False, False, False]),
        ("cpu", [False, False, False]),
        ("gpu", [True, True, True]),
        ("tpu", [False, False, False]),  # See test_overlap: here is no product.
    ],
)
def test_what_compilers_hide(platform, hidden):
    program = Program()
    first, summed = (program.argument((8, 16), (("fsdp",), ())) for _ in range(2))
    second = program.argument((8, 16), (("fsdp",), ()), "bf16")
    results = [program.gather(first, "fsdp"), program.gather(second, "fsdp")]
    results.append(program.reduce(summed, "tp"))
    found = terms_of(program, *results, platform=platform).collectives
    assert [one.hides for one in found] == hidden


@pytest.mark.parametrize(("platform", "count"), [("none", 3), ("cpu", 2), ("gpu", 2), ("tpu", 2)])
def test_reductions_that_do_not_wait_for_each_other_are_one(platform, count):
    program = Program()
    x, y = program.argument((8, 16)), program.argument((16,))
    first, second = program.reduce(x, "tp"), program.reduce(y, "tp")
    third = program.reduce(program("tanh", first), "tp")
    terms = terms_of(program, second, third, platform=platform)
    assert len(terms.collectives) == count
    assert payloads(terms, SIZES) == {("all-reduce", ("tp",)): (2 * 8 * 16 + 16) * 4}


def test_the_cpu_moves_narrow_floats_in_32_bits():
    program = Program()
    x = program.argument((8, 16), dtype="bf16")
    terms = terms_of(program, program.reduce(x, "tp"), platform="cpu")
    assert payloads(terms, SIZES) == {("all-reduce", ("tp",)): 8 * 16 * 4}


def body_of_three(inside, x, w):
    return program_of_three(inside, x, w), w


def program_of_three(program, x, w):
    return program("tanh", program.reduce(program.dot(x, w), "tp"))


def three():
    program = Program()
    x = program.argument((64, 32), (ROWS, ("tp",)))
    return program, [x, program.argument((32, 32), (("tp",), ()))]


@given(st.integers(1, 1000))
def test_a_loop_is_its_body_as_often_as_it_runs(trips):
    program, starts = three()
    once = terms_of(program, program_of_three(program, *starts))
    program, starts = three()
    looped = terms_of(program, *program.loop(trips, starts, body_of_three))
    assert step_flops(looped, SIZES) == trips * step_flops(once, SIZES)
    assert payloads(looped, SIZES) == {k: trips * v for k, v in payloads(once, SIZES).items()}
    assert value_of(looped.regions[1].trips, SIZES) == trips
    assert {one.region for one in looped.kernels + looped.collectives} == {1}
    assert not looped.uncounted


def test_loops_in_loops_multiply():
    program, starts = three()

    def outer(inside, x, w):
        return inside.loop(3, [x, w], body_of_three)

    terms = terms_of(program, *program.loop(5, starts, outer))
    assert [value_of(one.trips, SIZES) for one in terms.regions] == [1, 5, 15]
    assert [one.name for one in terms.regions] == ["step", *["loop at step.py:3"] * 2]


def test_a_loop_of_unknown_length_is_counted_once_and_named():
    program, starts = three()
    once = terms_of(program, program_of_three(program, *starts))
    program, starts = three()
    terms = terms_of(program, *program.loop(None, starts, body_of_three))
    assert step_flops(terms, SIZES) == step_flops(once, SIZES) > 0
    (named,) = terms.uncounted
    assert (named.what, named.source) == ("loop of unknown length", "step.py:3")


def branch(dots):
    program = Program()
    x, w = array((64, 32)), array((32, 32))
    value = x
    for _ in range(dots):
        value = program.dot(value, w)
    program.block.returned = [value]
    return program.block


@pytest.mark.parametrize(("branches", "named"), [((1, 3, 2), True), ((2, 2), False)])
def test_of_a_conditional_the_most_expensive_branch_counts(branches, named):
    program = Program()
    which = program.argument((), dtype="i32")
    result = array((64, 32))
    program.block.operations.append(
        Operation(
            name="case",
            operands=[which],
            results=[result],
            bodies=[branch(n) for n in branches],
            source="step.py:9",
        )
    )
    terms = terms_of(program, result)
    assert step_flops(terms, SIZES) == max(branches) * 2 * 64 * 32 * 32
    assert [one.what for one in terms.uncounted] == ["conditional"] * named


def test_a_custom_call_counts_what_it_states_and_is_named_if_it_states_nothing():
    program = Program()
    x = program.argument((64, 32), dtype="bf16")
    cost = {
        "flops": (Monomial(coefficient=4e9, powers=(("fsdp", -1),)),),
        "bytes_accessed": (Monomial(coefficient=4e6),),
    }
    stated = program("custom_call", x, target="kernel", cost_terms=cost)
    silent = program("custom_call", stated, target="mystery")
    terms = terms_of(program, silent)
    first, second = terms.kernels
    assert step_flops(terms, SIZES) == pytest.approx(1e9)
    assert value_of(first.bytes, SIZES) == 4e6
    assert value_of(second.bytes, SIZES) == 2 * 64 * 32 * 2
    assert first.operation == "custom_call kernel"
    assert [one.what for one in terms.uncounted] == ["custom call mystery"]


def test_updates_and_gathers_move_only_what_they_touch():
    program = Program()
    stack, part = program.argument((128, 64)), program.argument((1, 64))
    at, rows = program.argument((), dtype="i32"), program.argument((8, 1), dtype="i32")
    updated = program("dynamic_update_slice", stack, part, at, at)
    taken = program("gather", updated, rows, shape=(8, 64), slice_sizes=(1, 64))
    update, gather = terms_of(program, taken).kernels
    assert value_of(update.bytes, SIZES) == 2 * 64 * 4
    assert value_of(gather.bytes, SIZES) == 2 * 8 * 64 * 4 + 8 * 4


def test_branches_of_nothing_are_nothing():
    program = Program()
    x = program.argument((8,))
    program.block.operations.append(
        Operation(name="case", operands=[x], results=[], bodies=[Block(), Block()])
    )
    assert terms_of(program, x).kernels == ()


# Against the compiler: f32 programs, whose collectives the CPU neither widens nor splits.


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    kinds = (AxisType.Auto,) * len(sizes)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def two_layers(mesh, remat):
    def put(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        up, down = (pin(one, *spec) for one, spec in zip(w, ((None, "tp"), ("tp", None))))
        return pin(x + jnp.tanh(x @ up) @ down, ("dp", "fsdp"), None), None

    def loss(w, x):
        body = jax.checkpoint(layer) if remat else layer
        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    def step(w, x):
        return jax.tree.map(lambda one, slope: one - 0.1 * slope, w, jax.grad(loss)(w, x))

    up = put((3, 64, 128), None, "fsdp", "tp")
    down = put((3, 128, 64), None, "tp", "fsdp")
    return jax.jit(step).lower((up, down), put((32, 64), ("dp", "fsdp"), None))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 4, 1), (1, 1, 8), (2, 2, 2), (1, 2, 8)])
def test_terms_are_those_of_the_compiled_program(sizes, remat):
    named = dict(zip(("dp", "fsdp", "tp"), sizes))
    lowered = two_layers(mesh_of(**named), remat)
    graph = read_graph(shardy.partitioned(lowered.compiler_ir("stablehlo")))
    terms = collect(graph, active=tuple(a for a in named if named[a] > 1), platform="cpu")
    (module,) = lowered.compile().runtime_executable().hlo_modules()
    counts = count(read_module(module.as_serialized_hlo_module_proto()), tuple(named.items()))
    compiled = {}
    for one in counts.collectives:
        compiled[one.kind, one.axes] = compiled.get((one.kind, one.axes), 0) + one.payload_bytes
    assert step_flops(terms, named) == counts.flops
    assert payloads(terms, named) == compiled
    assert not terms.uncounted
