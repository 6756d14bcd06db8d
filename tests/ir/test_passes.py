"""Rewrites that follow the partitioner and the compilers."""

import gc
import itertools
import time

import pytest

from automesh.cost.terms import value_of
from automesh.ir.graph import Operation
from automesh.ir.passes.collectives import (
    gather_what_is_narrow,
    reassociate_reductions,
    scatter_reductions,
)
from automesh.ir.passes.run import RULES, rewrite
from automesh.ir.passes.windowed import IN_RING, INTENSITY, WINDOWED
from tests.support.samples.graphs import SIZES, Program, array, names

ROWS, COLUMNS = ("dp", "fsdp"), ("tp",)


def collectives(graph):
    return [
        (one.name, one.attributes["axes"])
        for one in graph.top.operations
        if one.name.startswith(("all_", "reduce_scatter"))
    ]


def gradient():
    """x^T y with rows over dp and fsdp, its result scattered over fsdp."""
    program = Program()
    x = program.argument((64, 32), (ROWS, ()), "bf16")
    y = program.argument((64, 16), (ROWS, ()), "bf16")
    return program, program.dot(x, y, contracting=(0, 0))


def test_every_rule_says_where_it_is_from():
    assert all(rule.source and rule.platforms for rule in RULES)


def test_a_constant_is_never_communicated():
    program = Program()
    zeros = program.constant((8, 8), (("fsdp",), ()))
    graph = program.graph(program("add", program.gather(zeros, "fsdp"), program.argument((8, 8))))
    rewrite(graph, "none")
    assert "all_gather" not in names(graph.top)


def test_shardys_reduce_scatter_is_a_reduction_and_a_slice_before_the_backend():
    program, product = gradient()
    scattered = program(
        "reduce_scatter",
        product,
        split=(ROWS, ()),
        axes=ROWS,
        group=8,
        exact=True,
        per_dimension=(ROWS, ()),
    )
    graph = program.graph(scattered)
    rewrite(graph, "none")
    assert collectives(graph) == [("all_reduce", ROWS), ("all_slice", ROWS)]
    assert graph.top.returned[0].axes == (ROWS, ())
    rewrite(graph, "tpu")
    assert collectives(graph) == [("reduce_scatter", ROWS)]


def test_a_reduce_scatter_of_the_program_stays_one():
    program, product = gradient()
    graph = program.graph(
        program(
            "reduce_scatter",
            product,
            split=(ROWS, ()),
            axes=ROWS,
            manual=True,
            per_dimension=(ROWS, ()),
        )
    )
    rewrite(graph, "none")
    assert collectives(graph) == [("reduce_scatter", ROWS)]


@pytest.mark.parametrize("platform", ["none", "cpu"])
def test_each_dimension_is_reduced_on_its_own(platform):
    program = Program()
    x = program.argument((64, 32), (ROWS, COLUMNS))
    total = program("reduce", x, shape=(), split=(), dims=(0, 1), reducer="add")
    graph = program.graph(program.reduce(total, "dp", "fsdp", "tp"))
    rewrite(graph, platform)
    assert collectives(graph) == [("all_reduce", ROWS), ("all_reduce", COLUMNS)]
    first, second = graph.top.operations[-2:]
    assert first.results[0] is second.operands[0]
    assert (first.attributes["group"], second.attributes["group"]) == (8, 2)
    assert second.results[0] is graph.top.returned[0]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_reduce_all_dimensions_at_once(platform):
    program = Program()
    x = program.argument((64, 32), (ROWS, COLUMNS))
    total = program("reduce", x, shape=(), split=(), dims=(0, 1), reducer="add")
    graph = program.graph(program.reduce(total, "dp", "fsdp", "tp"))
    rewrite(graph, platform)
    assert collectives(graph) == [("all_reduce", (*ROWS, *COLUMNS))]


@pytest.mark.parametrize(("platform", "dtype"), [("none", "f32"), ("cpu", "f32"), ("tpu", "bf16")])
def test_accelerators_gather_what_is_converted_afterwards_in_the_narrow_type(platform, dtype):
    program = Program()
    weight = program.argument((64, 32), (("fsdp",), ()))
    graph = program.graph(program("convert", program.gather(weight, "fsdp"), dtype="bf16"))
    rewrite(graph, platform)
    (gather,) = [one for one in graph.top.operations if one.name == "all_gather"]
    assert gather.results[0].dtype == gather.operands[0].dtype == dtype
    assert graph.top.returned[0].dtype == "bf16"


