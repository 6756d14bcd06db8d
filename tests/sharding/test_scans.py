"""Running sums, as every platform lowers them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.program.script.build import build_on
from automesh.sharding.programs import Programs
from automesh.sharding.propagate import propagate

RUNNING = {
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "of whole numbers": lambda x: jnp.cumsum(x.astype(jnp.int32), axis=1),
    "cumprod": lambda x: jnp.cumprod(x, axis=1),
    "cummax": lambda x: lax.cummax(x, axis=1),
    "cummin, backwards": lambda x: lax.cummin(x, axis=1, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=1),
    "associative": lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("name", RUNNING)
def test_running_reductions_are_no_loops_of_unknown_length(name: str, platform: str) -> None:
    """Before, a step with `cumsum` had work that was not counted on GPUs of jax 0.12."""

    def build(mesh: Any) -> Any:
        x = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
        return jax.jit(lambda x: jnp.sum(RUNNING[name](x))), (x,)

    programs = Programs(
        build=lambda mesh: build_on(build, mesh), axis_names=("dp",), platform=platform
    )
    terms = propagate(programs, sizes=(("dp", 8),), probes=(), enter=lambda _: None).terms
    assert [one for one in terms.uncounted if "loop" in one.what] == []
    assert [region.name for region in terms.regions] == ["step"]
