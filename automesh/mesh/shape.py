"""`HybridMeshShape`: sizes over ICI and over DCN."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from automesh.errors import UsageError, WrongType, kind_of


@dataclass(frozen=True, slots=True)
class HybridMeshShape:
    """Sizes of every mesh axis inside a granule (slice or node) and between granules.

    The size of an axis in the whole mesh is the product of the two. The class and its two
    arguments are those of Loadax and AXLearn; lists and tuples are equal here.

    Attributes:
      ici_mesh_shape: devices along each axis inside one granule; at most one -1.
      dcn_mesh_shape: granules along each axis; at most one -1.

    Raises:
      WrongType: one of the two is no sequence of integers.
      UsageError: the two differ in length, or a size is neither positive nor the only -1.

    Example:
      Fully sharded on the 4 chips of a v4-8; two nodes of 8 GPUs, data parallel between them:

      >>> HybridMeshShape(ici_mesh_shape=(1, 4), dcn_mesh_shape=(1, 1))
      HybridMeshShape(ici_mesh_shape=(1, 4), dcn_mesh_shape=(1, 1))
      >>> len(HybridMeshShape([1, 8], [2, 1]))
      2
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

    if TYPE_CHECKING:  # More types are accepted than stored.

        def __init__(
            self, ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int]
        ) -> None: ...

    def __post_init__(self) -> None:
        # Lists are accepted, too, and must be equal to tuples and hash like them.
        object.__setattr__(self, "ici_mesh_shape", as_sizes(self.ici_mesh_shape, "the ICI shape"))
        object.__setattr__(self, "dcn_mesh_shape", as_sizes(self.dcn_mesh_shape, "the DCN shape"))
        if len(self.ici_mesh_shape) != len(self.dcn_mesh_shape):
            raise UsageError(
                "a hybrid mesh shape needs as many ICI sizes as DCN sizes, "
                f"got {self.ici_mesh_shape} and {self.dcn_mesh_shape}",
                hint="give every axis a size in both; 1 where it has no part",
            )

    def __len__(self) -> int:
        return len(self.ici_mesh_shape)


MeshShape = HybridMeshShape | tuple[int, ...]
"""The shape of a mesh as it is stored."""
AnyShape = HybridMeshShape | Sequence[int]
"""The shape of a mesh as people write it; missing DCN sizes are derived."""


def as_shape(shape: object, what: str = "the mesh shape") -> MeshShape:
    """Returns a hybrid shape as it is, any other sequence of sizes as a tuple.

    Args:
      what: what the shape is of, for the error.

    Raises:
      WrongType: it is neither.
      UsageError: see `as_sizes`.
    """
    return shape if isinstance(shape, HybridMeshShape) else as_sizes(shape, what)


def as_sizes(sizes: object, what: str = "the mesh shape") -> tuple[int, ...]:
    """Checks sizes (positive integers and at most one -1), and makes them a tuple.

    Args:
      sizes: any sequence of integers (numpy's too, and its arrays), not a string.
      what: name of the sizes, for the error.

    Raises:
      WrongType: no sequence of integers.
      UsageError: zero, a negative size that is not -1, or more than one -1.

    Example:
      >>> as_sizes([2, -1])
      (2, -1)
    """
    if not isinstance(sizes, str | Sequence) and hasattr(sizes, "tolist"):
        sizes = cast("Any", sizes).tolist()  # A numpy array.
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise WrongType(
            f"{what} must be a sequence of integers, got {kind_of(sizes)}: {sizes!r}",
            hint="write for example `(2, 4)`, or a HybridMeshShape where granules count",
        )
    read = tuple(_as_size(size, what, sizes) for size in cast("Sequence[Any]", sizes))
    wrong = [size for size in read if size < 1 and size != -1]
    if wrong:
        raise UsageError(
            f"mesh size {wrong[0]} in {read} is neither positive nor -1",
            hint="an axis that is not used has the size 1; one size may be -1, to be inferred",
        )
    if read.count(-1) > 1:
        raise UsageError(
            f"mesh sizes {read} hold more than one -1; at most one is inferred",
            hint="give all sizes but one",
        )
    return read


def as_integer(number: object, what: str, *, hint: str, where: str = "") -> int:
    """Checks an integer, also numpy's; a bool is none.

    Args:
      what: beginning of the error: `` `num_devices` must be an integer``.
      where: place of the number, for the end of the error.

    Raises:
      WrongType: something else.

    Example:
      >>> as_integer(8, "a size must be an integer", hint="")
      8
    """
    if not isinstance(number, bool):
        try:
            return operator.index(cast("Any", number))
        except TypeError:
            pass
    raise WrongType(f"{what}, got {kind_of(number)}: {number!r}{where}", hint=hint)


def _as_size(size: object, what: str, sizes: object) -> int:
    return as_integer(
        size,
        f"the sizes of {what} must be integers",
        hint="write for example `(2, 4)`",
        where=f" in {sizes!r}",
    )
