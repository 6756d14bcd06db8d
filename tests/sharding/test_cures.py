"""Cures that are tried in a lowered copy: the finding is gone, and less memory is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.breakdown import peak_of
from automesh.cost.terms import Cure, Footprint, Terms
from automesh.ir.findings.variants import paths, variants
from automesh.program.refused import StepRefused
from automesh.program.script.build import build_on
from automesh.sharding.cures import CURES
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate
from tests.sharding.test_findings import AXES, accumulating, array, descend, layer

MIB = 1 << 20
Build = Callable[[Any], Any]


def undonated(mesh: Any) -> Any:
    return descend(layer, mesh, array(mesh, (512, 1024), "fsdp"), array(mesh, (32, 512), "fsdp"),
                   donate_argnums=())  # fmt: skip


def resplit(mesh: Any) -> Any:
    """The momentum goes in whole and comes back split."""

    def step(state: Any, x: Any) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(layer)(w, x)
        return (w - 0.1 * m, m), 0.0

    state = array(mesh, (1024, 1024)), array(mesh, (1024, 1024), "fsdp")
    return jax.jit(step, donate_argnums=0), (state, array(mesh, (32, 1024), "fsdp"))


def whole_moment(mesh: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(layer)(w, x)
        return (w - 0.1 * m, m), 0.0

    state = array(mesh, (512, 1024), "fsdp"), array(mesh, (512, 1024))
    kept = jax.tree.map(lambda one: one.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (state, array(mesh, (32, 512), "fsdp"))


def layers(mesh: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)
        return jnp.mean(y**2)

    return descend(loss, mesh, array(mesh, (4, 512, 512), "fsdp"), array(mesh, (32, 512), "fsdp"))


def moved_twice(mesh: Any) -> Any:
    first = NamedSharding(mesh, P("tp", None, "dp"))
    second = NamedSharding(mesh, P(None, ("dp", "tp"), None))

    def loss(w: Any, a: Any) -> Any:
        d = jax.lax.with_sharding_constraint(jnp.tanh(a * w), first)
        return jnp.mean(jax.lax.with_sharding_constraint(d, second) ** 2)

    batch = array(mesh, (32, 256, 256), "tp", None, "dp")
    return descend(loss, mesh, array(mesh, (256,), "dp"), batch)


def narrowed(mesh: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        return (w - 0.1 * jax.grad(layer)(w, x)).astype(jnp.bfloat16), 0.0

    return jax.jit(step, donate_argnums=0), (
        array(mesh, (1024, 2048), "fsdp"),
        array(mesh, (32, 1024), "fsdp"),
    )


def added_whole(mesh: Any) -> Any:
    w, x = array(mesh, (512, 1024), "fsdp"), array(mesh, (4, 16, 512), None, "fsdp")
    whole = NamedSharding(mesh, P())

    def step(w: Any, x: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            g = total + jax.grad(layer)(w, part)
            return jax.lax.with_sharding_constraint(g, whole), None

        first = jax.lax.with_sharding_constraint(jnp.zeros((512, 1024)), whole)
        return w - 0.1 * jax.lax.scan(body, first, x)[0]

    return jax.jit(step, donate_argnums=0), (w, x)


CASES: dict[str, tuple[Build, str, tuple[tuple[str, int], ...]]] = {
    "donate": (undonated, "undonated-state", (("fsdp", 2),)),
    "return-as-given": (resplit, "second-compile", (("fsdp", 4),)),
    "split-like": (whole_moment, "replicated-state", (("fsdp", 4),)),
    "split-like a stack": (layers, "layer-split-stack", (("fsdp", 4),)),
    "hops": (moved_twice, "full-rematerialization", (("dp", 4), ("tp", 2))),
    "interleave": (
        lambda mesh: accumulating(mesh, interleaved=False),
        "microbatch-reshape",
        (("dp", 8),),
    ),
    "convert-back": (narrowed, "state-changes-type", (("fsdp", 2),)),
    "constrain-carried": (added_whole, "replicated-gradient", (("fsdp", 4),)),
}


def terms_of(build: Build, sizes: tuple[tuple[str, int], ...], cure: Cure | None = None) -> Terms:
    programs = Programs(build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform="tpu")
    return propagate(programs, sizes=sizes, probes=(), enter=lambda _: None, cure=cure).terms


def memory_of(terms: Terms, sizes: tuple[tuple[str, int], ...]) -> float:
    settled = Footprint(
        points=terms.points,
        argument_bytes=terms.argument_bytes,
        output_bytes=terms.output_bytes,
        alias_bytes=terms.alias_bytes,
    )
    return max(peak_of(one, dict(sizes)) for one in (settled, terms.first) if one is not None)


@pytest.mark.parametrize("name", CASES)
def test_a_cure_removes_its_finding_and_saves_memory(name: str) -> None:
    build, rule, sizes = CASES[name]
    before = terms_of(build, sizes)
    # A backward pass that moves it the other way is a finding of its own, at another line.
    found = next(one for one in before.findings if one.rule == rule)
    cure = found.cure
    assert cure is not None and cure.kind == name.split()[0]
    cure = next(variants(cure))
    after = terms_of(build, sizes, cure)
    assert (rule, found.source) not in [(one.rule, one.source) for one in after.findings]
    assert memory_of(after, sizes) <= memory_of(before, sizes)
    if name not in ("return-as-given",):  # It keeps what the first step had.
        assert memory_of(after, sizes) < memory_of(before, sizes) - MIB / 4


def test_every_cure_is_tried() -> None:
    assert {name.split()[0] for name in CASES} == set(CURES)


def test_a_cure_without_a_place_says_so() -> None:
    cure = Cure(kind="interleave", shape=(7, 7), source="train.py:1")
    with pytest.raises(StepRefused, match="no place"):
        terms_of(undonated, (("fsdp", 2),), cure)


def test_ways_of_single_moves() -> None:
    assert paths((("a",), ()), ((), ("a",))) == ()  # One move does it.
    assert paths((("a",), ("b",)), (("b",), ("a",)))  # Round a third place, or gathered once.
