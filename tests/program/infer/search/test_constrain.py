"""Constraints in a traced program: in its own equations, in loops, and where there is no place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.infer.search.constrain import OtherProgram, constrained

MESH = Mesh(np.asarray(jax.devices()[:4]), ("dp",))
ROWS = NamedSharding(MESH, P("dp"))


def step(w: Any, x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        hidden = jnp.tanh(row @ w)
        return total + hidden.sum(), hidden

    return jax.lax.scan(body, 0.0, x)


W, X = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(0, 1, 96).reshape(3, 4, 8)
TRACED = jax.make_jaxpr(step)(W, X)
LOOP = next(n for n, one in enumerate(TRACED.eqns) if one.primitive.name == "scan")


def test_an_array_in_a_loop_and_the_result_of_the_loop_are_constrained() -> None:
    places = {((LOOP, 1), (0,), 0): ROWS, ((LOOP,), (), 1): NamedSharding(MESH, P(None, "dp"))}
    program = constrained(TRACED, places)
    text = str(program)
    assert text.count("sharding_constraint") == 2
    # What follows takes the constrained array: in the loop the sum, outside the result.
    total, hidden = jax.jit(jaxpr_as_fun(program))(W, X)
    expected = jax.jit(step)(W, X)
    np.testing.assert_allclose(total, expected[0], rtol=1e-5)
    np.testing.assert_allclose(hidden, expected[1], rtol=1e-5, atol=1e-6)
    assert hidden.sharding.spec == P(None, "dp")


def test_an_operand_is_constrained_for_one_equation_alone() -> None:
    program = constrained(TRACED, {((LOOP, 0), (0,), -1): NamedSharding(MESH, P(None))})
    body = program.jaxpr.eqns[LOOP].params["jaxpr"].jaxpr
    constraint, product = body.eqns[:2]
    assert constraint.primitive.name == "sharding_constraint"
    assert product.invars[0] is constraint.outvars[0]
    # What else takes the array takes it as it was.
    assert sum(constraint.outvars[0] in one.invars for one in body.eqns) == 1
    expected = jax.jit(step)(W, X)
    np.testing.assert_allclose(jax.jit(jaxpr_as_fun(program))(W, X)[0], expected[0], rtol=1e-5)


def test_without_constraints_it_is_the_same_program() -> None:
    assert constrained(TRACED, {}) is TRACED


@pytest.mark.parametrize("place", [((99,), (), 0), ((LOOP, 1), (5,), 0)])
def test_a_place_that_is_not_there_is_refused(place: Any) -> None:
    with pytest.raises(OtherProgram):
        constrained(TRACED, {place: ROWS})
