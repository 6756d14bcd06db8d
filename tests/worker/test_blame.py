"""Words for what went wrong in a worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.outcomes import Failed
from automesh.worker.blame import failure


def test_what_jax_says_of_an_indivisible_array_is_said_without_its_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "tp"))
    with pytest.raises(ValueError, match="full shape") as caught:
        jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((2, 6), jnp.float32, sharding=sharding))
    outcome = failure(caught.value, stage="lower", function="build", limit_bytes=0)
    assert isinstance(outcome, Failed)
    assert outcome.reason == (
        "lowering the step raised IndivisibleError: dimension 1 of an array (2, 6) is 6, "
        "no multiple of 4 (4 or 8 would do)"
    )
