"""A generator and a discriminator, each with an optimizer, changed in one step (Linen)."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
LATENT, WIDTH, SIDE, BATCH = (256, 4096, 64, 64) if LARGE else (32, 128, 16, 32)


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.leaky_relu(nn.Dense(WIDTH)(z))
        x = nn.leaky_relu(nn.Dense(WIDTH)(x))
        x = nn.Dense(SIDE * SIDE * 3)(x)
        return jnp.tanh(x).reshape(-1, SIDE, SIDE, 3)


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        x = nn.leaky_relu(nn.Dense(WIDTH)(x), 0.2)
        x = nn.leaky_relu(nn.Dense(WIDTH)(x), 0.2)
        return nn.Dense(1)(x)


generator, discriminator = Generator(), Discriminator()
g_tx, d_tx = optax.adam(1e-4, b1=0.5), optax.adam(4e-4, b1=0.5)


@jax.jit
def train_step(g_params, d_params, g_opt, d_opt, images, rng):
    z = jax.random.normal(rng, (images.shape[0], LATENT))

    def d_loss(d_params):
        fake = generator.apply(g_params, z)
        real_score = discriminator.apply(d_params, images)
        fake_score = discriminator.apply(d_params, fake)
        return jnp.mean(jax.nn.relu(1 - real_score)) + jnp.mean(jax.nn.relu(1 + fake_score))

    def g_loss(g_params):
        return -jnp.mean(discriminator.apply(d_params, generator.apply(g_params, z)))

    d_value, d_grads = jax.value_and_grad(d_loss)(d_params)
    d_updates, d_opt = d_tx.update(d_grads, d_opt)
    g_value, g_grads = jax.value_and_grad(g_loss)(g_params)
    g_updates, g_opt = g_tx.update(g_grads, g_opt)
    g_params = optax.apply_updates(g_params, g_updates)
    d_params = optax.apply_updates(d_params, d_updates)
    return g_params, d_params, g_opt, d_opt, {"g": g_value, "d": d_value}


rng = jax.random.PRNGKey(0)
g_params = generator.init(rng, jnp.zeros((1, LATENT)))
d_params = discriminator.init(rng, jnp.zeros((1, SIDE, SIDE, 3)))
g_opt, d_opt = g_tx.init(g_params), d_tx.init(d_params)
for step in range(10):
    rng, key = jax.random.split(rng)
    images = np.random.default_rng(step).normal(size=(BATCH, SIDE, SIDE, 3)).astype(np.float32)
    g_params, d_params, g_opt, d_opt, losses = train_step(
        g_params, d_params, g_opt, d_opt, images, key
    )
print(losses)
