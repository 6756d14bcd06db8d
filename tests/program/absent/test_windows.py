"""Where the compiler for TPUs cuts a product into a ring: what `cost.windowed` takes from it."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.cost.windowed import LARGEST_RING
from automesh.hardware import parse_target
from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.compilers import absent_devices_of
from automesh.program.absent.client import devices_of

pytestmark = pytest.mark.tpu
_SIDE = 512


@cache
def mesh_of(name: str) -> Mesh:
    absent = parse_target(name, os.environ).absent
    assert absent is not None
    return Mesh(np.array(devices_of(absent_devices_of(absent))), ("fsdp",))


def is_ring(name: str, rows: int) -> bool:
    """Whether a bf16 product with a gathered weight is windowed, with so many rows a device."""
    mesh = mesh_of(name)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

    def product(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("fsdp")))

    shapes = array(rows * mesh.size, _SIDE), array(_SIDE, _SIDE)
    text = jax.jit(product).lower(*shapes).compile().as_text()
    return re.search(r"collective-permute(-start)?\(", text) is not None


@pytest.mark.parametrize(
    "name", ["v5e:2x4", "v5e:4x4", "v6e:4x4", "v5p:2x2x4", "v4:2x2x4", "7x:2x2x4"]
)
def test_a_ring_begins_where_the_table_says(name: str) -> None:
    absent = parse_target(name, os.environ).absent
    assert absent is not None
    # An element of two bytes makes as many FLOPs for each byte as there are rows.
    least = engines_of(absent.fabric.chip).window_flops_per_byte / mesh_of(name).size
    assert not is_ring(name, int(0.95 * least))
    assert is_ring(name, int(1.05 * least))


def test_large_rings_are_none() -> None:
    assert is_ring("v5e:4x8", 4096)
    assert mesh_of("v5e:4x8").size == LARGEST_RING
    assert not is_ring("v5e:8x8", 4096)
