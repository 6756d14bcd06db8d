"""A small language model: an embedding, layers of two products, and a head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from easydel.infra.base_state import EasyDeLState


class SmallConfig:
    gradient_checkpointing = ""
    lmhead_chunksize = None
    mesh = None
    explicit_mesh = None
    manual_mesh = None

    def __init__(self, **read):
        self.__dict__.update(read)

    def add_basic_configurations(self, **values):
        self.__dict__.update(values)

    def set_model_mesh(self, mesh):
        self.mesh = mesh

    def set_explicit_mesh(self, mesh):
        self.explicit_mesh = mesh

    def set_manual_mesh(self, mesh):
        self.manual_mesh = mesh


def auto_remat(layer, policy):
    """As in EasyDeL: the class is changed, once in a process."""
    if policy == "save_only_these_names":
        raise ValueError("save_names must be provided")
    if policy and not hasattr(layer.__call__, "is_rematerialized"):
        call = layer.__call__
        keep = getattr(jax.checkpoint_policies, policy)

        def rematerialized(self, hidden):
            graph, state = nnx.split(self)
            inner = jax.checkpoint(lambda s, h: call(nnx.merge(graph, s), h), policy=keep)
            return inner(state, hidden)

        rematerialized.is_rematerialized = True
        layer.__call__ = rematerialized
    return layer


class Layer(nnx.Module):
    def __init__(self, config, param_dtype):
        self.up = nnx.Param(jnp.ones((config.hidden_size, config.intermediate_size), param_dtype))
        self.down = nnx.Param(jnp.ones((config.intermediate_size, config.hidden_size), param_dtype))

    def __call__(self, hidden):
        return hidden + jnp.tanh(hidden @ self.up[...]) @ self.down[...]


class SmallForCausalLM(nnx.Module):
    def __init__(self, config, dtype, param_dtype, precision, rngs):
        del precision, rngs
        self.config, self.dtype, self.param_dtype = config, dtype, param_dtype
        layer = auto_remat(Layer, config.gradient_checkpointing)
        self.layers = nnx.List([layer(config, param_dtype) for _ in range(2)])
        self.embed = nnx.Param(jnp.ones((config.vocab_size, config.hidden_size), param_dtype))
        # A loader gives all weights one type.
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), jnp.float32))
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    @classmethod
    def lazy_init(cls, rngs, **given):
        return nnx.eval_shape(lambda: cls(rngs=None, **given))

    @property
    def mesh(self):
        return self.config.mesh

    def to_state(self):
        return EasyDeLState.create(self)

    def _get_partition_rules(self, rules):
        return rules or (
            ("up", PartitionSpec("fsdp", "tp")),
            ("down", PartitionSpec("tp", "fsdp")),
            ("embed", PartitionSpec("tp", "fsdp")),
        )

    def __call__(self, input_ids):
        hidden = (self.embed[...][input_ids] * self.scale[...]).astype(self.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden @ self.embed[...].T
