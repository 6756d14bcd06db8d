# RIGHT: classes: rows (4096, the data set), pixel (784), batch (32: the slice INSIDE the loop, in no argument).
# State: w and its velocity, a flat list of pairs without names. dp puts a constraint P("dp") on the slice and
# leaves `rows` whole. Splitting `rows` by dp (the obvious "first dimension of the data") gathers all of it for
# every slice; leaving all whole without a constraint makes every device do all the work.
# No loss comes out: numerics are compared by the state. One call is 128 steps of training: say so.
import jax
import jax.numpy as jnp
import numpy as np

rows = jnp.asarray(np.random.RandomState(0).rand(4096, 784).astype(np.float32))
state = [(0.01 * jax.random.normal(jax.random.key(0), (784, 512)), jnp.zeros((784, 512)))]


@jax.jit
def run_epoch(key, state, rows):
    def turn(i, state):
        x = jax.random.bernoulli(
            jax.random.fold_in(key, i), jax.lax.dynamic_slice_in_dim(rows, i * 32, 32)
        )
        (w, velocity) = state[0]
        slope = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2))(w)
        velocity = 0.9 * velocity + slope
        return [(w - 0.1 * velocity, velocity)]

    return jax.lax.fori_loop(0, 128, turn, state)


for epoch in range(8):
    state = run_epoch(jax.random.key(epoch), state, rows)
print(float(jnp.sum(state[0][0])))
