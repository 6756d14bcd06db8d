"""Completes the sizes that a user gives: infers every -1, and which axes span granules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from automesh.errors import UsageError
from automesh.mesh.lazy_jax import jax_half
from automesh.mesh.shape import AnyShape, HybridMeshShape, MeshShape, as_integer, as_shape, as_sizes

_GRANULES = "granules (slices or nodes)"


def infer_mesh_shape(
    mesh_shape: Sequence[int], *, num_devices: int | None = None
) -> tuple[int, ...]:
    """Replaces the -1 in a plain mesh shape, as AXLearn's function of this name does.

    Args:
      mesh_shape: sizes of the axes; at most one is -1.
      num_devices: the product that the sizes must have. Default: for a shape with a -1, the number
        of devices that jax sees (this imports jax); a shape without one is then not checked.

    Returns:
      The sizes as a tuple, all positive.

    Raises:
      WrongType: no sequence of integers, or `num_devices` no integer.
      UsageError: zero, a negative size that is not -1, two -1, or sizes that do not multiply to
        `num_devices`.

    Example:
      >>> infer_mesh_shape((-1, 1, 8, 1), num_devices=32)
      (4, 1, 8, 1)
    """
    sizes = as_sizes(mesh_shape)
    if num_devices is None:
        if -1 not in sizes:
            return sizes
        num_devices = len(jax_half().attached_devices())
    hint = "leave `num_devices` out to have jax count"
    count = as_integer(num_devices, "`num_devices` must be an integer", hint=hint)
    if count < 1:
        raise UsageError(f"`num_devices` is {count}; it must be at least 1", hint=hint)
    return infer_sizes(sizes, count)


def infer_sizes(sizes: Sequence[int], total: int, *, what: str = "devices") -> tuple[int, ...]:
    """Replaces the -1, if there is one, so that the sizes multiply to `total`.

    Args:
      what: what `total` counts, for the error.

    Raises:
      UsageError: the sizes cannot multiply to `total`.

    Example:
      >>> infer_sizes((2, -1), 8)
      (2, 4)
    """
    given = as_sizes(sizes)
    known = math.prod(size for size in given if size != -1)
    if -1 not in given and known != total:
        raise UsageError(
            f"mesh sizes {given} multiply to {known}, but there are {total} {what}",
            hint="let one size be -1, or pass `devices=` with exactly the ones to use",
        )
    if total % known or total < known:
        raise UsageError(
            f"the -1 in mesh sizes {given} cannot be inferred: "
            f"{total} {what} is not a multiple of {known}",
            hint=f"the other sizes must multiply to a divisor of {total}",
        )
    return tuple(total // known if size == -1 else size for size in given)


def resolve_shape(shape: AnyShape, *, num_devices: int, num_granules: int = 1) -> HybridMeshShape:
    """Fills in every -1; of a plain shape, lets the leading axes span the granules.

    The first axis larger than 1 takes all granules if their number divides it (the rule of Loadax
    and AXLearn). If it divides their number instead, it is entirely between granules, and the next
    axis takes the rest of them: `spread_over_granules` recognizes such a shape.

    Args:
      shape: a `HybridMeshShape` or a sequence of sizes.
      num_devices: all devices.
      num_granules: slices or nodes among them, all of one size.

    Raises:
      UsageError: the sizes do not fit the devices, or no leading axes span the granules.

    Example:
      >>> resolve_shape((1, -1), num_devices=16, num_granules=2)
      HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(1, 2))
    """
    given = as_shape(shape)
    if isinstance(given, HybridMeshShape):
        inside = "devices in each granule (slice or node)" if num_granules > 1 else "devices"
        return HybridMeshShape(
            infer_sizes(given.ici_mesh_shape, num_devices // num_granules, what=inside),
            infer_sizes(given.dcn_mesh_shape, num_granules, what=_GRANULES),
        )
    sizes = infer_sizes(given, num_devices)
    dcn = _derived_dcn(sizes, num_granules)
    return HybridMeshShape(
        tuple(size // across for size, across in zip(sizes, dcn, strict=True)), dcn
    )


def spread_over_granules(shape: MeshShape, resolved: HybridMeshShape) -> tuple[int, ...]:
    """Returns the axes that automatically span granules, if they are more than one; else none.

    Example:
      >>> spread_over_granules((2, 32), resolve_shape((2, 32), num_devices=64, num_granules=8))
      (0, 1)
    """
    axes = tuple(axis for axis, size in enumerate(resolved.dcn_mesh_shape) if size > 1)
    return () if isinstance(shape, HybridMeshShape) or len(axes) < 2 else axes


def _derived_dcn(sizes: tuple[int, ...], num_granules: int) -> tuple[int, ...]:
    dcn = [1] * len(sizes)
    left = num_granules
    for axis, size in enumerate(sizes):
        across = left if size % left == 0 else size
        if left % across:
            raise UsageError(
                f"mesh {sizes} does not say which axes span the {num_granules} {_GRANULES}: axis "
                f"{axis}, of size {size}, is neither a multiple nor a divisor of {left}",
                hint="say it with a HybridMeshShape: ICI sizes and DCN sizes",
            )
        dcn[axis] = across
        left //= across
        if left == 1:
            break
    return tuple(dcn)
