"""State that comes back otherwise than it went in: the first step, and what is found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import value_of
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

SIZE = 1024
WHOLE = SIZE * SIZE * 4


def terms_of(build, axes=(("fsdp", 8),), platform="tpu"):
    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("fsdp",), platform=platform
    )
    return propagate(programs, sizes=axes, probes=(), enter=lambda _: None).terms


def array(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def momentum(mesh, spec=()):
    def step(state, x):
        w, m = state
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * m + g
        return (w - 0.1 * m, m), loss

    state = array(mesh, (SIZE, SIZE), "fsdp"), array(mesh, (SIZE, SIZE), *spec)
    return jax.jit(step, donate_argnums=0), (state, array(mesh, (64, SIZE), "fsdp"))


def peak(footprint, sizes):
    lasting = value_of(footprint.argument_bytes, sizes) + value_of(footprint.output_bytes, sizes)
    points = [value_of(point.bytes, sizes) for point in footprint.points]
    return lasting - value_of(footprint.alias_bytes, sizes) + max(points)


def test_the_first_step_is_another_program_if_its_state_comes_back_split_otherwise():
    sizes = {"fsdp": 8}
    terms = terms_of(momentum)
    # The momentum went in whole, and is split like the gradient when it comes back.
    assert value_of(terms.argument_bytes, sizes) < 2 * WHOLE / 8 + 64 * SIZE * 4
    assert value_of(terms.first.argument_bytes, sizes) > WHOLE
    assert peak(terms.first, sizes) > peak(terms, sizes) + WHOLE / 2
    (found,) = [one for one in terms.findings if one.rule == "second-compile"]
    assert found.array == "args[0][1]" and found.axes == ("fsdp",)
    assert value_of(found.bytes, sizes) == WHOLE


def test_state_that_stays_as_it_is_makes_one_program():
    terms = terms_of(lambda mesh: momentum(mesh, ("fsdp",)))
    assert terms.first is None and terms.findings == ()


def test_state_that_changes_its_type_loses_its_donation():
    def build(mesh):
        def step(w, x):
            loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return (w - g).astype(jnp.bfloat16), loss

        args = array(mesh, (SIZE, SIZE), "fsdp"), array(mesh, (64, SIZE), "fsdp")
        return jax.jit(step, donate_argnums=0), args

    terms = terms_of(build)
    (found,) = terms.findings
    assert (found.rule, found.array) == ("state-changes-type", "args[0]")
    assert value_of(found.bytes, {"fsdp": 8}) == WHOLE / 8
    assert value_of(terms.alias_bytes, {"fsdp": 8}) == 0


def test_a_leaf_that_changes_its_type_costs_no_other_leaf_its_donation():
    def build(mesh):
        def step(state, x):
            g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
            w = state["w"] - g
            mean = 0.9 * state["mean"] + 0.1 * w
            return {"w": w, "mean": mean.astype(jnp.bfloat16)}

        one = array(mesh, (SIZE, SIZE), "fsdp")
        return jax.jit(step, donate_argnums=0), (
            {"w": one, "mean": one},
            array(mesh, (64, SIZE), "fsdp"),
        )

    (found,) = terms_of(build).findings
    assert (found.rule, found.array) == ("state-changes-type", "args[0]['mean']")


def test_what_is_donated_and_not_replaced_is_named():
    def build(mesh):
        def step(w, old, x):
            return w + old.sum() * 1e-3, jnp.mean(x @ w)

        args = (
            array(mesh, (SIZE, SIZE), "fsdp"),
            array(mesh, (SIZE, 7), "fsdp"),
            array(mesh, (64, SIZE), "fsdp"),
        )
        return jax.jit(step, donate_argnums=(0, 1)), args

    (found,) = terms_of(build).findings
    assert (found.rule, found.array) == ("lost-donation", "args[1]")


def test_arguments_that_the_step_does_not_use_do_not_shift_the_others():
    def build(mesh):
        def step(unused, state, x):
            del unused
            return state + jnp.mean(x), jnp.mean(x)

        args = (array(mesh, (3,)), array(mesh, (SIZE, SIZE), "fsdp"), array(mesh, (64,)))
        return jax.jit(step, donate_argnums=1), args

    terms = terms_of(build)
    assert terms.first is None and terms.findings == ()
