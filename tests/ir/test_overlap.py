"""What a collective runs beside, and which buffers may stay on the chip."""

import pytest

from automesh.cost.terms import value_of
from automesh.ir.terms.collect import collect
from automesh.ir.terms.collectives import first_uses, last_makers
from tests.support.samples.graphs import SIZES, Program

ROWS = ("dp", "fsdp")
OTHER = ("none", "cpu", "gpu")


def terms_of(program, *returned, platform="tpu"):
    return collect(program.graph(*returned), active=tuple(SIZES), platform=platform)


def weights(program, count):
    return [program.argument((32, 32), (("fsdp",), ())) for _ in range(count)]


def layers(program, x, all_weights):
    """Products one after the other; every weight is gathered where it is used."""
    for each in all_weights:
        x = program.dot(x, program.gather(each, "fsdp"))
    return x


def test_a_gather_hides_behind_the_product_before_it():
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    terms = terms_of(program, layers(program, x, weights(program, 3)))
    gathers = [one for one in terms.collectives if one.kind == "all-gather"]
    products = [one for one in terms.kernels if one.matmuls]
    assert [one.hides for one in gathers] == [False, True, True]
    assert [one.region for one in gathers[1:]] == [one.region for one in products[:2]]
    assert len({one.region for one in products}) == 3
    assert {one.name for one in terms.regions} == {"step"}


def test_gathers_that_wait_for_the_same_product_share_what_hides_them():
    """Gathered early or late: what counts is where a gather is used."""
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    first, second, third = (program.gather(one, "fsdp") for one in weights(program, 3))
    y = program.dot(x, first)
    z = program("add", program.dot(y, second), program.dot(y, third))
    terms = terms_of(program, z)
    assert [one.hides for one in terms.collectives] == [False, True, True]
    products = [one.region for one in terms.kernels if one.matmuls]
    assert [one.region for one in terms.collectives[1:]] == products[:2]


def test_what_is_made_just_before_cannot_be_gathered_earlier():
    program = Program()
    x = program.argument((64, 32), (ROWS, ()))
    (w,) = weights(program, 1)
    y = program.dot(x, program.gather(w, "fsdp"))
    terms = terms_of(program, program("tanh", program.gather(y, "fsdp")))
    assert [one.hides for one in terms.collectives] == [False, False]


def test_a_loop_hides_nothing_around_it():
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    before, after, inside = weights(program, 3)
    y = program.dot(x, program.gather(before, "fsdp"))
    y, _ = program.loop(5, [y, inside], lambda body, a, w: (layers(body, a, [w]), w))
    terms = terms_of(program, program.dot(y, program.gather(after, "fsdp")))
    assert [one.hides for one in terms.collectives] == [False, False, False]
    loops = [one for one in terms.regions if one.name != "step"]
    assert [value_of(one.trips, SIZES) for one in loops] == [5.0] * len(loops)
    assert loops


@pytest.mark.parametrize("platform", OTHER)
def test_other_compilers_hide_beside_the_whole_block(platform):
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    terms = terms_of(program, layers(program, x, weights(program, 3)), platform=platform)
    assert {one.hides for one in terms.collectives} == {platform == "gpu"}
    assert len(terms.regions) == 1


def test_a_ring_stands_where_its_product_does():
    program = Program()
    x = program.argument((64, 32), (("fsdp",), ()))
    terms = terms_of(program, layers(program, x, weights(program, 2)))
    rings = [one for one in terms.collectives if one.windowed]
    windowed = [one.region for one in terms.kernels if one.windowed]
    assert [one.ring_region for one in rings] == windowed
    assert rings[1].region != rings[1].ring_region


def test_weights_and_results_lie_in_memory_and_all_else_may_stay():
    program = Program()
    x = program.argument((64, 32), (("dp",), ()))
    w, v = (program.argument((32, 32)) for _ in range(2))
    y = program.dot(x, w)
    first, second = terms_of(program, program.dot(y, v)).kernels
    kept = [[one.buffer_bytes.at(SIZES) for one in each.near] for each in (first, second)]
    between = 64 * 32 * 4 / 2
    assert kept == [[between], [between]]
    assert [value_of(one.near[0].bytes, SIZES) for one in (first, second)] == [between, between]
    assert value_of(first.bytes, SIZES) == 2 * between + 32 * 32 * 4


def test_what_a_loop_only_reads_lies_in_memory():
    program = Program()
    x, w = program.argument((64, 32), (("dp",), ())), program.argument((32, 32))
    y, _ = program.loop(3, [x, w], lambda body, a, b: (body.dot(a, b), b))
    (kernel,) = (one for one in terms_of(program, program("tanh", y)).kernels if one.matmuls)
    carried = 64 * 32 * 4 / 2
    assert [one.buffer_bytes.at(SIZES) for one in kernel.near] == [carried]
    assert value_of(kernel.near[0].bytes, SIZES) == 2 * carried


@pytest.mark.parametrize("is_before", [True, False])
def test_views_that_come_together_again_are_followed_once(is_before: bool) -> None:
    """Each path on its own would be two to the power of their number: an estimate never ended."""
    program = Program()
    x = program.argument((64, 64), (ROWS, ()))
    first = program.dot(x, program.argument((64, 64)))
    value = first
    for _ in range(16):
        value = program("add", value, value)
    last = program.dot(value, program.argument((64, 64)))
    graph = program.graph(last)
    order = {operation: place for place, operation in enumerate(graph.top.operations)}
    first, last = first.producer, last.producer
    assert first is not None and last is not None
    if is_before:
        assert last_makers(graph.top, order)[last] == order[first]
        assert last_makers(graph.top, order)[first] == -1
    else:
        assert first_uses(graph.top, order)[first] == order[last]
        assert first_uses(graph.top, order)[last] == len(order)
