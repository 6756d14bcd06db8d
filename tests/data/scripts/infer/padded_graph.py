# RIGHT: classes: edges (64: senders, receivers, edge features), nodes (2**k + 1 = 33 rows: one row for padding),
# embed (128). Nodes divide by 3 and 11 only, so they stay whole; edges go over dp, and the sum into nodes
# is one all-reduce of (33, 128). There is NO batch dimension: graphs lie end to end, `n_node` (5) says
# where; dims of 5 and 33 must not be split. Splitting nodes is refused by jax ("not divisible").
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.RandomState(0)
w = jnp.asarray(rng.randn(128, 128).astype(np.float32) * 0.1)


@jax.jit
def train_step(w, nodes, senders, receivers, n_node):
    def loss(w):
        message = jnp.tanh(nodes[senders] @ w)
        nodes_after = jax.ops.segment_sum(message, receivers, nodes.shape[0])
        owner = jnp.repeat(jnp.arange(5), n_node, total_repeat_length=33)
        return jnp.mean(jax.ops.segment_sum(nodes_after, owner, 5) ** 2)

    value, slope = jax.value_and_grad(loss)(w)
    return w - 1e-4 * slope, value


for i in range(60):
    nodes = rng.randn(33, 128).astype(np.float32)
    w, value = train_step(
        w, nodes, rng.randint(0, 33, 64), rng.randint(0, 33, 64), np.array([8, 8, 8, 8, 1])
    )
print(float(value))
