# RIGHT: vocab = 50257 = 29 * 1733 divides by no mesh axis: it stays whole, with that reason and the cure
# ("pad it to 50304"). The embedding is used twice (lookup and head), so its dims are ONE vocab and ONE embed class.
# Over embed with the batch whole (tp) the logits (8, 32, 50257) are summed over the devices: 12.9 M numbers; with
# the batch split too (fsdp) the weight is gathered for each of its two uses instead. Per-example keys (8,) are
# batch, not state. W (out, in) as in Equinox: the LAST dim is what goes in.
import jax
import jax.numpy as jnp
import numpy as np

table = jnp.asarray(np.random.RandomState(0).randn(50257, 64).astype(np.float32) * 0.02)


@jax.jit
def train_step(table, tokens, keys):
    def one(table, tokens, key):
        h = table[tokens] * jax.random.bernoulli(key, 0.9, (len(tokens), 64))
        logits = jax.nn.log_softmax(jnp.tanh(h) @ table.T)
        return -jnp.mean(jnp.take_along_axis(logits[:-1], tokens[1:, None], -1))

    loss, slope = jax.value_and_grad(
        lambda t: jnp.mean(jax.vmap(one, (None, 0, 0))(t, tokens, keys))
    )(table)
    return table - 0.1 * slope, loss


for i in range(12):
    keys = jax.random.split(jax.random.key(i), 8)
    table, loss = train_step(table, np.random.RandomState(i).randint(0, 50257, (8, 32)), keys)
print(float(loss))
