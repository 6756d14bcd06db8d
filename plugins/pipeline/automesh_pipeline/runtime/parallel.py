"""`parallelize`: a function compiled ahead of time, with shardings that XLA has chosen (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from automesh.errors import UsageError, WrongType, kind_of


class Parallelized(NamedTuple):
    """The result of `parallelize`.

    Attributes:
      step: the compiled function, `(params, batch) -> results`.
      init_params: makes the parameters with the shardings that `step` expects.
      get_batch: makes a batch with the shardings that `step` expects.
    """

    step: Any
    init_params: Callable[[], Any]
    get_batch: Callable[[], Any]


def parallelize(
    fun: Callable[[Any, Any], Any],
    *,
    init_params: Callable[[], Any],
    get_input_batch: Callable[[], Any] | None = None,
    initial_batch: Any = None,
    devices: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
) -> Parallelized:
    """Compiles a function once, and places its arguments as the compiled program expects them.

    It corresponds to MultiMesh's `parallelize`: the arguments have no given shardings; the compiled
    program shows those that follow from the constraints inside `fun`.

    Args:
      fun: `(params, batch) -> results`; PartitionSpecs inside it refer to the mesh.
      init_params: a function for `jax.jit`, compiled with the shardings of the parameters.
      get_input_batch: a function that returns a batch.
      initial_batch: a batch, if there is no such function.
      devices: default: all of them.
      mesh: default: one axis `x` of the devices.

    Raises:
      WrongType: an argument that must be a function is none.
      UsageError: neither a batch nor a function for it is given, or both are; or both devices and a
        mesh are.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec
      >>> from automesh import pipeline
      >>> def fun(params, batch):
      ...     batch = jax.lax.with_sharding_constraint(batch, PartitionSpec("x"))
      ...     return jnp.sum(batch @ params)
      >>> step, init_params, get_batch = pipeline.parallelize(
      ...     fun, init_params=lambda: jnp.ones((4, 4)), initial_batch=jnp.ones((16, 4))
      ... )
      >>> float(step(init_params(), get_batch()))
      256.0
    """
    for name, one in (("fun", fun), ("init_params", init_params)):
        if not callable(one):
            raise WrongType(f"`{name}` must be a function, got {kind_of(one)}")
    if (get_input_batch is None) == (initial_batch is None):
        raise UsageError(
            "`parallelize` needs either `get_input_batch` or `initial_batch`, got "
            f"{'neither' if initial_batch is None else 'both'}"
        )
    if mesh is not None and devices is not None:
        raise UsageError("`parallelize` takes `devices` or a `mesh`, got both")
    if mesh is None:
        mesh = Mesh(np.array(jax.devices() if devices is None else list(devices)), ("x",))
    make_batch = (lambda: initial_batch) if get_input_batch is None else get_input_batch
    with jax.set_mesh(mesh):
        params = jax.eval_shape(init_params)
        batch = jax.tree.map(_abstract, make_batch())
        step = jax.jit(fun).lower(params, batch).compile()
        of_params, of_batch = step.input_shardings[0]
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        of_params, of_batch = (
            jax.tree.map(
                lambda one: everywhere if one is None else one, tree, is_leaf=lambda x: x is None
            )
            for tree in (of_params, of_batch)
        )
        init = jax.jit(init_params, out_shardings=of_params).lower().compile()
    return Parallelized(
        step=step,
        init_params=lambda: init(),
        get_batch=lambda: jax.device_put(make_batch(), of_batch),
    )


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf))
