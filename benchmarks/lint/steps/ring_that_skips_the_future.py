"""Ring attention with a causal mask: the last device does all blocks, the first one a single one.

finding: uneven-work
mesh: sp:-1
line: 30
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def attend(x):
        place, count = jax.lax.axis_index("sp"), jax.lax.axis_size("sp")

        def turn(n, carried):
            kept, block = carried
            source = (place - n) % count

            def add(kept):
                return kept + jnp.tanh(x @ block.T) @ block

            if broken:
                kept = jax.lax.cond(source <= place, add, lambda kept: kept, kept)
            else:
                kept = add(kept) * (source <= place)
            ring = [(one, (one + 1) % count) for one in range(count)]
            return kept, jax.lax.ppermute(block, "sp", ring)

        return jax.lax.fori_loop(0, count, turn, (jnp.zeros_like(x), x))[0]

    def step(w, x):
        def loss(w):
            split = P("sp", None)
            y = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(
                x
            )
            return jnp.mean((y @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w, x = struct(mesh, (256, 256)), struct(mesh, (8192, 256), "sp")
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
