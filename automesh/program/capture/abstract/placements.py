"""Finds where the results of an operation are put, in a run without arrays (jax)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from automesh.program.absent.device_queries import attached
from automesh.program.capture.abstract.arrays import described, is_abstract
from automesh.program.capture.abstract.record import STATE
from automesh.program.capture.abstract.work import concrete_mesh_in_force, work
from automesh.program.capture.world.meshes import same_on
from automesh.program.kernels.stand_ins import standing_in
from automesh.program.lower.compiled import output_shardings
from automesh.program.lower.compiler_options import compile_quickly

_CORE: Any = importlib.import_module("jax._src.core")
# Operations that compute each element of their result from the same element of their arguments.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and", "atan2", "ceil", "clamp", "convert_element_type", "copy", "copy_p",
    "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on


def placements(
    primitive: Any, args: Sequence[Any], params: dict[str, Any], outs: Sequence[Any]
) -> tuple[Sharding | None, ...]:
    """Returns the sharding of each result of an operation; None for the default device."""
    name = primitive.name
    if name == "device_put":
        put = [_sharding_of(one) for one in params["devices"]]
        return tuple(to or known_sharding(arg) for to, arg in zip(put, args, strict=True))
    typed = [_from_type(aval, args) for aval in outs]
    if name in ("pjit", "jit"):
        stated = [one if isinstance(one, Sharding) else None for one in params["out_shardings"]]
        typed = [said or by_type for said, by_type in zip(stated, typed, strict=True)]
    if name in ("sharding_constraint", "reshard"):
        to: Any = params.get("sharding") or params.get("dst_sharding")
        # Under `vmap` a new dimension is left to the compiler.
        if PartitionSpec.UNCONSTRAINED not in getattr(to, "spec", ()):
            typed = [by_type or _on_concrete(to, args) for by_type in typed]
    if all(typed) or not _concerns_mesh(args, params):
        return tuple(typed)
    if name in _ELEMENTWISE:
        same = {known_sharding(arg) for arg in args if np.shape(arg) == outs[0].shape} - {None}
        if len(same) == 1:
            return (same.pop(),)
    compiled = _compiled_shardings(primitive, args, params)
    return tuple(said or by for said, by in zip(typed, compiled, strict=True))


def _sharding_of(to: Any) -> Sharding | None:
    if isinstance(to, Sharding):
        return to
    if isinstance(getattr(to, "sharding", None), Sharding):
        return to.sharding  # A format.
    return SingleDeviceSharding(to) if isinstance(to, jax.Device) else None


def known_sharding(value: Any) -> Sharding | None:
    """Returns the sharding of an argument that was put somewhere; None if nobody has put it
    anywhere."""
    if is_abstract(value):
        return value.placed
    if isinstance(value, jax.Array) and getattr(value, "committed", False):
        return value.sharding
    return None


def _from_type(aval: Any, args: Sequence[Any]) -> Sharding | None:
    """Returns the sharding that the type of an array states, on a mesh with Explicit axes."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh: Any = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.are_all_axes_explicit:
        return None
    return _on_concrete(sharding, args)


def _on_concrete(sharding: Any, args: Sequence[Any]) -> Sharding | None:
    """Returns a sharding over the concrete mesh that the abstract mesh of a sharding stands for."""
    if not isinstance(sharding, NamedSharding):
        return sharding if isinstance(sharding, Sharding) else None
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    candidates = [concrete_mesh_in_force()]
    candidates += [
        one.mesh for arg in args if isinstance(one := known_sharding(arg), NamedSharding)
    ]
    for mesh in candidates:
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            return NamedSharding(mesh, sharding.spec)
    return None


def _concerns_mesh(args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether some argument, or the program itself, is split over several devices."""
    for arg in args:
        sharding = known_sharding(arg)
        if sharding is not None and len(sharding.device_set) > 1:
            return True
    if any(math.isinf(work(part)) for part in core.jaxprs_in_params(params)):
        return True
    return any(isinstance(one, NamedSharding) for one in params.get("in_shardings", ()))


def _compiled_shardings(
    primitive: Any, args: Sequence[Any], params: dict[str, Any]
) -> tuple[Sharding | None, ...]:
    """Returns the shardings that the compiler chooses for the results of an operation, where nobody
    has stated them."""
    inputs = [described(arg) if is_abstract(arg) else arg for arg in args]
    key = _key(primitive, inputs, params)
    if key is not None and key in STATE.compiled:
        return STATE.compiled[key]

    def operation(*values: Any) -> list[Any]:
        found = primitive.bind(*values, **params)
        return list(found) if primitive.multiple_results else [found]

    programs = core.jaxprs_in_params(params)
    with _CORE.set_current_trace(_CORE.eval_trace), standing_in(programs):
        lowered = own_jit(operation).lower(*inputs)
        compiled = compile_quickly(lowered, attached()[0])
    mesh = _mesh_among(inputs, params)
    shardings = tuple(_named(sharding, mesh) for sharding in output_shardings(compiled))
    if key is not None:
        STATE.compiled[key] = shardings
    return shardings


def _key(primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    try:
        key = (
            primitive,
            tuple(sorted(params.items())),
            tuple(
                (np.shape(operand), str(operand.dtype), getattr(operand, "sharding", None))
                for operand in inputs
            ),
        )
        hash(key)
    except (TypeError, AttributeError):
        return None
    return key


def _mesh_among(inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    for one in (*(getattr(value, "sharding", None) for value in inputs), *params.values()):
        if isinstance(one, NamedSharding) and isinstance(one.mesh, jax.sharding.Mesh):
            return one.mesh
    return None


def _named(sharding: Any, mesh: Any) -> Sharding | None:
    if isinstance(sharding, SingleDeviceSharding) and mesh is not None and mesh.size > 1:
        return None  # No input has a place, as in an `init` that reads only shapes.
    if not isinstance(sharding, NamedSharding) or mesh is None:
        return sharding if isinstance(sharding, Sharding) else None
    if sharding.mesh.axis_names != mesh.axis_names:
        return same_on(sharding, mesh) or sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def own_jit(function: Any) -> Any:
    """Returns what jax's own `jax.jit` makes of a function, also while a hook replaces it."""
    return importlib.import_module("jax._src.api").jit(function)
