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
from threading import RLock
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, Sharding

from automesh.program.capture.abstract.work import aval_bytes, concrete_mesh_in_force
from automesh.program.capture.flow.program import flops_of
from automesh.program.capture.known_numbers import KnownNumber
from automesh.program.kernels.stand_ins import is_for_accelerators
from automesh.program.lower.static_args import is_ref
from automesh.program.notes import note
from automesh.texts.exceptions import in_one_line

_CORE: Any = importlib.import_module("jax._src.core")
# The most bytes, on all devices together, of the results of the operations that lead to a value.
MOST_BYTES = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimit:
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
NEEDED = WorkLimit(made_bytes=MOST_BYTES, flops=math.inf, equations=math.inf)
# For a number that nan replaces in most scripts.
CHEAP = WorkLimit(made_bytes=2**26, flops=1e10, equations=300)
# Operations that call Python, which may answer otherwise later.
_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "outside_call"})
# The most bytes of host arrays that are copied for later, since the script may write into them.
MOST_COPIED_BYTES = 2**29
# The longest chain of operations; without a bound a long loop would keep all of its batches.
_DEEPEST = 256


@dataclass(slots=True, kw_only=True)
class _Alive:
    """Bytes that are kept for later: copies of arrays of the host, and results."""

    copied_bytes: int = 0
    result_bytes: float = 0


_ALIVE = _Alive()
# A data loader may ask in a thread of its own.
_LOCK = RLock()


class HostCopy:
    """A copy of an array of the host, which nobody can write into."""

    __slots__ = ("_counted", "value")

    def __init__(self, value: np.ndarray) -> None:
        self.value = value.copy()
        self.value.flags.writeable = False
        self._counted = _ALIVE
        _ALIVE.copied_bytes += value.nbytes

    def __del__(self) -> None:
        # Python empties modules before it deletes the last arrays.
        self._counted.copied_bytes -= self.value.nbytes


@dataclass(slots=True, eq=False, kw_only=True)
class LaterOperation:
    """An operation that can be computed later, or the value of a host.

    Attributes:
      primitive: None for a value that is given.
      params: its parameters, without donations.
      args: `Deferred`s, and values; empty once it is computed.
      mesh: that was in force when the script asked for the operation.
      has_x64: whether 64-bit types were enabled then.
      bytes_made: bytes of its results on all devices together.
      depth: length of the longest chain of operations that are not computed.
      results: its results, once they are computed.
    """

    primitive: Any
    params: dict[str, Any]
    args: Sequence[Any]
    mesh: Any
    has_x64: bool
    bytes_made: float
    depth: int
    results: list[Any] | None = field(default=None)

    def __del__(self) -> None:
        if self.results is not None:
            _ALIVE.result_bytes -= self.bytes_made


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Deferred:
    """One result of an operation."""

    of: LaterOperation
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
    if made > MOST_BYTES or not is_pure(primitive, params):
        return None
    own = with_own_constants(params)
    if own is None:
        return None
    operation = LaterOperation(
        primitive=primitive,
        params=_without_donation(own),
        args=tuple(args),
        mesh=concrete_mesh_in_force(),
        has_x64=_has_x64(),
        bytes_made=made,
        depth=depth,
    )
    return [Deferred(of=operation, place=place) for place in range(len(outs))]


def copied(value: np.ndarray) -> HostCopy | None:
    """Returns a copy of an array of the host; None if too much is copied already."""
    if value.dtype == object or _ALIVE.copied_bytes + value.nbytes > MOST_COPIED_BYTES:
        return None
    return HostCopy(value)


