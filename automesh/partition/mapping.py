"""Contexts for a piece of code: the mapping from logical to mesh axes, and the mesh."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from automesh.errors import UsageError, WrongType, check_type, kind_of
from automesh.mesh.layout.context import find_mesh
from automesh.mesh.mapping import check_mapped_types
from automesh.partition.nouns import MeshLike, PhysicalAxisSpec, ResourceMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class _EnteredMapping:
    """One `axis_mapping` that has been entered.

    Attributes:
      mapping: its mapping.
      haliax: Haliax's own mapping right after it was entered; a different one was entered inside.
    """

    mapping: dict[str, PhysicalAxisSpec | None]
    haliax: object


class _Entered(threading.local):
    entry: _EnteredMapping | None = None


MESH_HINT = "enter `jax.set_mesh(mesh)`, or pass `mesh=`"
FrozenMapping = tuple[tuple[str, PhysicalAxisSpec | None], ...]
_entered = _Entered()
# The mapping of a trace is part of the keys of jax's caches: of `jit`, of `checkpoint` and of the
# bodies of loops.
_key_of_traces = jax.make_user_context(default_value=None)


@contextmanager
def axis_mapping(
    mapping: ResourceMapping,
    *,
    merge: bool = False,
    outer_wins: bool = False,
    **kwargs: PhysicalAxisSpec | None,
) -> Generator[None]:
    """Sets the mapping from logical to mesh axes for this thread, until the context is left.

    A function that was traced under another mapping is traced again, also by `jax.jit`. If Haliax
    is loaded, its own `axis_mapping` is set as well, so that library code which calls
    `haliax.shard` or `haliax.auto_sharded` uses it; of the two, the one that was entered last
    counts.

    Example:
      >>> from automesh.partition import axis_mapping, current_thread_local_mapping
      >>> with axis_mapping({"embed": "fsdp"}):
      ...     with axis_mapping({"mlp": "tp"}, merge=True):
      ...         current_thread_local_mapping()
      {'embed': 'fsdp', 'mlp': 'tp'}

    Args:
      mapping: replaces the outer mapping, unless it is merged.
      merge: adds to the outer mapping; an entry here wins over the outer one.
      outer_wins: with `merge`, the outer entry wins (as in Haliax 1.4).
      kwargs: further entries, which win over all.

    Raises:
      WrongType: `mapping` is no mapping of names to mesh axes.
    """
    here = {**checked_mapping(mapping)}
    outer = (current_thread_local_mapping() or {}) if merge else {}
    merged = {**here, **outer} if outer_wins else {**outer, **here}
    merged.update(checked_mapping(kwargs))
    before = _entered.entry
    with _haliax_context(merged), traces_keyed_by(frozen(merged)):
        _entered.entry = _EnteredMapping(mapping=merged, haliax=_haliax_mapping())
        try:
            yield
        finally:
            _entered.entry = before


def traces_keyed_by(mapping: FrozenMapping | None) -> AbstractContextManager[None]:
    """Makes jax reuse only programs that were traced under this mapping, without setting it."""
    return _key_of_traces(mapping)


def frozen(mapping: ResourceMapping | None) -> FrozenMapping | None:
    """Makes a mapping a key, which does not depend on the order of its entries.

    >>> frozen({"mlp": ["tp", "sp"], "embed": "fsdp"})
    (('embed', 'fsdp'), ('mlp', ('tp', 'sp')))
    """
    return None if mapping is None else tuple(sorted(checked_mapping(mapping).items()))


def current_thread_local_mapping() -> dict[str, PhysicalAxisSpec | None] | None:
    """Returns the mapping of this thread; None if none has been set.

    Example:
      >>> from automesh.partition import axis_mapping, current_thread_local_mapping
      >>> with axis_mapping({"batch": "data"}):
      ...     current_thread_local_mapping()
      {'batch': 'data'}
    """
    entry, theirs = _entered.entry, _haliax_mapping()
    if theirs is not None and (entry is None or theirs is not entry.haliax):
        return dict(theirs)
    return None if entry is None else dict(entry.mapping)


def mapping_or_current(
    mapping: ResourceMapping | None,
) -> dict[str, PhysicalAxisSpec | None] | None:
    """Checks the given mapping; without one, returns that of the context.

    Raises:
      WrongType: it is no mapping of names to mesh axes.
    """
    return current_thread_local_mapping() if mapping is None else checked_mapping(mapping)


def checked_mapping(mapping: object) -> dict[str, PhysicalAxisSpec | None]:
    """Copies a mapping with checked types: mesh axes are one string, a tuple of them or None.

    Raises:
      WrongType: it is no mapping of names to mesh axes.
    """
    if not isinstance(mapping, Mapping):
        raise WrongType(
            f"an axis mapping must be a dict of logical to mesh axes, got {kind_of(mapping)}",
            hint="write for example {'embed': 'fsdp', 'mlp': ('tp', 'sp')}",
        )
    checked: dict[str, PhysicalAxisSpec | None] = {}
    for name, axes in mapping.items():
        check_mapped_types(name, axes)
        checked[name] = _physical(axes)
    return checked


def _physical(axes: PhysicalAxisSpec | None) -> PhysicalAxisSpec | None:
    if axes is None or isinstance(axes, str):
        return None if axes is None else str(axes)
    return tuple(str(axis) for axis in axes)


def _haliax_context(mapping: Mapping[str, Any]) -> AbstractContextManager[None]:
    haliax = sys.modules.get("haliax")
    return nullcontext() if haliax is None else haliax.axis_mapping(mapping)


def _haliax_mapping() -> Mapping[str, Any] | None:
    partitioning = sys.modules.get("haliax.partitioning")
    return None if partitioning is None else partitioning.current_thread_local_mapping()


def mesh_context(mesh: MeshLike) -> AbstractContextManager[Any]:
    """Sets the mesh until the context is left, as `jax.set_mesh` does.

    Example:
      >>> import jax
      >>> from automesh.partition import mesh_context
      >>> mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> with mesh_context(mesh):
      ...     dict(jax.sharding.get_abstract_mesh().shape)
      {'data': 8}

    Args:
      mesh: of devices, or abstract.

    Raises:
      WrongType: `mesh` is no mesh.
    """
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    check_type(mesh, Mesh, "`mesh` must be a jax.sharding.Mesh", hint="make it by create_mesh")
    return jax.set_mesh(mesh)


set_mesh = mesh_context
"""Another name of `mesh_context`, as in Haliax."""


def require_mesh(mesh: MeshLike | None = None) -> MeshLike:
    """Returns the mesh that a sharding must use here.

    Raises:
      UsageError: none was given, and no context sets one.
      WrongType: `mesh` is no mesh.
    """
    found = find_mesh(mesh)
    if found is None:
        raise UsageError("no mesh found: none was given, and no context sets one", hint=MESH_HINT)
    return found
