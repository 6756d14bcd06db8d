"""A module in the form in which XLA hands it to Shardy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from automesh.sharding.hlo_form import bring_to_hlo_form, fold_transposes
from automesh.sharding.passes import bindings, functions_of


def names(module: Any) -> list[str]:
    main = functions_of(module, bindings().ir)["main"]
    block = main.regions[0].blocks[0]
    return [view.operation.name.split(".")[-1] for view in block.operations]


def brought(step: Any, *arguments: Any) -> Any:
    lowered = jax.jit(step).lower(*arguments).compiler_ir("stablehlo")
    found = bindings()
    with lowered.context, found.ir.Location.unknown():
        bring_to_hlo_form(lowered.operation, found.ir)
        lowered.operation.verify()
    return lowered.operation


X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def test_operations_stand_in_the_order_of_a_walk_from_the_results() -> None:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        late = jnp.sin(x)
        early = jnp.tanh(jnp.exp(x))
        return early, late

    assert names(brought(step, X)) == ["exponential", "tanh", "sine", "return"]


def test_the_first_operand_comes_first() -> None:
    def step(x: jax.Array) -> jax.Array:
        right = jnp.sin(x)
        return jnp.exp(x) * right

    assert names(brought(step, X)) == ["exponential", "sine", "multiply", "return"]


def test_a_broadcast_that_repeats_nothing_is_a_reshape() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, (1, 8, 4), (1, 2))

    assert names(brought(step, X)) == ["reshape", "return"]


def test_a_dimension_of_one_element_is_dropped_before_it_is_repeated() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, (3, 8, 4), (0, 1, 2))

    one = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32)
    module = brought(step, one)
    assert names(module) == ["reshape", "broadcast_in_dim", "return"]
    assert "tensor<1x8x4xf32>) -> tensor<8x4xf32>" in str(module)


def test_loops_are_walked_as_their_operands_are_changed() -> None:
    """What a loop does not change is handed to it last."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        kept, changed = jnp.sin(x), jnp.exp(y)
        return jax.lax.fori_loop(0, 3, lambda _, one: one * kept, changed)

    found = [one for one in names(brought(step, X, X)) if one != "constant"]
    assert found.index("exponential") < found.index("sine") < found.index("while")


_CARRIES_WHAT_IT_DOES_NOT_READ = """
func.func public @main(%x: tensor<8xf32>, %n: tensor<i32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %unread = stablehlo.sine %x : tensor<8xf32>
  %loop:3 = stablehlo.while(%i = %n, %carried = %unread, %sum = %x)
      : tensor<i32>, tensor<8xf32>, tensor<8xf32>
    cond {
      %more = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %next = stablehlo.add %i, %one : tensor<i32>
      %more = stablehlo.add %sum, %sum : tensor<8xf32>
      stablehlo.return %next, %carried, %more : tensor<i32>, tensor<8xf32>, tensor<8xf32>
    }
  return %loop#2, %unread : tensor<8xf32>, tensor<8xf32>
}
"""


def test_what_a_loop_carries_without_reading_it_is_made_before_the_loop() -> None:
    found = bindings()
    lowered = jax.jit(jnp.sin).lower(X).compiler_ir("stablehlo")
    with lowered.context, found.ir.Location.unknown():
        module = found.ir.Module.parse(_CARRIES_WHAT_IT_DOES_NOT_READ)
        bring_to_hlo_form(module.operation, found.ir)
        module.operation.verify()
        order = names(module.operation)
    assert order.index("sine") < order.index("while")


def folded(step: Any, *arguments: Any) -> Any:
    lowered = jax.jit(step).lower(*arguments).compiler_ir("stablehlo")
    found = bindings()
    with lowered.context, found.ir.Location.unknown():
        fold_transposes(lowered.operation, found.ir)
        lowered.operation.verify()
    return lowered.operation


