"""Loops that never run go, and what loops carry for nobody goes with them."""

from __future__ import annotations

from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.passes.simplify import simplify_loops


def value(*shape: int) -> Value:
    return Value(shape=shape, dtype="f32", axes=((),) * len(shape))


def apply(block: Block, name: str, *operands: Value) -> Value:
    result = value(*operands[0].shape)
    block.operations.append(Operation(name=name, operands=list(operands), results=[result]))
    return result


def loop(top: Block, starts: list[Value], body: Block, trips: int = 4) -> Operation:
    results = [value(*one.shape) for one in starts]
    made = Operation(name="while", operands=starts, results=results, bodies=[body], trips=trips)
    top.operations.append(made)
    return made


def program(*, reads_stack: bool, trips: int = 4) -> tuple[Graph, Operation]:
    """Carries x, an accumulator that only feeds itself, and a stack of what x was."""
    x = value(8)
    top = Block(arguments=[x])
    accumulator, stack = apply(top, "sine", x), apply(top, "cosine", x)
    arguments = [value(8), value(8), value(8)]
    body = Block(arguments=list(arguments))
    body.returned = [
        apply(body, "sine", arguments[0]),
        apply(body, "add", arguments[1], arguments[0]),
        apply(body, "dynamic_update_slice", arguments[2], arguments[0]),
    ]
    made = loop(top, [x, accumulator, stack], body, trips)
    top.returned = [made.results[0], *([made.results[2]] if reads_stack else [])]
    return Graph(top=top, mesh=()), made


def names(block: Block) -> list[str]:
    return [operation.name for operation in block.operations]


def test_carries_that_nothing_reads_go_with_what_feeds_them():
    graph, made = program(reads_stack=False)
    simplify_loops(graph)
    assert names(graph.top) == ["while"]
    assert names(made.bodies[0]) == ["sine"]
    assert len(made.operands) == len(made.results) == len(made.bodies[0].arguments) == 1


def test_carries_that_are_read_behind_the_loop_stay():
    graph, made = program(reads_stack=True)
    simplify_loops(graph)
    assert names(graph.top) == ["cosine", "while"]
    assert names(made.bodies[0]) == ["sine", "dynamic_update_slice"]


def test_a_carry_that_feeds_a_needed_one_stays():
    x = value(8)
    top = Block(arguments=[x])
    arguments = [value(8), value(8)]
    body = Block(arguments=list(arguments))
    body.returned = [
        apply(body, "add", arguments[0], arguments[1]),
        apply(body, "sine", arguments[1]),
    ]
    made = loop(top, [x, x], body)
    top.returned = [made.results[0]]
    simplify_loops(Graph(top=top, mesh=()))
    assert len(made.results) == 2
    assert names(body) == ["add", "sine"]


def test_a_loop_whose_results_nothing_reads_goes_with_all_that_it_read():
    x = value(8)
    top = Block(arguments=[x])
    argument = value(8)
    body = Block(arguments=[argument])
    captured = apply(top, "cosine", x)
    body.returned = [apply(body, "add", argument, captured)]
    loop(top, [x], body)
    top.returned = [apply(top, "sine", x)]
    simplify_loops(Graph(top=top, mesh=()))
    assert names(top) == ["sine"]


def test_a_loop_with_effects_stays():
    x = value(8)
    top = Block(arguments=[x])
    argument = value(8)
    body = Block(arguments=[argument])
    body.returned = [apply(body, "custom_call", argument)]
    loop(top, [x], body)
    top.returned = [apply(top, "sine", x)]
    simplify_loops(Graph(top=top, mesh=()))
    assert names(top) == ["while", "sine"]


def test_a_loop_without_trips_gives_back_what_it_got():
    graph, _ = program(reads_stack=True, trips=0)
    simplify_loops(graph)
    assert names(graph.top) == ["cosine"]
    assert graph.top.returned == [graph.top.arguments[0], graph.top.operations[0].results[0]]
