"""The loss, before which the processes agree on what they take for it."""

import os

import jax.numpy as jnp


def multihost_allgather_sync(value, **_):
    raise RuntimeError("there are no other processes")


def loss_of(rows, weight):
    assert os.environ["LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS"] == "0", "it would compile and run"
    assert multihost_allgather_sync({"block": 64}) == [{"block": 64}]
    return jnp.mean(rows**2, axis=-1) * weight
