"""Where arrays lie on the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Dimension = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the activations of one example are split.

    Attributes:
      mesh: a mesh with the axes dp, fsdp, ep, tp and sp, in any order and of any sizes.
      rows: mesh axes that split the rows of a batch.
      sequence: mesh axis that splits each row along its length, or None.
      gathers: whether the step gathers weights over fsdp before it multiplies with them; otherwise
        that is left to the compiler, which may do it piece by piece while it multiplies.
    """

    mesh: Mesh | AbstractMesh
    rows: tuple[str, ...] = ("dp", "fsdp")
    sequence: str | None = "sp"
    gathers: bool = True

    def sharding(self, *dimensions: Dimension) -> NamedSharding:
        """The sharding that splits each dimension over the mesh axes named for it."""
        return NamedSharding(self.mesh, PartitionSpec(*dimensions))

    def pin(self, array: jax.Array, *dimensions: Dimension) -> jax.Array:
        """Has the compiler split `array` in this way at this point of the program."""
        return jax.lax.with_sharding_constraint(array, self.sharding(*dimensions))

    def gathered(self, weight: jax.Array, split: tuple[Dimension, ...]) -> jax.Array:
        """A weight that was split like `split`, gathered over fsdp if the step does that."""
        if not self.gathers:
            return weight
        return self.pin(weight, *(None if axis == "fsdp" else axis for axis in split))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One trained array before it exists.

    Attributes:
      shape: its dimensions; weights of the layers have the number of layers in front.
      split: for each dimension, the mesh axis that splits it at rest.
      scale: standard deviation of its initial values; 0 for the scale of a norm, which starts at 1.
    """

    shape: tuple[int, ...]
    split: tuple[Dimension, ...]
    scale: float

    def initial(self, generator: np.random.Generator) -> np.ndarray:
        if not self.scale:
            return np.ones(self.shape, np.float32)
        return np.float32(self.scale) * generator.standard_normal(self.shape, np.float32)
