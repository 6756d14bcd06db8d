"""Rotary positions as complex numbers, and a mixing of positions by FFT."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, LENGTH = 16, 8


def build(mesh):
    def struct(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def rotated(x):
        angles = jnp.outer(jnp.arange(LENGTH), 0.1 ** jnp.arange(WIDTH // 2)).astype(jnp.float32)
        turns = jnp.exp(1j * angles.astype(jnp.complex64))
        pairs = x.reshape(*x.shape[:-1], WIDTH // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    def loss_of(w, x):
        mixed = jnp.fft.fft(rotated(x @ w), axis=1).real
        return jnp.mean(jnp.tanh(mixed) ** 2)

    def step(w, x):
        loss, grads = jax.value_and_grad(loss_of)(w, x)
        return w - 0.1 * grads, loss

    weights = struct((WIDTH, WIDTH), None, "tp")
    return jax.jit(step, donate_argnums=0), (weights, struct((8, LENGTH, WIDTH), "dp"))
