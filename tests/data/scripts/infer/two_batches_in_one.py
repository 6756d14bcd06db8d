# RIGHT: two parameter sets with an optimizer each; batch = 64, in the data and in the noise that the step draws
# itself. Real and fake rows are put end to end (128) and taken apart again: over dp that is an all-to-all each
# way, since contiguous blocks of 128 hold other rows than those of 64 + 64. Legal, priced; cure to tell: stack
# them, (2, 64, ...). 3136 = 7*7*64 with the channels last: tp over 3136 is no split of the 64 channels (784 per
# device is 12.25 pixels): the reshape gathers, so that class is fsdp only.
import jax
import jax.numpy as jnp
import numpy as np

gen = 0.1 * jax.random.normal(jax.random.key(0), (20, 3136))
disc = 0.1 * jax.random.normal(jax.random.key(1), (64, 1))
key = jax.random.PRNGKey(0)


@jax.jit
def update(key, gen, disc, real):
    key, one, two = jax.random.split(key, 3)
    draw = lambda key, gen: jnp.tanh(jax.random.normal(key, (len(real), 20)) @ gen).reshape(
        -1, 7, 7, 64
    )
    score = lambda disc, x: jnp.mean(x, (1, 2)) @ disc

    def disc_loss(disc):
        good, bad = jnp.split(score(disc, jnp.concatenate([real, draw(one, gen)])), 2)
        return jnp.mean(jax.nn.softplus(-good) + jax.nn.softplus(bad))

    gen_loss = lambda gen: jnp.mean(jax.nn.softplus(-score(disc, draw(two, gen))))
    return key, gen - 0.1 * jax.grad(gen_loss)(gen), disc - 0.1 * jax.grad(disc_loss)(disc)


for i in range(60):
    real = np.random.RandomState(i).randn(64, 7, 7, 64).astype(np.float32)
    key, gen, disc = update(key, gen, disc, real)
print(float(jnp.sum(disc)))
