"""`eqx.filter_jit` hands jax a flat list: the names of arrays are in the user's trees."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("dp",), axis_types=(AxisType.Auto,))
model = eqx.filter_shard(
    eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0)), NamedSharding(mesh, P())
)
optimizer = optax.adam(1e-3)
state = optimizer.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def make_step(model, state, x):
    loss, slopes = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
    updates, state = optimizer.update(slopes, state)
    return eqx.apply_updates(model, updates), state, loss


for i in range(60):
    x = np.random.RandomState(i).randn(64, 64).astype(np.float32)
    model, state, loss = make_step(model, state, jax.device_put(x, NamedSharding(mesh, P("dp"))))
print(float(loss))
