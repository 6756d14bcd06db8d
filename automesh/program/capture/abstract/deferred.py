"""Computes arrays without data when Python asks for their values (jax).

A run without arrays keeps what each operation was given. Where the script then looks into an array,
as `np.asarray(images)` and `labels[labels > 0]` do, the operations that lead to this array are run,
and no others, so that the script need not be started again with its arrays.

This is for values that the script cannot do without. Numbers that most scripts only show, such as
losses, are not computed, see `unread`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, Sharding

from automesh.program.capture.abstract.work import aval_bytes, concrete_mesh_in_force
from automesh.program.capture.flow.program import flops_of
from automesh.program.kernels.stand_ins import is_for_accelerators
from automesh.program.lower.static_args import is_ref

_CORE: Any = importlib.import_module("jax._src.core")
# The most bytes, on all devices together, of the results of the operations that lead to a value.
MOST_BYTES = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most work that may lead to a value.

    Attributes:
      made_bytes: bytes of the results of the operations, on all devices together.
      flops: FLOPs of these operations.
      equations: of their programs, which take time to compile.
    """

    made_bytes: float
    flops: float
    equations: float


# For a value without which the script ends; a run with its arrays would compute it, too.
NEEDED = Limit(made_bytes=MOST_BYTES, flops=math.inf, equations=math.inf)
# For a number that nan replaces in most scripts.
CHEAP = Limit(made_bytes=2**26, flops=1e10, equations=300)
# The most bytes of host arrays that are copied for later, since the script may write into them.
MOST_COPIED_BYTES = 2**29
# The longest chain of operations; without a bound a long loop would keep all of its batches.
_DEEPEST = 256


@dataclass(slots=True)
class _Copies:
    alive_bytes: int = 0


_COPIES = _Copies()


class HostCopy:
    """A copy of an array of the host."""

    __slots__ = ("_counted", "value")

    def __init__(self, value: np.ndarray) -> None:
        self.value = value.copy()
        self._counted = _COPIES
        _COPIES.alive_bytes += value.nbytes

    def __del__(self) -> None:
        # Python empties modules before it deletes the last arrays.
        self._counted.alive_bytes -= self.value.nbytes


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """An operation that can be computed later, or the value of a host.

    Attributes:
      primitive: None for a value that is given.
      params: its parameters, without donations.
      args: `Deferred`s, and values; empty once it is computed.
      mesh: that was in force when the script asked for the operation.
      bytes_made: bytes of its results on all devices together.
      depth: length of the longest chain of operations that are not computed.
      results: its results, once they are computed.
    """

    primitive: Any
    params: dict[str, Any]
    args: Sequence[Any]
    mesh: Any
    bytes_made: float
    depth: int
    results: list[Any] | None = field(default=None)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Deferred:
    """One result of an operation."""

    of: Operation
    place: int


def deferred(
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    outs: Sequence[Any],
    placed: Sequence[Sharding | None],
) -> list[Deferred] | None:
    """Returns the results of an operation, to be computed later; None if they cannot be.

    Args:
      args: `Deferred`s, `KnownNumber`s, `HostCopy`s and values; None for an argument whose value is
        unknown.
      outs: shapes and types of the results.
      placed: where they are put.
    """
    if any(one is None or is_ref(one) for one in args):
        return None
    depth = 1 + max(
        (one.of.depth for one in args if isinstance(one, Deferred) and one.of.results is None),
        default=0,
    )
    if depth > _DEEPEST:
        return None
    made = sum(map(_bytes_on_devices, outs, placed))
    if made > MOST_BYTES or not _is_pure(params):
        return None
    operation = Operation(
        primitive=primitive,
        params=_without_donation(params),
        args=tuple(args),
        mesh=concrete_mesh_in_force(),
        bytes_made=made,
        depth=depth,
    )
    return [Deferred(of=operation, place=place) for place in range(len(outs))]


def copied(value: np.ndarray) -> HostCopy | None:
    """Returns a copy of an array of the host; None if too much is copied already."""
    if value.dtype == object or _COPIES.alive_bytes + value.nbytes > MOST_COPIED_BYTES:
        return None
    return HostCopy(value)


