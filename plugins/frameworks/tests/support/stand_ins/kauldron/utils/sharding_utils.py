"""Strategies: what is replicated, and what is split over all devices."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingStrategy:
    batch: Any = dataclasses.field(default_factory=lambda: sharding.FIRST_DIM)
    params: Any = dataclasses.field(default_factory=lambda: sharding.REPLICATED)
    opt_state: Any = None

    @property
    def state(self):
        return {"step": sharding.REPLICATED, "params": self.params, "opt_state": self.opt_state}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPSharding:
    """Splits the last dimension of what is large enough."""

    min_size_to_shard_mb: int = 4

    def __call__(self, tree):
        def place(leaf):
            is_small = leaf.size * leaf.dtype.itemsize <= self.min_size_to_shard_mb * 2**20
            axes = () if is_small else (*[None] * (leaf.ndim - 1), "devices")
            return NamedSharding(sharding.DEVICES_MESH, PartitionSpec(*axes))

        return jax.tree.map(place, tree)


class _Sharding:
    ShardingStrategy = ShardingStrategy
    FSDPSharding = FSDPSharding

    @functools.cached_property
    def DEVICES_MESH(self):
        return Mesh(np.asarray(jax.devices()), ("devices",))

    @functools.cached_property
    def REPLICATED(self):
        return NamedSharding(self.DEVICES_MESH, PartitionSpec())

    @functools.cached_property
    def FIRST_DIM(self):
        return NamedSharding(self.DEVICES_MESH, PartitionSpec("devices"))

    def with_sharding_constraint(self, tree, wanted):
        def place(to, part):
            if to is None:
                return part
            if callable(to):
                return self.with_sharding_constraint(part, to(part))
            leaves = jax.tree.leaves(part)
            if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
                return jax.tree.map(lambda leaf: leaf.update(sharding=to), part)
            return jax.lax.with_sharding_constraint(part, to)

        return jax.tree.map(place, wanted, tree, is_leaf=lambda one: one is None)


sharding = _Sharding()
