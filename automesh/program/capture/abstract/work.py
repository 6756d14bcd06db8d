"""How much an operation computes, and whether it runs on a mesh (jax)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding, Sharding

from automesh.program.kernels.stand_ins import is_for_accelerators

_CORE: Any = importlib.import_module("jax._src.core")
# The most bytes of intermediate results of an operation that is computed.
SMALL_BYTES = 2**18
# And of one that is computed only if Python asks for its result, such as an order of a data set.
LATER_BYTES = 2**26
# Operations whose parameters state the mesh on which they run.
ON_A_MESH = frozenset({"sharding_constraint", "shard_map", "reshard", "mesh_cast", "device_put"})


def is_light(primitive: Any, args: Sequence[Any], params: dict[str, Any], limit_bytes: int) -> bool:
    """Whether an operation is away from all meshes, and its arguments and its intermediate results
    have few bytes."""
    if primitive.name in ON_A_MESH:
        return False
    if any(nbytes(arg) > limit_bytes or is_on_mesh(arg) for arg in args):
        return False
    if not concrete_mesh_in_force().empty:
        return False
    jaxpr = params.get("jaxpr")
    if primitive.name in ("pjit", "jit"):
        stated = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if any(isinstance(one, Sharding) for one in stated):
            return False
    if jaxpr is None:
        with _CORE.set_current_trace(_CORE.eval_trace):
            out, _ = primitive.abstract_eval(*map(_CORE.typeof, args), **params)
        outs = list(out) if primitive.multiple_results else [out]
        return sum(map(aval_bytes, outs)) <= limit_bytes
    return work(jaxpr) <= limit_bytes


def nbytes(value: Any) -> int:
    """Returns the bytes of an array; 0 of what is none."""
    return int(getattr(value, "nbytes", 0) or 0)


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of an array of a type; 0 if the type has no elements."""
    dtype = getattr(aval, "dtype", None)
    return math.prod(aval.shape) * int(dtype.itemsize) if dtype is not None else 0


def is_on_mesh(value: Any) -> bool:
    """Whether a value is an array that a mesh holds."""
    return isinstance(getattr(value, "sharding", None), NamedSharding)


def work(jaxpr: Any) -> float:
    """Returns the bytes of all intermediate results of a program; infinity if it runs on a mesh or
    on an accelerator."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for equation in inner.eqns:
        if equation.primitive.name in ON_A_MESH or is_for_accelerators(equation):
            return math.inf
        total += sum(aval_bytes(variable.aval) for variable in equation.outvars)
        times = equation.params.get("length", 1)
        for part in core.jaxprs_in_params(equation.params):
            total += times * work(part)
    return total


def concrete_mesh_in_force() -> Any:
    """Returns the mesh that `jax.set_mesh` has put in force; an empty one if there is none."""
    return importlib.import_module("jax._src.mesh").get_concrete_mesh()
