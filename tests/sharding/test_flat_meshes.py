"""Steps that also name a mesh of one axis over all devices, and the same steps on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.terms import Terms
from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

AXES = ("dp", "tp")


def terms_of(build: Callable[..., Any], platform: str) -> Terms:
    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=AXES, platform=platform
    )
    sizes = (("dp", 4), ("tp", 2))
    return propagate(programs, sizes=sizes, probes=(), enter=lambda _: None).terms


def flat_of(mesh: Any) -> tuple[Mesh, Any]:
    """A second mesh of the same devices, and the spec entry for its only axis."""
    return Mesh(mesh.devices.reshape(-1), ("all",)), "all"


def same_of(mesh: Any) -> tuple[Mesh, Any]:
    return mesh, AXES


def zero(mesh: Any, over_all: Callable[[Any], tuple[Mesh, Any]]) -> Any:
    """Moments split over all devices, weights over `tp`."""
    flat, axis = over_all(mesh)

    def step(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        m = 0.9 * m + jax.lax.with_sharding_constraint(g, NamedSharding(flat, P(axis)))
        return jax.lax.with_sharding_constraint(w - m, NamedSharding(mesh, P(None, "tp"))), m

    def array(on: Mesh, shape: tuple[int, ...], *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, P(*spec)))

    arguments = (
        array(mesh, (256, 512), None, "tp"),
        array(flat, (256, 512), axis),
        array(mesh, (64, 256), "dp"),
    )
    return jax.jit(step, donate_argnums=(0, 1)), arguments


def mapped(mesh: Any, over_all: Callable[[Any], tuple[Mesh, Any]]) -> Any:
    """A sum over all devices in `shard_map`."""
    flat, axis = over_all(mesh)

    def step(w: Any, x: Any) -> Any:
        y = x @ w
        summed = jax.shard_map(
            lambda part: jax.lax.psum(part.sum(0), axis), mesh=flat, in_specs=P(axis), out_specs=P()
        )(y)
        return w - 0.1 * jnp.outer(x[0], summed), summed

    w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    return jax.jit(step, donate_argnums=0), (w, x)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("step", [zero, mapped])
def test_the_axis_of_a_flat_mesh_stands_for_all_axes(
    step: Callable[..., Any], platform: str
) -> None:
    """Estimates failed with KeyError: 'all'."""

    def without_places(terms: Terms) -> Terms:
        return replace(terms, findings=())

    one = without_places(terms_of(lambda mesh: step(mesh, same_of), platform))
    flat = without_places(terms_of(lambda mesh: step(mesh, flat_of), platform))
    assert one.collectives
    assert flat == one
