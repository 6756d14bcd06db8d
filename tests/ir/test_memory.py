"""What a step keeps in memory, on programs written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.cost.formulas import with_copies
from automesh.cost.terms import LivenessPoint, Monomial, value_of
from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.memory import liveness
from automesh.ir.memory.combined import with_combined_reductions
from automesh.ir.memory.liveness import Footprint, memory_points, undominated
from automesh.ir.memory.order import BufferModel, as_step, constants_last, read_by_products
from automesh.ir.memory.tpu import tiled, tiled_by_rows

MESH = (("x", 2), ("y", 2))


def value(*shape: int, axes: dict[int, str] | None = None, dtype: str = "f32") -> Value:
    split = tuple((axes[d],) if axes and d in axes else () for d in range(len(shape)))
    return Value(shape=shape, dtype=dtype, axes=split)


def apply(block: Block, name: str, *operands: Value, like: Value | None = None, **fields) -> Value:
    like = like or operands[0]
    result = Value(shape=like.shape, dtype=like.dtype, axes=like.axes)
    operation = Operation(name=name, operands=list(operands), results=[result], **fields)
    block.operations.append(operation)
    return result


def footprint(top: Block, *, stored=None, platform: str = "none", **fields) -> Footprint:
    graph = Graph(top=top, mesh=MESH, **fields)
    if stored is None:
        stored = [result for operation in everything(top) for result in operation.results]
    return memory_points(graph, stored=stored, platform=platform)


def everything(block: Block):
    for operation in block.operations:
        yield operation
        for body in operation.bodies:
            yield from everything(body)


def peak(found: Footprint, **sizes: int) -> float:
    return max((value_of(point.bytes, sizes) for point in found.points), default=0.0)


def test_a_chain_reuses_the_memory_of_what_dies():
    x = value(256)
    top = Block(arguments=[x])
    for _ in range(5):
        x = apply(top, "sine", x)
    out = apply(top, "dot_general", x)
    top.returned = [out]
    assert peak(footprint(top)) == 1024


def test_a_matrix_product_cannot_overwrite_its_operand():
    x = value(256)
    top = Block(arguments=[x])
    inner = apply(top, "dot_general", apply(top, "dot_general", x))
    top.returned = [apply(top, "dot_general", inner)]
    assert peak(footprint(top)) == 2048


def test_what_is_needed_later_lives_until_then():
    x = value(256, 256, axes={0: "x"})
    top = Block(arguments=[x])
    kept = apply(top, "dot_general", x)
    other = apply(top, "dot_general", x, like=value(1024, axes={0: "y"}))
    other = apply(top, "dot_general", other)
    top.returned = [apply(top, "add", kept, other)]
    found = footprint(top)
    assert peak(found, x=4, y=1) == 256 * 256 * 4 / 4 + 2 * 4096
    assert peak(found, x=1, y=8) == 256 * 256 * 4 + 2 * 512


def test_values_that_are_not_stored_cost_nothing_but_keep_what_they_read():
    x = value(256)
    top = Block(arguments=[x])
    kept = apply(top, "dot_general", x)
    virtual = apply(top, "sine", kept)
    other = apply(top, "dot_general", x)
    top.returned = [apply(top, "dot_general", virtual, other)]
    found = footprint(top, stored=[kept, other, top.returned[0]])
    assert peak(found) == 2048


@pytest.mark.parametrize("donated", [(), (0,)])
def test_outputs_take_over_donated_arguments(donated):
    x, y = value(1024, axes={0: "x"}), value(256)
    top = Block(arguments=[x, y])
    top.returned = [apply(top, "add", x, x)]
    found = footprint(top, donated=donated)
    assert found.argument_bytes == (
        Monomial(coefficient=1024.0),
        Monomial(coefficient=4096.0, powers=(("x", -1),)),
    )
    assert found.output_bytes == (Monomial(coefficient=4096.0, powers=(("x", -1),)),)
    assert found.alias_bytes == (found.output_bytes if donated else ())
    assert peak(found) == 0


def test_a_donated_argument_that_is_read_later_is_no_place_yet():
    x = value(1024)
    top = Block(arguments=[x])
    new = apply(top, "sine", x)
    loss = apply(top, "dot_general", x, like=value(1))
    top.returned = [new, loss]
    assert peak(footprint(top, donated=(0,))) == 4096


def test_arguments_in_host_memory_are_left_out():
    x, y = value(1024), value(256)
    top = Block(arguments=[x, y], returned=[x])
    assert footprint(top, host=(0,)).argument_bytes == (Monomial(coefficient=1024.0),)


def loop(trips: int, *, stacked: bool = False) -> Block:
    """Carries an array of 4096 bytes, needs 2 x 8192 in the body, stacks 1024 bytes per trip."""
    x = value(1024)
    top = Block(arguments=[x])
    start = apply(top, "dot_general", x)
    starts = [start]
    if stacked:
        starts.append(apply(top, "broadcast_in_dim", x, like=value(trips, 256)))
    arguments = [value(*one.shape) for one in starts]
    body = Block(arguments=list(arguments))
    wide = apply(body, "dot_general", arguments[0], like=value(2048))
    wide = apply(body, "dot_general", wide)
    body.returned = [apply(body, "dot_general", wide, like=arguments[0])]
    if stacked:
        body.returned.append(apply(body, "dynamic_update_slice", arguments[1], body.returned[0]))
    results = [value(*one.shape) for one in starts]
    top.operations.append(
        Operation(name="while", operands=starts, results=results, bodies=[body], trips=trips)
    )
    top.returned = [apply(top, "dot_general", *results, like=value(1))]
    return top


@pytest.mark.parametrize("is_shared", [False, True])
def test_arrays_that_a_loop_carries_are_counted_each_even_if_they_begin_as_the_same_zeros(
    is_shared,
):
    top = Block()
    zeros = [apply(top, "constant", like=value(1024)) for _ in range(1 if is_shared else 2)]
    starts = [zeros[0], zeros[-1]]
    body = Block(arguments=[value(1024), value(1024)])
    body.returned = [apply(body, "sine", one) for one in body.arguments]
    results = [value(1024), value(1024)]
    top.operations.append(
        Operation(name="while", operands=starts, results=results, bodies=[body], trips=3)
    )
    top.returned = [apply(top, "dot_general", *results, like=value(1))]
    assert peak(footprint(top)) == 2 * 4096


@given(st.integers(1, 1000))
def test_a_loop_keeps_one_copy_of_its_carry_however_often_it_runs(trips):
    assert peak(footprint(loop(trips))) == 4096 + 2 * 8192


@given(st.integers(1, 1000))
def test_stacked_results_grow_with_the_trips_and_are_written_in_place(trips):
    assert peak(footprint(loop(trips, stacked=True))) == 4096 + trips * 1024 + 2 * 8192


def test_what_a_loop_passes_on_unchanged_is_free():
    x = value(1024)
    top = Block(arguments=[x])
    weight = apply(top, "dot_general", x)
    carried, passed = value(1024), value(1024)
    body = Block(arguments=[carried, passed])
    body.returned = [apply(body, "dot_general", carried, passed), passed]
    start = apply(top, "dot_general", x)
    results = [value(1024), value(1024)]
    top.operations.append(
        Operation(name="while", operands=[start, weight], results=results, bodies=[body])
    )
    top.returned = [apply(top, "dot_general", *results, like=value(1))]
    # The carry, the weight, and the new carry while the old one is read.
    assert peak(footprint(top)) == 3 * 4096


def test_the_largest_branch_counts():
    x = value(256)
    top = Block(arguments=[x])
    bodies: list[Block] = []
    for size in (1024, 4096):
        body = Block()
        wide = apply(body, "dot_general", x, like=value(size))
        body.returned = [apply(body, "dot_general", wide, like=x)]
        bodies.append(body)
    result = value(256)
    top.operations.append(Operation(name="case", operands=[], results=[result], bodies=bodies))
    top.returned = [apply(top, "dot_general", result)]
    assert peak(footprint(top)) == 1024 + 4 * 4096


def test_a_barrier_holds_no_memory():
    x = value(1024)
    top = Block(arguments=[x])
    kept = apply(top, "optimization_barrier", apply(top, "dot_general", x))
    top.returned = [apply(top, "dot_general", kept, like=value(1))]
    assert peak(footprint(top)) == 4096


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("trace", ["large", "small", "wide", "middle", "out"]),
        ("late", ["large", "wide", "small", "middle", "out"]),
        ("early", ["large", "wide", "small", "middle", "out"]),
    ],
)
def test_orders_in_which_operations_may_run(order, expected):
    x = value(256)
    top = Block(arguments=[x])
    large = apply(top, "dot_general", x, source="large")
    small = apply(top, "dot_general", large, source="small")
    wide = apply(top, "dot_general", x, source="wide")
    middle = apply(top, "dot_general", wide, source="middle")
    top.returned = [apply(top, "dot_general", middle, small, source="out")]
    compiler = BufferModel([large, small, wide, middle, *top.returned], {})
    assert [step.operation.source for step in compiler.steps(top, order)] == expected


def test_late_and_early_differ_for_what_is_needed_at_the_end():
    x = value(256)
    top = Block(arguments=[x])
    ready = apply(top, "dot_general", x, source="ready")
    chain = x
    for number in range(3):
        chain = apply(top, "dot_general", chain, source=str(number))
    top.returned = [apply(top, "dot_general", chain, ready, source="out")]
    compiler = BufferModel([], {})
    compiler.stored.update(one.results[0] for one in top.operations)
    orders = {
        order: [step.operation.source for step in compiler.steps(top, order)]
        for order in ("late", "early")
    }
    assert orders == {
        "late": ["0", "1", "ready", "2", "out"],
        "early": ["ready", "0", "1", "2", "out"],
    }


def product(block: Block, lhs: Value, rhs: Value, like: Value, *, lhs_last: bool = True) -> Value:
    return apply(
        block,
        "dot_general",
        lhs,
        rhs,
        like=like,
        attributes={
            "lhs_batch": (),
            "rhs_batch": (),
            "lhs_contracting": (1 if lhs_last else 0,),
            "rhs_contracting": (0,),
        },
    )


@pytest.mark.parametrize(
    ("dtype", "result", "lhs_last", "copied"),
    [
        ("f32", "f32", True, 0),
        ("f32", "f32", False, 0),  # read as columns
        ("bf16", "f32", True, 0),
        ("bf16", "f32", False, 0),
        ("bf16", "bf16", True, 0),  # jaxlib 0.10 widened both
        ("bf16", "bf16", False, 0),
    ],
)
def test_the_cpu_compiler_copies_what_its_matrix_products_cannot_take(
    dtype, result, lhs_last, copied
):
    x, y = value(1024, 1024, dtype=dtype), value(1024, 1024, dtype=dtype)
    top = Block(arguments=[x, y])
    out = product(top, x, y, value(1024, 1024, dtype=result), lhs_last=lhs_last)
    top.returned = [apply(top, "sort", out, like=value(1))]
    stored = [x, y, out, *top.returned]
    found = peak(footprint(top, stored=stored, platform="cpu"))
    kept = 4 if result == "f32" else 2
    assert found == 2**20 * (kept + copied)


def test_what_a_loop_reads_slice_by_slice_keeps_its_type():
    """A scanned stack in bf16: 79 MiB of temporaries (jaxlib 0.12), 123 with a copy in f32."""
    stack = value(16, 1024, dtype="bf16")
    top = Block(arguments=[stack])
    argument, carried = value(16, 1024, dtype="bf16"), value(1)
    body = Block(arguments=[argument, carried])
    part = apply(body, "dynamic_slice", argument, like=value(1, 1024, dtype="bf16"))
    body.returned = [argument, apply(body, "reduce", part, like=value(1))]
    start = apply(top, "sort", stack, like=value(1))
    results = [value(16, 1024, dtype="bf16"), value(1)]
    top.operations.append(
        Operation(name="while", operands=[stack, start], results=results, bodies=[body])
    )
    top.returned = [apply(top, "sort", results[1], like=value(1))]
    stored = [stack, argument, carried, start, body.returned[1], results[1]]
    assert peak(footprint(top, stored=stored, platform="cpu")) < 1024
    assert peak(footprint(top, stored=stored, platform="gpu")) < 1024


AXES = st.lists(st.sampled_from(["x", "y", "z"]), unique=True, max_size=3)
SUMS = st.dictionaries(
    AXES.map(lambda axes: tuple((axis, -1) for axis in sorted(axes))),
    st.integers(1, 1000).map(float),
    min_size=1,
    max_size=4,
).map(lambda found: tuple(Monomial(coefficient=c, powers=p) for p, c in sorted(found.items())))


@given(
    st.lists(SUMS, min_size=1, max_size=12),
    st.fixed_dictionaries(dict.fromkeys("xyz", st.integers(1, 64))),
)
def test_dropping_points_never_changes_the_peak(sums, sizes):
    points = [LivenessPoint(bytes=one) for one in sums]
    kept = undominated(points)
    assert len(kept) <= len(points)
    before = max(value_of(one.bytes, sizes) for one in points)
    after = max(value_of(one.bytes, sizes) for one in kept)
    assert after == pytest.approx(before, abs=1.0)


@given(st.lists(SUMS, min_size=20, max_size=60))
def test_of_many_points_those_are_kept_that_no_other_reaches(sums):
    points = [LivenessPoint(bytes=one) for one in sums]
    twos = dict.fromkeys("xyz", 2)
    kept: list[LivenessPoint] = []
    for point in sorted(dict.fromkeys(points), key=lambda one: -value_of(one.bytes, twos)):
        if not any(liveness._reaches(one.bytes, point.bytes) for one in kept):
            kept.append(point)
    assert undominated(points) == tuple(kept)


def test_thousands_of_points_are_not_compared_with_each_other(monkeypatch):
    """Layers that are split otherwise than what they leave behind: every point may be the peak."""
    compared = []
    reaches = liveness._reaches
    monkeypatch.setattr(liveness, "_reaches", lambda *sums: compared.append(sums) or reaches(*sums))
    split, whole = (("x", -1),), (("y", -1),)
    points = [
        LivenessPoint(
            bytes=(
                Monomial(coefficient=4096.0 * layer, powers=split),
                Monomial(coefficient=4096.0 * (1000 - layer), powers=whole),
            )
        )
        for layer in range(1000)
    ]
    assert len(undominated(points)) == 1000
    assert len(compared) < 2000


@given(
    st.lists(st.tuples(AXES, st.integers(1, 64)), min_size=1, max_size=5),
    st.sampled_from("xyz"),
    st.fixed_dictionaries(dict.fromkeys("xyz", st.integers(1, 64))),
)
def test_doubling_an_axis_never_raises_the_arguments(arguments, doubled, sizes):
    top = Block(
        arguments=[
            Value(shape=(64 * size,), dtype="f32", axes=(tuple(sorted(axes)),))
            for axes, size in arguments
        ]
    )
    found = footprint(top).argument_bytes
    assert value_of(found, {**sizes, doubled: 2 * sizes[doubled]}) <= value_of(found, sizes)


def test_all_reduces_become_one_on_cpus_that_needs_operands_and_results_at_once():
    """Six gradients of 16 MiB, reduced over eight CPUs and subtracted from donated weights: the
    compiler of jaxlib 0.12 has one all-reduce of six and 192.0 MiB of temporaries (16 with one
    all-reduce after another, each over its operand)."""
    weights = [value(2048, 2048) for _ in range(6)]
    top = Block(arguments=[*weights, value(8, 2048)])
    rows = top.arguments[-1]
    for one in weights:
        whole = apply(top, "dot_general", rows, like=one)
        whole.producer.attributes = {
            "lhs_batch": (), "rhs_batch": (), "lhs_contracting": (0,), "rhs_contracting": (0,)
        }  # fmt: skip
        reduced = apply(top, "all_reduce", whole, attributes={"axes": ("x",)})
        top.returned.append(apply(top, "subtract", one, reduced))
    found = footprint(top, platform="cpu", donated=tuple(range(6)))
    assert peak(found) == pytest.approx(192 * 2**20, rel=0.15)


def reduced(top: Block, axis: str, *operands: Value) -> Value:
    return apply(top, "all_reduce", *operands, attributes={"axes": (axis,)})


def test_all_reduces_that_need_each_other_by_way_of_others_stay_two():
    """Were both of `x` one and both of `y` one, each of the two would wait for the other."""
    x = value(1024)
    top = Block(arguments=[x])
    first = reduced(top, "x", apply(top, "dot_general", x))
    second = reduced(top, "y", apply(top, "dot_general", first))
    third = reduced(top, "y", apply(top, "sine", x))
    fourth = reduced(top, "x", apply(top, "sine", third))
    top.returned = [second, fourth]
    merged = with_combined_reductions([as_step(one) for one in top.operations])
    assert [len(one.results) for one in merged if one.name == "all_reduce"] == [1, 1, 1, 1]


def test_all_reduces_over_other_axes_stay_apart_and_chains_meet_at_their_level():
    x = value(1024)
    top = Block(arguments=[x])
    chain = reduced(top, "x", apply(top, "sine", reduced(top, "x", x)))
    top.returned = [chain, reduced(top, "y", x), reduced(top, "x", apply(top, "sine", x))]
    merged = with_combined_reductions([as_step(one) for one in top.operations])
    found = [len(one.results) for one in merged if one.name == "all_reduce"]
    assert sorted(found) == [1, 1, 2]


def test_a_tpu_pads_the_two_dimensions_that_are_padded_least():
    """Layouts of libtpu 0.0.52: images of 64 channels take twice their elements, and a step that
    pools such images 33.6 MiB of arguments instead of 17.3."""
    assert tiled((16, 64, 64, 64), "f32") == 2.0
    assert tiled((256, 64), "f32") == tiled((128, 4, 64), "f32") == 1.0
    assert tiled((4096, 3), "i32") == pytest.approx(4 / 3)
    assert tiled((1024, 64), "i8") == 1.0
    images = value(16, 64, 64, 64)
    top = Block(arguments=[images], returned=[images])
    assert peak(footprint(top, platform="tpu")) == 2 * 16 * 2**20


@pytest.mark.parametrize(("platform", "expected"), [("tpu", 2), ("gpu", 9)])
def test_a_sum_of_products_is_one_array_on_tpus(platform, expected):
    """`ragged_dot` is a product for each group: 110 MiB compiled, 306 with an array for each."""
    x = value(256, 256)
    top = Block(arguments=[x])
    parts = [apply(top, "dot_general", x) for _ in range(8)]
    total = parts[0]
    for part in parts[1:]:
        total = apply(top, "add", total, part)
    top.returned = [apply(top, "sort", total)]
    found = footprint(top, stored=[*parts, *top.returned], platform=platform)
    assert peak(found) <= expected * x.global_bytes


def looked_up(width: int, platform: str) -> float:
    """Peak of the temporaries of a table, its moment, and rows that are added to it, in tables."""
    table, moment = value(1 << 16, width), value(1 << 16, width)
    places = value(64, dtype="i32")
    top = Block(arguments=[table, moment, places])
    whole = {"slice_sizes": (1, width), "offset_dims": (1,)}
    rows = apply(top, "gather", table, places, like=value(64, width), attributes=whole)
    zeros = apply(top, "broadcast_in_dim", like=table)
    added = {"scatter_dims": (0,), "update_window_dims": (1,)}
    gradient = apply(top, "scatter", zeros, places, rows, attributes=added)
    decayed = apply(top, "multiply", moment, moment)
    summed = apply(top, "add", decayed, gradient)
    top.returned = [apply(top, "subtract", table, summed), summed]
    stored = [rows, gradient, *top.returned]
    found = footprint(top, stored=stored, platform=platform, donated=(0, 1))
    return peak(found) / table.global_bytes


def test_a_tpu_copies_a_narrow_table_whose_rows_are_looked_up():
    """Four tables of 524,288 x 64 and their moments, 1 GiB, take 3.0 GiB (libtpu 0.0.52): a padded
    copy of each; those of 128 columns take no copies."""
    assert tiled((1 << 16, 64), "f32") == 1.0
    assert tiled_by_rows((1 << 16, 64), "f32") == 2.0
    assert tiled_by_rows((1 << 16, 128), "f32") == 1.0
    wide = looked_up(128, "tpu")
    assert wide <= 1.1
    assert looked_up(64, "tpu") == pytest.approx(4, abs=0.1)
    assert looked_up(64, "gpu") <= 1.1


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((64,), {"slice_sizes": (1, 64), "offset_dims": (0,)}),  # One row.
        ((1 << 16, 64), {"slice_sizes": (1 << 16, 1), "offset_dims": (0,)}),  # Columns.
        ((1 << 16, 64), {"slice_sizes": (1, 1), "offset_dims": ()}),  # Elements.
    ],
)
def test_a_tpu_copies_no_table_of_which_no_rows_are_looked_up(shape, attributes):
    table, places = value(1 << 16, 64), value(64, dtype="i32")
    top = Block(arguments=[table, places])
    top.returned = [apply(top, "gather", table, places, like=value(*shape), attributes=attributes)]
    assert peak(footprint(top, platform="tpu")) < 1.1 * table.global_bytes


def test_a_loop_may_read_a_table_whose_rows_were_looked_up():
    """A head that is tied to an embedding, with its loss in pieces."""
    table, places = value(1 << 16, 64), value(64, dtype="i32")
    top = Block(arguments=[table, places])
    whole = {"slice_sizes": (1, 64), "offset_dims": (1,)}
    rows = apply(top, "gather", table, places, like=value(64, 64), attributes=whole)
    inside = Block(arguments=[value(64, 64), value(1 << 16, 64)])
    inside.returned = [apply(inside, "dot_general", *inside.arguments), inside.arguments[1]]
    results = [value(64, 64), value(1 << 16, 64)]
    loop = Operation(
        name="while", operands=[rows, table], results=results, bodies=[inside], trips=4
    )
    top.operations.append(loop)
    top.returned = [results[0]]
    assert peak(footprint(top, platform="tpu")) > table.global_bytes


def test_a_tpu_keeps_copies_of_arguments_on_the_chip_while_there_is_room():
    found = footprint(Block(arguments=[value(8, 128)]), platform="tpu")
    mib = 2.0**20
    room = found.on_chip_bytes / mib
    assert room == 128
    assert footprint(Block(), platform="cpu").on_chip_bytes == 0

    def added(temporaries: float, arguments: float) -> float:
        both = np.array(temporaries * mib), np.array(arguments * mib)
        return float(with_copies(*both, found.on_chip_bytes)) / mib

    assert (added(20, 10), added(120, 10), added(130, 10)) == (30, 128, 130)


def cut(name: str, **attributes: tuple[int, ...]) -> float:
    """Peak of the temporaries of a sum of an array and of a part of it, in such arrays."""
    top = Block(arguments=[value(8, 256)])
    (x,) = top.arguments
    part = apply(top, name, x, attributes=dict(attributes))
    top.returned = [apply(top, "add", x, part)]
    found = footprint(top, stored=[top.returned[0]], platform="tpu")
    return peak(found, x=1, y=1) / (8 * 256 * 4)


def test_slices_and_pads_inside_tiles_are_arrays_of_their_own_on_a_tpu():
    assert cut("slice", start=(0, 128), stride=(1, 1), limit=(8, 256)) == 0
    assert cut("slice", start=(0, 1), stride=(1, 1), limit=(8, 256)) == 1
    assert cut("slice", start=(0, 0), stride=(2, 1), limit=(8, 256)) == 1
    assert cut("pad", low=(0, 0), high=(0, 0), interior=(0, 0)) == 0
    assert cut("pad", low=(0, 0), high=(0, 0), interior=(1, 0)) == 1


def test_constants_are_made_for_the_first_step_that_reads_them():
    top = Block(arguments=[value(4), value(4)])
    zeros = Value(shape=(4,), dtype="f32", axes=((),))
    top.operations.append(Operation(name="constant", operands=[], results=[zeros]))
    first = apply(top, "tanh", top.arguments[0])
    second = apply(top, "add", zeros, first)
    steps = constants_last([as_step(one) for one in top.operations])
    assert [step.name for step in steps] == ["tanh", "constant", "add"]
    assert steps[-1].results == [second]


def test_a_sum_that_two_products_read_is_one_array_on_cpus():
    """The gradient of logits: the scatter and the exponentials that it is made of end before it is
    multiplied."""
    top = Block(arguments=[value(64, 64), value(64, 64)])
    x, y = top.arguments
    scattered = apply(top, "scatter", x, x, x)
    total = apply(top, "add", scattered, apply(top, "sort", y))
    products = [apply(top, "dot_general", total, one) for one in (x, y)]
    assert list(read_by_products(top)) == [total]
    assert products[0] not in set(read_by_products(top))
