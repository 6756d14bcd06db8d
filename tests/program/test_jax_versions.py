"""What jax and XLA change between releases: each access is found in the form that a release has.

The ranges are those that were looked at: jax 0.10.1, 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from packaging.version import Version

from automesh.program.absent.device_queries import _query, answering
from automesh.program.execute.value_domains import Domain, UnknownLoop, domains, scan_operands
from automesh.program.lower import compiler_options
from automesh.program.lower.compiler_options import known, quick_options
from tests.program.absent.test_device_queries import V5E

JAX = Version(metadata.version("jax"))
# Since this release a scan holds trees instead of numbers, and some of jax's functions are caches
# written in C++.
TREES = Version("0.11")


def scans(function, *args):
    jaxpr = jax.jit(function).trace(*args).jaxpr.jaxpr
    return [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]


def looped(carry, rows):
    weights = rows.sum(axis=0) * 2.0

    def body(carry, row):
        total, count = carry
        return (total + row * weights, count + 1), total.sum()

    return jax.lax.scan(body, carry, rows)


def test_the_operands_of_a_scan_are_told_apart() -> None:
    (scan,) = scans(looped, (jnp.ones(3), 0), jnp.ones((4, 3)))
    assert scan_operands(scan) == (1, 2)
    assert len(scan.invars) == 4
    assert ("num_consts" in scan.params) == (JAX < TREES)
    assert ("ft_in" in scan.params) == (JAX >= TREES)


def test_a_scan_of_nothing_but_a_carry_has_no_constants() -> None:
    def countdown(start):
        return jax.lax.scan(lambda carry, _: (carry - 1, None), start, length=3)

    (scan,) = scans(countdown, jnp.ones(3))
    assert scan_operands(scan) == (0, 1)


def test_a_scan_in_an_unknown_form_is_told_in_a_sentence() -> None:
    unknown = SimpleNamespace(params={"jaxpr": None, "lanes": 3}, invars=())
    with pytest.raises(UnknownLoop, match=r"does not say what a `scan` carries.*jaxpr, lanes"):
        scan_operands(unknown)


def test_what_a_scan_divides_by_is_made_positive() -> None:
    """The second moment of Adam, updated inside a scan: on 0.12 this ended in a KeyError."""

    def step(moment, rows):
        def body(moment, row):
            moment = 0.9 * moment + row * row
            return moment, (row / (jnp.sqrt(moment) + 1e-8)).sum()

        return jax.lax.scan(body, moment, rows)

    found = domains(jax.jit(step).trace(jnp.ones(3), jnp.ones((4, 3))))
    assert found == (Domain(positive=True), Domain())


def test_an_option_that_the_compiler_does_not_know_is_left_out(capfd) -> None:
    device = jax.devices()[0]
    options = (*quick_options("cpu"), ("xla_no_such_option", True))
    assert known(options, device) == quick_options("cpu")
    assert "`xla_no_such_option=True` is left out" in capfd.readouterr().err
    # With what is left a program compiles.
    left = dict(known(options, device))
    jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options=left)


def test_an_option_whose_value_is_refused_is_kept_for_the_real_program() -> None:
    """Only names that are not there are dropped: whatever else is wrong shall be told."""
    device = jax.devices()[0]
    wrong = (("xla_backend_optimization_level", "high"),)
    assert known(wrong, device) == wrong


def test_options_are_tried_once_per_kind_of_device() -> None:
    compiler_options._is_known.cache_clear()
    for device in jax.devices()[:4]:
        known(quick_options("cpu"), device)
    assert compiler_options._is_known.cache_info().misses == len(quick_options("cpu"))


def test_a_function_of_jax_without_a_name_is_answered_under_its_public_one(capfd) -> None:
    """`jax.process_count` is a cache without one: to answer for other devices ended in an error."""

    class Nameless:
        def __call__(self, backend=None):
            raise AssertionError("the target answers")

    with answering(V5E, list, in_meshes=False) as answers:
        assert _query("process_count", Nameless())() == V5E.num_hosts
    assert [question.partition(" in ")[0] for question in answers.asked] == ["jax.process_count()"]
