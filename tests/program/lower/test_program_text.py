"""Texts of programs: which two are the same program."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.lower.lowered import canonical_lines
from automesh.program.lower.program_text import (
    TextLine,
    first_difference,
    in_one_form,
)


def inner(x: Any) -> Any:
    return jnp.where(x > 0, jnp.sin(x), 2 * x)


def copy_of(function: Any) -> Any:
    return jax.jit(types.FunctionType(function.__code__, function.__globals__, function.__name__))


def lines_of(step: Callable[[Any], Any]) -> tuple[TextLine, ...]:
    return canonical_lines(jax.jit(step).lower(jnp.ones(4)))


def test_a_function_that_is_lowered_twice_is_the_same_program() -> None:
    """Before, a script whose second run had other caches was run again for each mesh."""
    one, two = jax.jit(inner), copy_of(inner)

    def step(x: Any) -> Any:
        return one(one(x))

    def with_two(x: Any) -> Any:
        return one(two(x))

    with_two.__name__ = "step"
    shared, apart = lines_of(step), lines_of(with_two)
    assert first_difference(shared, apart) is not None
    assert first_difference(*map(in_one_form, (shared, apart))) is None


@pytest.mark.parametrize("last", ["jnp.cos", "inner"])
def test_functions_that_do_something_else_stay_different(last: str) -> None:
    def other(x: Any) -> Any:
        return jnp.where(x > 0, jnp.cos(x), 2 * x)

    other.__name__ = "inner"
    one, two = jax.jit(inner), copy_of(inner)
    given: Any = jax.jit(other) if last == "jnp.cos" else jax.jit(lambda x: inner(x) + 1)
    before, after = lines_of(lambda x: one(two(x))), lines_of(lambda x: one(given(x)))
    found = first_difference(*map(in_one_form, (before, after)))
    assert found is not None


def test_what_is_no_program_stays_as_it_is() -> None:
    lines = (TextLine(text="  func.func private @f() {", place="a.py:1"),)
    assert in_one_form(lines) == lines


def test_the_address_of_a_custom_partitioning_is_no_difference() -> None:
    call = (
        '%1 = stablehlo.custom_call @CustomSPMDPartitioning(%0) {backend_config = "{}", rule = 1}'
    )
    before, after = (
        (TextLine(text="func.func public @main() {", place=""), TextLine(text=text, place=""))
        for text in (call.replace("{}", "140192279142208"), call.replace("{}", "139954396231632"))
    )
    assert first_difference(*map(in_one_form, (before, after))) is None
    other = (before[0], TextLine(text=after[1].text.replace("rule = 1", "rule = 2"), place=""))
    assert first_difference(*map(in_one_form, (before, other))) is not None


@pytest.mark.parametrize(
    ("dimensions", "is_same"),
    [("[]", True), ("[{}]", True), ("[{}, {}]", True), ("[{}, {?}]", False), ('[{"x"}]', False)],
)
def test_an_array_that_is_whole_everywhere_may_name_no_mesh(dimensions: str, is_same: bool) -> None:
    """A script was run again for each mesh because a temperature, which an optimizer had returned,
    was described so."""
    argument = (
        "  func.func public @main(%arg0: tensor<f32> {{sdy.sharding = #sdy.sharding<@{}, {}>}}"
    )
    one, other = (
        (TextLine(text=argument.format(mesh, dimensions), place=""),)
        for mesh in ("mesh", "empty_mesh")
    )
    assert (first_difference(in_one_form(one), in_one_form(other)) is None) == is_same
