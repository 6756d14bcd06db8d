"""What a kernel would compute too often has a buffer."""

import pytest

from automesh.ir.evaluations import computed_too_often
from automesh.ir.fusion import fuse
from automesh.platforms import platform_named
from tests.support.samples.graphs import Program

CPU, GPU = platform_named("cpu"), platform_named("gpu")
SIZE = 64


def cut(program, value, start):
    return program(
        "slice",
        value,
        shape=(SIZE, SIZE),
        start=(start, 0),
        limit=(start + SIZE, SIZE),
        stride=(1, 1),
    )


def doubled(levels):
    """Sums of two shifted parts of the level before: 2^levels elements for one of the result."""
    program = Program()
    level = program("negate", program.argument((2 * SIZE, SIZE)))
    made = [level]
    for _ in range(levels):
        level = program("add", cut(program, level, 0), cut(program, level, 1))
        made.append(level)
    return program.graph(program("reduce", level, shape=())), made


@pytest.mark.parametrize(("levels", "stored"), [(3, 0), (4, 1), (6, 1)])
def test_parts_of_parts_are_computed_fifteen_times_at_most(levels, stored):
    graph, made = doubled(levels)
    found = computed_too_often(graph.top, {*graph.top.arguments, graph.top.returned[0]}, 15)
    assert len(found) == stored
    # The one that is stored is four levels below the result: 16 times.
    assert found == ({made[levels - 4]} if stored else set())


def test_what_elementwise_operations_read_at_one_place_is_computed_once():
    program = Program()
    value = program("negate", program.argument((SIZE, SIZE)))
    made = [value]
    for _ in range(6):
        made.append(program("multiply", program("tanh", made[-1]), program("sine", made[-1])))
    graph = program.graph(program("reduce", made[-1], shape=()))
    assert not computed_too_often(graph.top, {*graph.top.arguments, graph.top.returned[0]}, 15)


@pytest.mark.parametrize("name", ["pad", "concatenate", "transpose"])
def test_what_branches_is_computed_once(name):
    program = Program()
    x = program.argument((SIZE, SIZE))
    operands = [x, x] if name == "concatenate" else [program("negate", x)]
    moved = program(name, *operands, shape=(2 * SIZE, SIZE), dim=0)
    parts = cut(program, moved, 0), cut(program, moved, 1)
    graph = program.graph(program("reduce", program("add", *parts), shape=()))
    assert (moved in fuse(graph, CPU).stored) == (name != "transpose")
    assert moved not in fuse(graph, GPU).stored
    once = program(name, *operands, shape=(2 * SIZE, SIZE), dim=0)
    graph = program.graph(program("reduce", once, shape=()))
    assert once not in fuse(graph, CPU).stored


def test_two_kernels_may_each_compute_it():
    """Each of them counts for itself."""
    graph, made = doubled(3)
    program = Program(graph.top)
    second = program("reduce", program("add", made[-1], made[-1]), shape=())
    graph.top.returned.append(second)
    stored = {*graph.top.arguments, *graph.top.returned}
    assert not computed_too_often(graph.top, stored, 15)