def test_a_gather_that_is_also_read_wide_stays_wide():
    program = Program()
    gathered = program.gather(program.argument((64, 32), (("fsdp",), ())), "fsdp")
    graph = program.graph(program("convert", gathered, dtype="bf16"), program("negate", gathered))
    rewrite(graph, "tpu")
    (gather,) = [one for one in graph.top.operations if one.name == "all_gather"]
    assert gather.results[0].dtype == "f32"


@pytest.mark.parametrize(("platform", "count"), [("none", 3), ("cpu", 3), ("gpu", 1), ("tpu", 1)])
def test_partial_sums_share_a_reduction(platform, count):
    program = Program()
    parts = [program.argument((8, 16)) for _ in range(3)]
    first, second, third = (program.reduce(part, "tp") for part in parts)
    graph = program.graph(program("add", program("add", first, second), third))
    rewrite(graph, platform)
    assert collectives(graph) == [("all_reduce", COLUMNS)] * count
    # The same sum: all three parts are still read.
    assert all(part.users for part in parts)
    assert len(graph.top.operations) == count + 2


@pytest.mark.parametrize(("platform", "count"), [("gpu", 1), ("tpu", 2)])
def test_the_two_gradients_of_a_tied_embedding_are_reduced_apart_on_a_tpu(platform, count):
    """libtpu 0.0.52: 17.8 MB of all-reduces for a table of 8.4 MB, 9.4 without a lookup."""
    program = Program()
    table = program.argument((8, 16))
    looked_up = program("scatter", table, program.argument((4,)), program.argument((4, 16)))
    rows = program.reduce(looked_up, "tp")
    head = program.reduce(program.argument((8, 16)), "tp")
    graph = program.graph(program("add", rows, head))
    rewrite(graph, platform)
    assert collectives(graph) == [("all_reduce", COLUMNS)] * count


def test_sums_of_looked_up_rows_are_reduced_together_and_apart_from_others():
    program = Program()
    table, places, rows = (program.argument(shape) for shape in ((8, 16), (4,), (4, 16)))
    first, second = (
        program.reduce(program("scatter", table, places, rows, number=number), "tp")
        for number in range(2)
    )
    head = program.reduce(program.argument((8, 16)), "tp")
    graph = program.graph(program("add", head, program("add", first, second)))
    rewrite(graph, "tpu")
    assert collectives(graph) == [("all_reduce", COLUMNS)] * 2


def test_a_reduction_that_something_else_reads_is_not_shared():
    program = Program()
    first = program.reduce(program.argument((8, 16)), "tp")
    second = program.reduce(program.argument((8, 16)), "tp")
    graph = program.graph(program("add", first, second), first)
    rewrite(graph, "tpu")
    assert collectives(graph) == [("all_reduce", COLUMNS)] * 2


def test_a_reduction_behind_which_a_part_is_taken_scatters_and_reduces_the_rest():
    program, product = gradient()
    turned = program("transpose", program.reduce(product, *ROWS), shape=(16, 32), perm=(1, 0))
    wide = program("convert", turned, dtype="f32")
    graph = program.graph(program.slice(wide, (), ("fsdp",)))
    rewrite(graph, "tpu")
    assert collectives(graph) == [("reduce_scatter", ("fsdp",)), ("all_reduce", ("dp",))]
    scatter, rest = [
        one for one in graph.top.operations if one.name in ("reduce_scatter", "all_reduce")
    ]
    assert scatter.attributes["per_dimension"] == (("fsdp",), ())
    assert scatter.results[0].axes == rest.results[0].axes == (("fsdp",), ())
    assert graph.top.returned[0].axes == ((), ("fsdp",))
    assert (graph.top.returned[0].shape, graph.top.returned[0].dtype) == ((16, 32), "f32")


@pytest.mark.parametrize(
    ("platform", "found"),
    [
        ("tpu", [("all_reduce", ("fsdp", "tp")), ("all_slice", ("fsdp",))]),
        ("gpu", [("reduce_scatter", ("fsdp",)), ("all_reduce", ("tp",))]),
    ],
)
def test_rows_of_a_table_in_parts_have_one_sum_on_a_tpu(platform, found):
    """libtpu 0.0.52: bags of a table over fsdp and tp, for a batch over fsdp."""
    program = Program()
    table, places = program.argument((64, 16), (("fsdp", "tp"), ())), program.argument((8,))
    rows = program("gather", table, places, shape=(8, 16), split=((), ()))
    graph = program.graph(program.slice(program.reduce(rows, "fsdp", "tp"), ("fsdp",), ()))
    rewrite(graph, platform)
    assert collectives(graph) == found