def given(value: Any) -> Deferred | None:
    """Returns a value of the host for later; None if too much is copied already."""
    held = copied(np.asarray(value))
    if held is None:
        return None
    operation = Operation(
        primitive=None, params={}, args=(), mesh=None, bytes_made=0, depth=0, results=[held]
    )
    return Deferred(of=operation, place=0)


def computed(wanted: Deferred, *, most: Limit = NEEDED) -> Any:
    """Returns the value of a result, as an array of NumPy or of random keys; computes what leads to
    it. None if it cannot be computed, or takes more work than `most`."""
    todo = _in_order(wanted.of)
    if sum(operation.bytes_made for operation in todo) > most.made_bytes:
        return None
    if most is not NEEDED and not _is_within(todo, most):
        return None
    try:
        for operation in todo:
            _compute(operation)
        value = _value(wanted)
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        return value if is_key else np.asarray(value)
    # As in a run with arrays, libraries raise whatever they like; there the script would be told.
    except Exception:  # noqa: BLE001
        return None


def _in_order(last: Operation) -> list[Operation]:
    """Lists the operations that are not computed and lead to one, each after those it needs."""
    ordered: dict[int, Operation] = {}
    stack: list[tuple[Operation, bool]] = [(last, False)]
    while stack:
        operation, is_ready = stack.pop()
        if id(operation) in ordered or operation.results is not None:
            continue
        if is_ready:
            ordered[id(operation)] = operation
            continue
        stack.append((operation, True))
        stack += [(one.of, False) for one in operation.args if isinstance(one, Deferred)]
    return list(ordered.values())


def _compute(operation: Operation) -> None:
    values = list(map(_value, operation.args))
    with _CORE.set_current_trace(_CORE.eval_trace), _in_force(operation.mesh):
        made = operation.primitive.bind(*values, **operation.params)
    operation.results = list(made) if operation.primitive.multiple_results else [made]
    operation.args = ()


def _value(given: Any) -> Any:
    if isinstance(given, Deferred):
        assert given.of.results is not None
        given = given.of.results[given.place]
    if isinstance(given, HostCopy):
        return given.value
    if hasattr(given, "reads_nan"):
        value = given.value()
        if value is None:
            raise ValueError("a number depends on data that are not there")
        return value
    return given


def _in_force(mesh: Any) -> AbstractContextManager[Any]:
    if mesh == concrete_mesh_in_force():
        return nullcontext()
    return jax.set_mesh(mesh)


def _is_within(todo: Sequence[Operation], most: Limit) -> bool:
    programs = [
        getattr(one, "jaxpr", one)
        for operation in todo
        for one in core.jaxprs_in_params(operation.params)
    ]
    if len(todo) + sum(map(_equations, programs)) > most.equations:
        return False
    return sum(map(flops_of, programs)) <= most.flops


def _equations(jaxpr: Any) -> int:
    inner = [
        getattr(one, "jaxpr", one)
        for equation in jaxpr.eqns
        for one in core.jaxprs_in_params(equation.params)
    ]
    return len(jaxpr.eqns) + sum(map(_equations, inner))


def _bytes_on_devices(aval: Any, placed: Sharding | None) -> float:
    if placed is None:
        return aval_bytes(aval)
    part = jax.ShapeDtypeStruct(placed.shard_shape(tuple(aval.shape)), aval.dtype)
    # An abstract mesh has a size, and no devices.
    mesh = placed.mesh if isinstance(placed, NamedSharding) else None
    return aval_bytes(part) * (len(placed.device_set) if mesh is None else mesh.size)


def _without_donation(params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters with which an operation leaves its arguments alone: others may be computed
    of them later."""
    donated = params.get("donated_invars")
    if not donated:
        return params
    return params | {"donated_invars": (False,) * len(donated)}


def _is_pure(params: dict[str, Any]) -> bool:
    """Whether nothing but its results comes of an operation, and the host can compute it."""
    return all(map(_is_pure_program, core.jaxprs_in_params(params)))


def _is_pure_program(jaxpr: Any) -> bool:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner.effects:
        return False
    return not any(
        is_for_accelerators(equation) or not _is_pure(equation.params) for equation in inner.eqns
    )
