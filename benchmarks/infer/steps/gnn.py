"""Graph network on packed graphs: edge and node updates, pooled for each graph."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
NODES, EDGES, GRAPHS, WIDTH, LAYERS = (8192, 131072, 64, 512, 4) if LARGE else (256, 1024, 8, 32, 2)


def mlp_init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:])
    ]


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


key = jax.random.PRNGKey(42)
params = {
    "node_encoder": mlp_init(key, [16, WIDTH]),
    "edge_encoder": mlp_init(key, [4, WIDTH]),
    "layers": [
        {
            "edge": mlp_init(k, [3 * WIDTH, 2 * WIDTH, WIDTH]),
            "node": mlp_init(k, [2 * WIDTH, 2 * WIDTH, WIDTH]),
        }
        for k in jax.random.split(key, LAYERS)
    ],
    "readout": mlp_init(key, [WIDTH, WIDTH, 1]),
}


def predict(params, graph):
    nodes = mlp(params["node_encoder"], graph["nodes"])
    edges = mlp(params["edge_encoder"], graph["edges"])
    for layer in params["layers"]:
        inputs = jnp.concatenate([edges, nodes[graph["senders"]], nodes[graph["receivers"]]], -1)
        edges = edges + mlp(layer["edge"], inputs)
        gathered = jax.ops.segment_sum(edges, graph["receivers"], num_segments=NODES)
        nodes = nodes + mlp(layer["node"], jnp.concatenate([nodes, gathered], -1))
    pooled = jax.ops.segment_sum(nodes, graph["graph_of_node"], num_segments=GRAPHS)
    return mlp(params["readout"], pooled)[:, 0]


optimizer = optax.adam(1e-3)
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, graph):
    def loss(params):
        return jnp.mean(jnp.square(predict(params, graph) - graph["labels"]))

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


rng = np.random.default_rng(0)
for step in range(10):
    graph = {
        "nodes": rng.normal(size=(NODES, 16)).astype(np.float32),
        "edges": rng.normal(size=(EDGES, 4)).astype(np.float32),
        "senders": rng.integers(0, NODES, EDGES),
        "receivers": rng.integers(0, NODES, EDGES),
        "graph_of_node": np.sort(rng.integers(0, GRAPHS, NODES)),
        "labels": rng.normal(size=GRAPHS).astype(np.float32),
    }
    params, opt_state, loss = train_step(params, opt_state, graph)
print(float(loss))