@pytest.mark.parametrize(("dtype", "found"), [("f32", "reduce_scatter"), ("i32", "all_reduce")])
def test_sums_of_integers_stay_whole_on_a_tpu(dtype, found):
    """libtpu 0.0.52: products of int8."""
    program = Program()
    parts = program.argument((8, 16), dtype=dtype)
    graph = program.graph(program.slice(program.reduce(parts, "tp"), ("tp",), ()))
    rewrite(graph, "tpu")
    assert collectives(graph)[0][0] == found


def test_the_cpu_makes_no_reduce_scatter():
    program, product = gradient()
    graph = program.graph(program.slice(program.reduce(product, *ROWS), ("fsdp",), ()))
    rewrite(graph, "cpu")
    assert collectives(graph) == [("all_reduce", ROWS), ("all_slice", ("fsdp",))]


def test_equal_work_is_done_once_and_useless_work_never():
    program = Program()
    weight = program.argument((64, 32), (("fsdp",), ()))
    once, again = program.gather(weight, "fsdp"), program.gather(weight, "fsdp")
    program("negate", weight)
    graph = program.graph(program("multiply", once, again))
    rewrite(graph, "none")
    assert names(graph.top) == ["all_gather", "multiply"]


@pytest.mark.parametrize(
    ("platform", "permutes"), [("none", 2), ("cpu", 2), ("gpu", 2), ("tpu", 1)]
)
def test_equal_slices_have_their_rows_sent_twice(platform, permutes):
    """`x - roll(x)` here, `x + roll(x)` there; the TPU's compiler slices once, for both."""
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    cut = {"shape": (62, 32), "start": (2, 0), "limit": (64, 32), "stride": (1, 1)}
    first, second = (program("slice", x, **cut) for _ in range(2))
    graph = program.graph(program("tanh", first), program("negate", second))
    rewrite(graph, platform)
    assert names(graph.top).count("collective_permute") == permutes


def test_different_constants_are_not_equal_work():
    program = Program()
    x = program.argument((8,))
    one, two = (program("constant", shape=(8,), splat=None) for _ in range(2))
    graph = program.graph(program("add", program("add", x, one), program("add", x, two)))
    rewrite(graph, "none")
    assert names(graph.top).count("constant") == 2


def scanned_weights():
    program = Program()
    x = program.argument((8, 16), dtype="bf16")
    stack = program.argument((4, 16, 16))

    def body(inside, x, stack):
        part = inside("dynamic_slice", stack, shape=(1, 16, 16), sizes=(1, 16, 16))
        weight = inside("convert", inside("reshape", part, shape=(16, 16)), dtype="bf16")
        return inside.dot(x, weight), stack

    return program, program.loop(4, [x, stack], body)


def test_the_tpu_converts_stacked_weights_before_the_loop():
    program, (x, _) = scanned_weights()
    graph = program.graph(x)
    rewrite(graph, "tpu")
    assert names(graph.top) == ["convert", "while"]
    copy, loop = graph.top.operations
    assert (copy.results[0].shape, copy.results[0].dtype) == ((4, 16, 16), "bf16")
    assert names(loop.bodies[0]) == ["dynamic_slice", "reshape", "dot_general"]
    assert loop.bodies[0].operations[0].operands[0].dtype == "bf16"


@pytest.mark.parametrize("platform", ["none", "cpu", "gpu"])
def test_others_convert_them_inside(platform):
    program, (x, _) = scanned_weights()
    graph = program.graph(x)
    rewrite(graph, platform)
    assert names(graph.top) == ["while"]


@pytest.mark.parametrize(
    ("rows", "is_ring"), [((("fsdp",), ()), True), ((ROWS, ()), False), (((), ()), False)]
)
def test_a_gather_may_become_a_ring_if_its_axes_split_the_other_operand(rows, is_ring):
    program = Program()
    x = program.argument((64, 32), rows)
    weight = program.argument((32, 16), (("fsdp",), ()))
    graph = program.graph(program.dot(x, program.gather(weight, "fsdp")))
    rewrite(graph, "tpu")
    *_, gather, dot = graph.top.operations
    assert bool(gather.attributes.get(IN_RING)) is is_ring
    assert bool(dot.attributes.get(WINDOWED)) is is_ring
    if is_ring:
        (ring,) = dot.attributes[WINDOWED]
        # The weight's rows are contracted: every step reads and writes the result again.
        assert ring.axes == ("fsdp",)
        assert ring.bytes[0].coefficient == 2 * 64 * 16 * 4
        # Two FLOPs for each of a device's 16 rows and each weight of four bytes.
        assert value_of(ring.intensity, SIZES) == 2 * 16 / 4
        assert gather.attributes[INTENSITY] == ring.intensity


