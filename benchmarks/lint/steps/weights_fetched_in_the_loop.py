"""Weights lie in the memory of the host, and every microbatch fetches all of them.

finding: host-transfer
mesh: fsdp:-1
line: 27
only: tpu
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    on_host = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    on_device = NamedSharding(mesh, P("fsdp"), memory_kind="device")

    def step(w, parts):
        once = w if broken else jax.device_put(w, on_device)

        def body(total, part):
            held = jax.device_put(w, on_device) if broken else once
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(held), None

        zeros = jnp.zeros(w.shape, device=on_device)
        total, _ = jax.lax.scan(body, zeros, parts)
        now = jax.device_put(w, on_device) if broken else once
        return jax.device_put(now - 0.1 * total, on_host)

    w = jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=on_host)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=on_host)
    return jitted, (w, struct(mesh, (8, 64, 2048), None, "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
