# RIGHT: dp alone pays: batch (256) is dim 0 of the rows AND of every per-example gradient (256, 512, 32) inside the
# step: memory is 256 times the parameters unless batch is split; tp over 32 splits it as well, fsdp does not.
# Clipping needs the norm over ALL parameters of an example: under tp an all-reduce of 256 numbers.
# The counter is a python int that becomes int32[], the noise has the shape of the parameter and must be the same
# on every device that holds a copy. No loss is returned.
import itertools

import jax
import jax.numpy as jnp
import numpy as np

w = 0.05 * jax.random.normal(jax.random.key(0), (512, 32))
counter = itertools.count()


@jax.jit
def private_update(key, i, w, x):
    key = jax.random.fold_in(key, i)

    def clipped(row):
        slope = jax.grad(lambda w: jnp.mean((jnp.tanh(row @ w) - 1) ** 2))(w)
        return slope / jnp.maximum(jnp.linalg.norm(slope), 1)

    total = jax.vmap(clipped)(x).sum(0) + 0.1 * jax.random.normal(key, w.shape)
    return w - 0.1 * total / len(x)


for step in range(60):
    w = private_update(
        jax.random.key(0),
        next(counter),
        w,
        np.random.RandomState(step).randn(256, 512).astype(np.float32),
    )
print(float(jnp.sum(w)))