def given(value: Any, dtype: Any) -> Deferred | None:
    """Returns a value of the host for later; None if too much is copied already.

    Args:
      dtype: that it has as an array of jax.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    held = copied(np.asarray(value, dtype))
    if held is None:
        return None
    operation = LaterOperation(
        primitive=None,
        params={},
        args=(),
        mesh=None,
        has_x64=_has_x64(),
        bytes_made=0,
        depth=0,
        results=[held],
    )
    return Deferred(of=operation, place=0)


def computed(wanted: Deferred, *, most: WorkLimit = NEEDED) -> Any:
    """Returns the value of a result, as an array of NumPy or of random keys; computes what leads to
    it. None if it cannot be computed, or takes more work than `most`."""
    with _LOCK:
        todo = _in_order(wanted.of)
        made = sum(operation.bytes_made for operation in todo)
        if made > most.made_bytes or _ALIVE.result_bytes + made > MOST_BYTES:
            return None
        if most is not NEEDED and not _is_within(todo, most):
            return None
        try:
            for operation in todo:
                _compute(operation)
            value = _value(wanted)
            is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
            return value if is_key else np.asarray(value)
        # Libraries raise whatever they like; the caller says which line needs the value.
        except Exception as error:  # noqa: BLE001
            note(f"a value that the script asks for cannot be computed ({in_one_line(error)})")
            return None


def _in_order(last: LaterOperation) -> list[LaterOperation]:
    """Lists the operations that are not computed and lead to one, each after those it needs."""
    ordered: dict[int, LaterOperation] = {}
    stack: list[tuple[LaterOperation, bool]] = [(last, False)]
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


def _compute(operation: LaterOperation) -> None:
    if operation.has_x64 != _has_x64():
        raise ValueError("other types are enabled than when the script asked for it")
    with _CORE.set_current_trace(_CORE.eval_trace), _in_force(operation.mesh):
        values = list(map(_value, operation.args))
        made = operation.primitive.bind(*values, **operation.params)
    operation.results = list(made) if operation.primitive.multiple_results else [made]
    operation.args = ()
    _ALIVE.result_bytes += operation.bytes_made


def _has_x64() -> bool:
    config: Any = jax.config
    return bool(config.jax_enable_x64)


def _value(kept: Any) -> Any:
    if isinstance(kept, Deferred):
        assert kept.of.results is not None
        kept = kept.of.results[kept.place]
    if isinstance(kept, HostCopy):
        return kept.value
    if isinstance(kept, KnownNumber):
        value = kept.value()
        if value is None:
            raise ValueError("a number depends on data that are not there")
        return value
    return kept


def _in_force(mesh: Any) -> AbstractContextManager[Any]:
    if mesh == concrete_mesh_in_force():
        return nullcontext()
    return jax.set_mesh(mesh)


def _is_within(todo: Sequence[LaterOperation], most: WorkLimit) -> bool:
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


def with_own_constants(params: dict[str, Any]) -> dict[str, Any] | None:
    """Returns parameters whose program holds copies of the arrays of NumPy that it refers to; the
    script may write into them. None if programs inside of it hold some, or too much is copied."""
    found = dict(params)
    for name, jaxpr in params.items():
        if any(map(_holds_host_arrays, _bodies(getattr(jaxpr, "jaxpr", None)))):
            return None
        own: list[Any] = []
        constants: list[Any] = list(getattr(jaxpr, "consts", ()))
        for one in constants:
            held = copied(one) if isinstance(one, np.ndarray) else None
            if held is None and isinstance(one, np.ndarray):
                return None
            own.append(one if held is None else held.value)
        if not any(isinstance(one, np.ndarray) for one in constants):
            continue
        found[name] = jaxpr.replace(consts=own)
    return found


def _holds_host_arrays(jaxpr: Any) -> bool:
    held = any(isinstance(one, np.ndarray) for one in getattr(jaxpr, "consts", ()))
    return held or any(map(_holds_host_arrays, _bodies(getattr(jaxpr, "jaxpr", jaxpr))))


def _bodies(jaxpr: Any) -> list[Any]:
    if jaxpr is None:
        return []
    return [body for equation in jaxpr.eqns for body in core.jaxprs_in_params(equation.params)]


def is_pure(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether nothing but its results comes of an operation, and the host can compute it at any
    time."""
    programs = core.jaxprs_in_params(params)
    return primitive.name not in _CALLBACKS and all(map(_is_pure_program, programs))


def _is_pure_program(jaxpr: Any) -> bool:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner.effects:
        return False
    return not any(
        is_for_accelerators(equation) or not is_pure(equation.primitive, equation.params)
        for equation in inner.eqns
    )
