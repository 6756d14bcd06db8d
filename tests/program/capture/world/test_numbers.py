"""How many devices a script wants, by how it fails where it has others."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh.program.capture.world import told
from automesh.program.capture.world.numbers import note_wanted_devices

SHOWN = jax.device_count()
WANT = "automesh.program.capture.world.numbers.want_devices"
# What a check of a script says -> the number that it wants; 0: it says none.
CHECKS = {
    f"Number of devices {SHOWN} does not match the product of the parallelism 3": 3,
    f"Expected 3 devices, got {SHOWN}": 3,
    f"mesh (3, 5) does not fit {SHOWN} devices": 15,
    f"{SHOWN} devices: a batch of 5 rows cannot be split into 3": 0,
    f"needs 2.5 GiB on each of {SHOWN} devices": 0,
    f"a batch of 3 rows cannot be split into {SHOWN}": 0,
}


@pytest.mark.parametrize("text", CHECKS)
def test_the_one_other_number_beside_that_of_the_devices_is_wanted(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(WANT, lambda count, _: found.append(count))
    with pytest.raises(AssertionError) as raised:
        exec(compile(f"assert False, {text!r}", "/home/me/train.py", "exec"))
    note_wanted_devices(raised.value)
    assert found == ([CHECKS[text]] if CHECKS[text] else [])
    assert told.wanted_devices() == 0


def _put(split: NamedSharding, array: np.ndarray) -> None:
    jax.device_put(array, split)


def _mapped(split: NamedSharding, array: np.ndarray) -> None:
    jax.shard_map(jnp.sin, mesh=split.mesh, in_specs=split.spec, out_specs=split.spec)(array)


@pytest.mark.parametrize("size", [19, 60])
@pytest.mark.parametrize("use", [_put, _mapped])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_does_not_divide_an_array_wants_as_many_devices_as_do(
    axis_type: AxisType,
    use: Callable[[NamedSharding, np.ndarray], None],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sizes of the array were taken for those of a mesh: 19 x 64 devices."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(WANT, lambda count, what: found.append((count, what)))
    mesh = jax.make_mesh((SHOWN,), ("fsdp",), axis_types=(axis_type,))
    with pytest.raises(ValueError, match="evenly") as raised:
        use(NamedSharding(mesh, PartitionSpec("fsdp")), np.zeros((size, 64)))
    note_wanted_devices(raised.value)
    said = f"dimension 0 of an array ({size}, 64) is {size}, no multiple of {SHOWN} "
    count = math.gcd(size, SHOWN)
    assert [(number, what.startswith(said)) for number, what in found] == (
        [(count, True)] if count > 1 else []
    )
