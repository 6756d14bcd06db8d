# RIGHT: no argument is data: all are state (params, key). Batch is the class of the 128 rows that the step draws
# from `text`, an array of 110_130 numbers that it holds as a constant. dp needs a constraint on what is gathered
# (and must not split `text`); without it every device does all rows and dp:8 shows no gain. vocab 65 = 5 * 13
# is never split. The key (uint32[2]) is no data and is never split, though 2 divides by 2.
import jax
import jax.numpy as jnp
import numpy as np

text = jnp.asarray(np.random.RandomState(0).randint(0, 65, 110_130))
params = {
    "embed": 0.1 * jax.random.normal(jax.random.key(0), (65, 256)),
    "out": jnp.zeros((256, 65)),
}
key = jax.random.PRNGKey(0)


@jax.jit
def step(key, params):
    key, sub = jax.random.split(key)
    start = jax.random.randint(sub, (128, 1), 0, len(text) - 65)
    rows = jax.vmap(jax.lax.dynamic_slice, (None, 0, None))(text, start, (65,))

    def loss(p):
        logits = jax.nn.log_softmax(p["embed"][rows[:, :-1]] @ p["out"])
        return -jnp.mean(jnp.take_along_axis(logits, rows[:, 1:, None], -1))

    value, slopes = jax.value_and_grad(loss)(params)
    return key, jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes), value


for i in range(60):
    key, params, value = step(key, params)
print(float(value))
