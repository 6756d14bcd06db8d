"""Computes the part of a mesh on one host (jax, to count the hosts)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from automesh.errors import UsageError
from automesh.mesh.shape import as_integer, as_sizes


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int],
    total_devices: int | None = None,
    num_processes: int | None = None,
) -> tuple[int, ...]:
    """Computes each host's mesh shape: divides axes by the hosts along them, leading axes first.

    An axis takes the greatest common divisor of its size and the number of remaining hosts. That
    finds a shape whenever there is one: an axis takes each prime factor of the hosts as often as it
    can, so that one remains only if the axes together have too few. (Semantics of eformer's
    function of the same name, whose floor division misses shapes such as 3 x 8 on 4 hosts of 6.)

    Args:
      global_mesh_shape: sizes of all axes over all hosts, positive.
      total_devices: devices of each host; default: `jax.local_device_count()`.
      num_processes: hosts; default: `jax.process_count()`.

    Returns:
      A size for each axis; they multiply to `total_devices`.

    Raises:
      UsageError: the sizes do not multiply to `total_devices * num_processes`, or a number is not
        positive.

    Example:
      >>> calculate_host_mesh_shape((2, 4), total_devices=4, num_processes=2)
      (1, 4)
      >>> calculate_host_mesh_shape((3, 8), total_devices=6, num_processes=4)
      (3, 2)
    """
    each = _count(
        jax.local_device_count() if total_devices is None else total_devices, "total_devices"
    )
    hosts = _count(jax.process_count() if num_processes is None else num_processes, "num_processes")
    shape = as_sizes(global_mesh_shape, "`global_mesh_shape`")
    if -1 in shape:
        raise UsageError(
            f"`global_mesh_shape` {shape} holds a -1; sizes must be positive here",
            hint="infer the -1 first: a host's part of it depends on it",
        )
    if math.prod(shape) != each * hosts:
        raise UsageError(
            f"`global_mesh_shape` {shape} has {math.prod(shape)} places, but there are "
            f"{each * hosts} devices ({each} on each of {hosts} hosts)",
            hint="the sizes must multiply to `total_devices * num_processes`",
        )
    return _divided(shape, hosts)


def _count(value: object, name: str) -> int:
    hint = f"leave `{name}` out to have jax count"
    count = as_integer(value, f"`{name}` must be an integer", hint=hint)
    if count < 1:
        raise UsageError(f"`{name}` is {count}; it must be at least 1", hint=hint)
    return count


def _divided(shape: Sequence[int], hosts: int) -> tuple[int, ...]:
    inside: list[int] = []
    for size in shape:
        along = math.gcd(size, hosts)
        hosts //= along
        inside.append(size // along)
    return tuple(inside)