def test_a_gather_that_was_made_before_a_conversion_is_no_ring():
    program = Program()
    x = program.argument((64, 32), (("fsdp",), ()), "bf16")
    gathered = program.gather(program.argument((32, 16), (("fsdp",), ())), "fsdp")
    graph = program.graph(program.dot(x, program("convert", gathered, dtype="bf16")))
    rewrite(graph, "tpu")
    assert not any(one.attributes.get(WINDOWED) for one in graph.top.operations)


def test_a_scattered_gradient_may_become_a_ring():
    program = Program()
    x = program.argument((64, 32), (("fsdp",), ()))
    y = program.argument((64, 16), (("fsdp",), ()))
    summed = program.reduce(program.dot(x, y, contracting=(0, 0)), "fsdp")
    graph = program.graph(program.slice(summed, ("fsdp",), ()))
    rewrite(graph, "tpu")
    dot, scatter = graph.top.operations
    assert scatter.name == "reduce_scatter"
    assert scatter.attributes[IN_RING]
    assert dot.attributes[WINDOWED][0].axes == ("fsdp",)
    assert value_of(scatter.attributes[INTENSITY], SIZES) == 2 * 16 / 4
    assert dot.attributes[WINDOWED][0].intensity == scatter.attributes[INTENSITY]


@pytest.mark.parametrize(("declared", "is_ring"), [(((), (), ()), False), (None, True)])
def test_a_gather_that_the_program_asks_for_is_no_ring(declared, is_ring):
    program = Program()
    x = program.argument((64, 32), (("fsdp",), ()))
    dot = program.dot(x, program.gather(program.argument((32, 16), (("fsdp",), ())), "fsdp"))
    if declared is not None:
        dot.producer.attributes["declared"] = declared
    graph = program.graph(dot)
    rewrite(graph, "tpu")
    assert bool(graph.top.operations[-1].attributes.get(WINDOWED)) is is_ring


def layers(count):
    """A program in which all changes of collectives apply to every layer."""
    program, returned = Program(), []
    for _ in range(count):
        weight = program.argument((64, 32), (("fsdp",), ()))
        returned.append(program("convert", program.gather(weight, "fsdp"), dtype="bf16"))
        parts = [program.reduce(program.argument((8, 16)), "tp") for _ in range(2)]
        returned.append(program("add", *parts))
        gradient = program.reduce(program.argument((64, 32)), *ROWS)
        returned.append(program.slice(gradient, ("fsdp",), ()))
    return program.graph(*returned)


def took_s(change, count):
    def once():
        graph = layers(count)
        gc.collect()
        gc.disable()  # A collection would walk the objects of all tests before.
        try:
            begun_s = time.process_time()
            change(graph)
            return time.process_time() - begun_s
        finally:
            gc.enable()

    return min(once() for _ in range(3 if count < 1000 else 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "made"),
    [
        (gather_what_is_narrow, ("convert", "all_gather")),
        (reassociate_reductions, ("add", "all_reduce")),
        (scatter_reductions, ("reduce_scatter", "all_reduce")),
    ],
)
def test_a_change_takes_time_in_proportion_to_the_layers(change, made):
    """Every layer's change walked the whole program: a quarter of the time at 600 layers."""
    graph = layers(50)
    change(graph)
    following = [one.name for one in graph.top.operations]
    assert list(itertools.pairwise(following)).count(made) == 50
    known = set(graph.top.arguments)
    for operation in graph.top.operations:
        assert known.issuperset(operation.operands)
        known.update(operation.results)
    assert known.issuperset(graph.top.returned)
    # Sixteen times as many layers; with a walk for each, more than a hundred times as long.
    assert took_s(change, 1600) < 64 * took_s(change, 100)


@pytest.mark.parametrize(("is_precise", "dtype"), [(False, "bf16"), (True, "f32")])
def test_what_products_alone_read_is_gathered_in_bf16_on_tpus(is_precise, dtype):
    """A stack of layers that is split over the layers: libtpu 0.0.52 gathers 64 MiB in a step, and
    f32 would be 128."""
    program = Program()
    x = program.argument((64, 32), ((), ()))
    weight = program.argument((32, 16), (("fsdp",), ()))
    whole = program.gather(weight, "fsdp")
    graph = program.graph(program.dot(x, whole))
    if is_precise:
        graph.top.operations[-1].attributes["is_precise"] = True
    rewrite(graph, "tpu")
    assert graph.top.operations[-1].operands[1].dtype == dtype


