"""Steps that some meshes cannot have, each for a reason of its own."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh


def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def arguments(mesh, *rows, batch=8):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return struct((64, 64), None, "tp"), struct((batch, 64), *rows)


def six_rows(mesh):
    return jax.jit(step, donate_argnums=0), arguments(mesh, "dp", batch=6)


def too_many_heads(mesh):
    if mesh.shape["tp"] == 8:
        raise ValueError("eight is\x1b[31m too many heads\nfor six")
    return jax.jit(step, donate_argnums=0), arguments(mesh, "dp")


def adapting(mesh):
    """Six rows, split where that goes."""
    rows = ("dp",) if 6 % mesh.shape["dp"] == 0 else ()
    return jax.jit(step, donate_argnums=0), arguments(mesh, *rows, batch=6)


def manual(mesh):
    total = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sum(x), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss + total(x)

    return jax.jit(step, donate_argnums=0), arguments(mesh, batch=6)


def constrained(mesh):
    """jax pads what a constraint does not divide."""

    def padded(w, x):
        return step(w, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp"))))

    return jax.jit(padded, donate_argnums=0), arguments(mesh, batch=6)


def placed_outputs(mesh):
    def more(w, x):
        return *step(w, x), x @ w

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    placed = place(None, "tp"), place(), place("dp")
    return jax.jit(more, donate_argnums=0, out_shardings=placed), arguments(mesh, batch=6)


def own_baseline(mesh):
    return automesh.Workload(*six_rows(mesh), baseline="dp:8")


def nowhere(mesh):
    if mesh.size > 1 and mesh.shape["dp"] * mesh.shape["tp"] == 8:
        raise RuntimeError("this cluster is closed")
    return jax.jit(step, donate_argnums=0), arguments(mesh, "dp")
