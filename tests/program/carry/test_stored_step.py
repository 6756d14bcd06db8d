"""Which errors of a step that is traced again are those of the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from automesh.program.carry.stored_step import is_indivisible


def test_what_jax_says_of_parts_that_do_not_come_out_even_is_known() -> None:
    mesh = AbstractMesh((2,), ("data",))
    halved = jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="divi") as caught:
        jax.eval_shape(halved, jnp.zeros(5))
    assert is_indivisible(caught.value)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        # Of a reshape of 640 columns to (5, 128), which is split over two devices.
        (ValueError("axis 1 is partitioned 2 times, but does not evenly divide 5"), True),
        (ValueError("jax.shard_map requires axis_names of the mesh"), False),
        (TypeError("127 does not divide"), False),
    ],
)
def test_other_errors_are_those_of_the_process(error: Exception, known: bool) -> None:
    assert is_indivisible(error) is known