@pytest.mark.parametrize(
    ("platform", "order"),
    [
        ("tpu", ["all_gather", "broadcast_in_dim"]),
        ("gpu", ["all_gather", "broadcast_in_dim"]),
        ("cpu", ["broadcast_in_dim", "all_gather"]),
    ],
)
def test_what_is_repeated_afterwards_is_gathered_once(platform, order):
    program = Program()
    x = program.argument((64, 32), (ROWS, ()))
    large = program("broadcast_in_dim", x, shape=(64, 8, 32), split=(ROWS, (), ()), dims=(0, 2))
    graph = program.graph(program.gather(large, *ROWS))
    rewrite(graph, platform)
    assert names(graph.top) == order
    gather = next(one for one in graph.top.operations if one.name == "all_gather")
    assert gather.results[0].shape == ((64, 32) if platform != "cpu" else (64, 8, 32))
    assert graph.top.returned[0].axes == ((), (), ())


def test_what_a_broadcast_makes_is_gathered_behind_it():
    program = Program()
    x = program.argument((64, 1, 32), (ROWS, (), ()))
    large = program(
        "broadcast_in_dim", x, shape=(64, 8, 32), split=(ROWS, COLUMNS, ()), dims=(0, 1, 2)
    )
    graph = program.graph(program.gather(large, "tp"))
    rewrite(graph, "tpu")
    assert names(graph.top) == ["broadcast_in_dim", "all_gather"]


def test_a_ring_moves_bfloat16_and_is_decided_by_the_bytes_of_float32():
    program = Program()
    x = program.argument((64, 32), (("fsdp",), ()))
    weight = program.argument((32, 16), (("fsdp",), ()))
    graph = program.graph(program.dot(x, program.gather(weight, "fsdp")))
    rewrite(graph, "tpu")
    *_, gather, _ = graph.top.operations
    assert gather.results[0].dtype == "bf16"
    assert value_of(gather.attributes[IN_RING], SIZES) == 32 * 16 * 4


def test_products_behind_a_manual_region_gather_bfloat16():
    program = Program()
    weights = [program.argument((32, 16), (("fsdp",), ())) for _ in range(2)]
    gathered = [program.gather(one, "fsdp") for one in weights]
    left = [array(one.shape) for one in gathered]
    program.block.operations.append(Operation(name="leave_manual", operands=gathered, results=left))
    x = program.argument((64, 32), (ROWS, ()))
    graph = program.graph(*(program.dot(x, one) for one in left))
    rewrite(graph, "tpu")
    found = [one for one in graph.top.operations if one.name == "all_gather"]
    assert [one.results[0].dtype for one in found] == ["bf16", "bf16"]


def labelled(rows: tuple[int, ...], *, zero: bool = True):
    """The gradient of logits that labels are taken from."""
    program = Program()
    shape = (8, 4, 64)
    scores = program.argument(shape)
    if zero:
        zeros = program(
            "broadcast_in_dim", program.constant(()), shape=shape, split=((), (), ()), dims=()
        )
    else:
        zeros = scores
    updates = program.argument(rows)
    places = program.argument((*rows, 1), dtype="i32")
    found = program(
        "scatter", zeros, places, updates, shape=shape, split=((), (), ()),
        reducer="add", update_window_dims=(), inserted_window_dims=(2,), scatter_dims=(2,),
    )  # fmt: skip
    return program.graph(program("add", found, scores))


def test_a_tpu_compares_where_every_row_has_one_update():
    """libtpu 0.0.52: a cross entropy keeps one array of its logits, and no scatter."""
    graph = labelled((8, 4, 1))
    rewrite(graph, "tpu")
    assert "scatter" not in names(graph.top)
    assert names(graph.top)[-2:] == ["select", "add"]
    for platform in ("cpu", "gpu"):
        graph = labelled((8, 4, 1))
        rewrite(graph, platform)
        assert "scatter" in names(graph.top)


@pytest.mark.parametrize("graph", [labelled((8, 4, 2)), labelled((8, 4, 1), zero=False)])
def test_other_scatters_stay(graph):
    rewrite(graph, "tpu")
    assert "scatter" in names(graph.top)
