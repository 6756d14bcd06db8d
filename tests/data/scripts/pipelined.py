"""Four layers, trained as a pipeline where the mesh has one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh
from automesh import pipeline

LAYERS, WIDTH, ROWS = 4, 16, 32
OPTIMIZER = optax.adam(1e-2)


def initial() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)
    ]


def rows() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)


def loss(params, batch, *, stages=1):
    x = batch
    for number, w in enumerate(params):
        if number and number % (LAYERS // stages) == 0:
            x = pipeline.stage_boundary(x)
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch) ** 2)


def build(mesh, microbatches=4, schedule="1f1b", with_init=True):
    stages = mesh.shape["pp"]
    parts = pipeline.MpmdMesh(mesh).abstract_mesh if stages > 1 else mesh
    like = jax.ShapeDtypeStruct(
        (WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(parts, P(None, "tp"))
    )
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(parts, P("dp")))
    params = [like] * LAYERS
    facts = {"num_layers": LAYERS, "batch": ROWS}
    if stages > 1:
        step = pipeline.train_step(
            lambda params, batch: loss(params, batch, stages=stages),
            optimizer=OPTIMIZER,
            mesh=mesh,
            schedule=schedule,
            num_microbatches=microbatches,
        )

        def start(_):
            step.compile(params, batch)
            return step.init(initial(), batch), rows()

        args = (step.abstract_state(params, batch), batch)
        return automesh.Workload(step, args, init=start if with_init else None, facts=facts)

    def plain(state, batch):
        params, moments = state
        value, slope = jax.value_and_grad(loss)(params, batch)
        change, moments = OPTIMIZER.update(slope, moments, params)
        return (optax.apply_updates(params, change), moments), {"loss": value}

    def begin(mesh):
        params = jax.tree.map(lambda w: jax.device_put(w, like.sharding), initial())
        return (params, OPTIMIZER.init(params)), jax.device_put(rows(), batch.sharding)

    state = (params, jax.eval_shape(OPTIMIZER.init, params))
    return automesh.Workload(
        jax.jit(plain, donate_argnums=0),
        (state, batch),
        init=begin if with_init else None,
        facts=facts,
    )
