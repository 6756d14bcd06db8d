"""A trainer and its step: two products, and a descent with momentum along their gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kauldron.utils.sharding_utils import sharding as shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    hidden: int = 512
    remat: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainStep:
    model: Any = None
    sharding: Any = None
    is_given: bool = False  # By the trainer; else said by the user.

    @functools.partial(
        jax.jit,
        static_argnames=("self", "return_losses", "checkify_error_categories"),
        donate_argnames=("state",),
    )
    def step(
        self,
        state,
        batch,
        *,
        return_losses=False,
        checkify_error_categories: frozenset = frozenset(),
    ):
        del checkify_error_categories

        def loss(params):
            def layer(params):
                return jnp.tanh(batch["rows"] @ params["up"]) @ params["down"]

            layer = jax.checkpoint(layer) if self.model.remat else layer
            return jnp.mean((layer(params) - batch["rows"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], gradients)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, state["params"], moments)
        state = {"step": state["step"] + 1, "params": params, "opt_state": moments}
        state = shardings.with_sharding_constraint(state, self.sharding.state)
        return state, {"loss": value if return_losses else None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    train_ds: Any
    seed: int = 0
    workdir: Any = None
    model: Any = dataclasses.field(default_factory=Model)
    sharding: Any = dataclasses.field(default_factory=lambda: shardings.ShardingStrategy())
    optimizer: Any = "momentum"
    checkify_error_categories: frozenset = frozenset()
    aux: Any = dataclasses.field(default_factory=dict)
    trainstep: Any = dataclasses.field(default_factory=TrainStep)

    def __post_init__(self):
        # As in Kauldron, what was put in from here is put in anew, and what was said stays.
        if self.trainstep.sharding is None or self.trainstep.is_given:
            step = TrainStep(model=self.model, sharding=self.sharding, is_given=True)
            object.__setattr__(self, "trainstep", step)

    def init_state(self, *, skip_transforms, element_spec):
        assert skip_transforms
        width, hidden = element_spec["rows"].shape[1], self.model.hidden
        params = {
            "up": jnp.full((width, hidden), 0.01, jnp.float32),
            "down": jnp.full((hidden, width), 0.01, jnp.float32),
        }
        state = {"step": jnp.asarray(0), "params": params}
        state["opt_state"] = jax.tree.map(jnp.zeros_like, params)
        return shardings.with_sharding_constraint(state, self.sharding.state)
