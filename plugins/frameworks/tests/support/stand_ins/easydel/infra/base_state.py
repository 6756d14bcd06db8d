"""The state of a training."""

import re

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec


class EasyDeLState(flax.struct.PyTreeNode):
    step: object
    graphdef: object = flax.struct.field(pytree_node=False)
    graphstate: object
    graphother: object
    tx: object = flax.struct.field(pytree_node=False, default=None)
    opt_state: object = None

    @classmethod
    def create(cls, model):
        if "ejit" in str(jax.config.jax_compilation_cache_dir):
            raise AssertionError("small programs of the process would be kept with EasyDeL's")
        graphdef, graphstate, graphother = nnx.split(model, nnx.Param, ...)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), graphother)
        return cls(step=0, graphdef=graphdef, graphstate=graphstate, graphother=zeros)

    @property
    def model(self):
        return nnx.merge(self.graphdef, self.graphstate, self.graphother)

    @property
    def shardings(self):
        return jax.tree.map(lambda leaf: leaf.sharding, self)

    def merge(self, tree):
        return nnx.merge(self.graphdef, tree, self.graphother)

    def apply_gradients(self, grads):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.graphstate)
        graphstate = optax.apply_updates(self.graphstate, updates)
        return self.replace(step=self.step + 1, graphstate=graphstate, opt_state=opt_state)

    def shard_state(self, partition_rules, mesh):
        def put(path, leaf):
            name = jax.tree_util.keystr(path)
            rules = [spec for rule, spec in partition_rules if re.search(rule, name)]
            spec = rules[0] if rules and leaf.ndim else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(put, self)