Y = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def test_a_transposed_product_is_the_product_of_the_swapped_operands() -> None:
    module = folded(lambda x, y: (x @ y).T, X, Y)
    assert names(module) == ["dot_general", "return"]
    dot = functions_of(module, bindings().ir)["main"].regions[0].blocks[0].operations[0]
    assert [str(one.type) for one in dot.operands] == ["tensor<4x6xf32>", "tensor<8x4xf32>"]
    assert str(dot.results[0].type) == "tensor<6x8xf32>"


def test_batches_of_products_are_folded_and_other_transposes_are_not() -> None:
    xs, ys = (jax.ShapeDtypeStruct((3, *one.shape), one.dtype) for one in (X, Y))
    assert names(folded(lambda x, y: (x @ y).transpose(0, 2, 1), xs, ys)) == [
        "dot_general",
        "return",
    ]
    for order in ((1, 0, 2), (2, 0, 1)):
        kept = folded(lambda x, y, order=order: (x @ y).transpose(order), xs, ys)
        assert names(kept) == ["dot_general", "transpose", "return"]


def test_a_product_that_is_read_twice_keeps_its_transpose() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = x @ y
        return z.T, jnp.sin(z)

    assert "transpose" in names(folded(step, X, Y))


def shared(step: Any, *arguments: Any) -> list[str]:
    lowered = jax.jit(step).lower(*arguments).compiler_ir("stablehlo")
    found = bindings()
    with lowered.context, found.ir.Location.unknown():
        bring_to_hlo_form(lowered.operation, found.ir, merges_equal=True)
        lowered.operation.verify()
    return names(lowered.operation)


def test_equal_operations_become_one_and_others_stay() -> None:
    def step(x: jax.Array) -> Any:
        return jnp.sin(x) + jnp.sin(x).sum(0), jnp.sin(x) * jnp.sin(x).sum(0), jnp.sin(x).sum(1)

    found = shared(step, X)
    assert found.count("sine") == 1
    assert found.count("reduce") == 2
    assert found.count("broadcast_in_dim") == 1


def test_equal_barriers_are_one_and_random_numbers_are_not() -> None:
    """libtpu 0.0.52 has one barrier behind its `cse`."""

    def step(x: jax.Array) -> Any:
        first, second = (jax.lax.optimization_barrier(x) for _ in range(2))
        drawn = [jax.lax.rng_uniform(0.0, 1.0, (4,)) for _ in range(2)]
        return jnp.sin(first), jnp.cos(second), *drawn

    found = shared(step, X)
    assert found.count("optimization_barrier") == 1
    assert found.count("rng") == 2


def test_reductions_that_combine_otherwise_stay_apart() -> None:
    """Both begin with 0."""
    x = jax.ShapeDtypeStruct((8, 4), jnp.uint32)
    assert shared(lambda x: (x.sum(0), x.max(0), x.sum(0)), x).count("reduce") == 2


def test_reductions_by_a_comparison_stay_apart() -> None:
    def step(x: jax.Array) -> Any:
        return [
            jax.lax.reduce(x, np.False_, combine, (0,))
            for combine in (jax.lax.ne, jax.lax.eq, jax.lax.ne)
        ]

    assert shared(step, jax.ShapeDtypeStruct((8, 4), jnp.bool_)).count("reduce") == 3


def test_constants_of_complex_numbers_are_not_read() -> None:
    """The bindings of jaxlib 0.12 end the process."""

    def step(x: jax.Array) -> Any:
        return x + (1 + 2j), x * (1 + 2j), x - jnp.asarray([[1j, 2, 3, 4j]])

    assert shared(step, jax.ShapeDtypeStruct((8, 4), jnp.complex64)).count("constant") == 3


def test_merging_takes_a_time_that_is_linear_in_the_constants(monkeypatch) -> None:
    """Text of one operation numbers the whole module: a minute for 2,000 constants."""
    found = bindings()

    def refused(*_: Any, **__: Any) -> str:
        raise AssertionError("an operation was printed")

    def step(x: jax.Array) -> jax.Array:
        for number in range(8):
            x = jnp.sin(x) * (1.0 + number) + x * (1.0 + number)
        return x

    monkeypatch.setattr(found.ir.Operation, "__str__", refused)
    assert shared(step, X).count("broadcast_in_dim") == 8
