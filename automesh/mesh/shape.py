"""`HybridMeshShape`: sizes over ICI and over DCN, and how a `-1` in them is inferred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from automesh.errors import UsageError


@dataclass(frozen=True, slots=True)
class HybridMeshShape:
    """Sizes of every mesh axis inside a granule (slice or node) and between granules.

    Attributes:
      ici_mesh_shape: devices along each axis inside one granule; at most one -1.
      dcn_mesh_shape: granules along each axis; at most one -1.

    Raises:
      UsageError: the two differ in length, or a size is neither positive nor the only -1.
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        # Lists are taken too, and must equal and hash like tuples.
        object.__setattr__(self, "ici_mesh_shape", tuple(self.ici_mesh_shape))
        object.__setattr__(self, "dcn_mesh_shape", tuple(self.dcn_mesh_shape))
        if len(self.ici_mesh_shape) != len(self.dcn_mesh_shape):
            raise UsageError(
                "a hybrid mesh shape needs as many ICI sizes as DCN sizes, "
                f"got {self.ici_mesh_shape} and {self.dcn_mesh_shape}"
            )
        check_sizes(self.ici_mesh_shape)
        check_sizes(self.dcn_mesh_shape)

    def __len__(self) -> int:
        return len(self.ici_mesh_shape)


MeshShape = HybridMeshShape | tuple[int, ...]


def check_sizes(sizes: Sequence[int]) -> None:
    """Accepts positive integers and at most one -1.

    Raises:
      UsageError: anything else.
    """
    wrong = [size for size in sizes if isinstance(size, bool) or (size < 1 and size != -1)]
    if wrong:
        raise UsageError(f"mesh size {wrong[0]} in {tuple(sizes)} is neither positive nor -1")
    if list(sizes).count(-1) > 1:
        raise UsageError(
            f"mesh sizes {tuple(sizes)} hold more than one -1; at most one is inferred"
        )


def infer_sizes(sizes: Sequence[int], total: int, *, what: str = "devices") -> tuple[int, ...]:
    """Replaces the -1, if there is one, so that the sizes multiply to `total`.

    Args:
      what: what `total` counts, for the error.

    Raises:
      UsageError: the sizes cannot multiply to `total`.

    >>> infer_sizes((2, -1), 8)
    (2, 4)
    """
    check_sizes(sizes)
    known = math.prod(size for size in sizes if size != -1)
    if -1 not in sizes and known != total:
        raise UsageError(
            f"mesh sizes {tuple(sizes)} multiply to {known}, but there are {total} {what}",
            hint="let one size be -1, or pass `devices=` with exactly the ones to use",
        )
    if total % known:
        raise UsageError(
            f"the -1 in mesh sizes {tuple(sizes)} cannot be inferred: "
            f"{total} {what} is not a multiple of {known}"
        )
    return tuple(total // known if size == -1 else size for size in sizes)


def resolve_shape(shape: MeshShape, *, num_devices: int, num_granules: int = 1) -> HybridMeshShape:
    """Fills in every -1; of a plain shape, lets the first axis larger than 1 span the granules.

    Args:
      num_devices: all devices.
      num_granules: slices or nodes among them, all of one size.

    Raises:
      UsageError: the sizes do not fit the devices, or the first axis larger than 1 is not a
        multiple of the number of granules.

    >>> resolve_shape((1, -1), num_devices=16, num_granules=2)
    HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(1, 2))
    """
    if isinstance(shape, HybridMeshShape):
        inside = "devices in each granule (slice or node)" if num_granules > 1 else "devices"
        return HybridMeshShape(
            infer_sizes(shape.ici_mesh_shape, num_devices // num_granules, what=inside),
            infer_sizes(shape.dcn_mesh_shape, num_granules, what="granules (slices or nodes)"),
        )
    sizes = infer_sizes(shape, num_devices)
    dcn = [1] * len(sizes)
    ici = list(sizes)
    if num_granules > 1:
        first = next(axis for axis, size in enumerate(sizes) if size > 1)
        if sizes[first] % num_granules:
            raise UsageError(
                f"the first axis larger than 1 of mesh {sizes} has size {sizes[first]}, "
                f"which {num_granules} granules (slices or nodes) do not divide",
                hint="say with a HybridMeshShape which axes span the granules",
            )
        dcn[first] = num_granules
        ici[first] //= num_granules
    return HybridMeshShape(tuple(ici), tuple(dcn))
