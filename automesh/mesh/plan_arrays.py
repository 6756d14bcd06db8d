"""The axis sizes of many plans as arrays (numpy, no jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.mesh.axes import MeshAxis, Plan

Sizes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Meshes of the same axes.

    Attributes:
      names: of the axes, in order.
      ici, dcn: [meshes, axes]; sizes inside a granule and between granules.
    """

    names: tuple[str, ...]
    ici: Sizes
    dcn: Sizes

    def __len__(self) -> int:
        return len(self.ici)

    @property
    def sizes(self) -> Sizes:
        """[meshes, axes]: `ici * dcn`."""
        return self.ici * self.dcn

    def mesh(self, row: int) -> tuple[MeshAxis, ...]:
        """Returns the axes of one mesh."""
        return tuple(
            MeshAxis(name=name, ici=int(ici), dcn=int(dcn))
            for name, ici, dcn in zip(self.names, self.ici[row], self.dcn[row], strict=True)
        )


def batch_of(plans: Sequence[Plan]) -> Batch:
    """Makes a batch of the meshes of plans, in their order, without knobs."""
    names = tuple(axis.name for axis in plans[0].axes) if plans else ()
    shape = (len(plans), len(names))
    ici = np.array([[axis.ici for axis in plan.axes] for plan in plans], np.int64).reshape(shape)
    dcn = np.array([[axis.dcn for axis in plan.axes] for plan in plans], np.int64).reshape(shape)
    return Batch(names=names, ici=ici, dcn=dcn)
