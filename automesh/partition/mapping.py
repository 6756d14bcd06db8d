"""`axis_mapping`: the mapping from logical to mesh axes that holds for a piece of code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from automesh.errors import WrongType, kind_of
from automesh.partition.nouns import PhysicalAxisSpec, ResourceMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One `axis_mapping` that has been entered.

    Attributes:
      mapping: what it says.
      haliax: Haliax's own mapping right after; another one now was entered inside.
    """

    mapping: dict[str, PhysicalAxisSpec | None]
    haliax: object


class _Entered(threading.local):
    entry: _Entry | None = None


_entered = _Entered()


@contextmanager
def axis_mapping(
    mapping: ResourceMapping,
    *,
    merge: bool = False,
    outer_wins: bool = False,
    **kwargs: PhysicalAxisSpec | None,
) -> Generator[None]:
    """Sets the mapping from logical to mesh axes for this thread, until the context is left.

    Where Haliax is in use, its own `axis_mapping` is set along, so that library code which calls
    `haliax.shard` or `haliax.auto_sharded` follows; of the two the one entered last counts.

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
    with _haliax_context(merged):
        _entered.entry = _Entry(mapping=merged, haliax=_haliax_mapping())
        try:
            yield
        finally:
            _entered.entry = before


def current_thread_local_mapping() -> dict[str, PhysicalAxisSpec | None] | None:
    """The mapping that holds in this thread; None if none has been set.

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
    """The given mapping, checked; without one, that of the context.

    Raises:
      WrongType: it is no mapping of names to mesh axes.
    """
    return current_thread_local_mapping() if mapping is None else checked_mapping(mapping)


def checked_mapping(mapping: object) -> dict[str, PhysicalAxisSpec | None]:
    """A copy of a mapping whose types are right: mesh axes are one string, a tuple of them or None.

    Raises:
      WrongType: it is no mapping of names to mesh axes.
    """
    if not isinstance(mapping, Mapping):
        raise WrongType(
            f"an axis mapping must be a dict of logical to mesh axes, got {kind_of(mapping)}",
            hint="write for example {'embed': 'fsdp', 'mlp': ('tp', 'sp')}",
        )
    return {_logical(name): _physical(name, axes) for name, axes in mapping.items()}


def _logical(name: object) -> str:
    if not isinstance(name, str):
        raise WrongType(
            f"the logical axes of a mapping must be strings, got {kind_of(name)}: {name!r}",
            hint="use the name of the axis, not the axis",
        )
    return name


def _physical(name: object, axes: object) -> PhysicalAxisSpec | None:
    if axes is None:
        return None
    if isinstance(axes, str):
        return str(axes)
    if isinstance(axes, list | tuple) and all(isinstance(axis, str) for axis in axes):
        return tuple(str(axis) for axis in axes)
    raise WrongType(
        f"logical axis `{name}` must be mapped to a mesh axis, several or None, got {axes!r}",
        hint="write for example 'tp' or ('tp', 'sp')",
    )


def _haliax_context(mapping: Mapping[str, Any]) -> AbstractContextManager[None]:
    haliax = sys.modules.get("haliax")
    return nullcontext() if haliax is None else haliax.axis_mapping(mapping)


def _haliax_mapping() -> Mapping[str, Any] | None:
    partitioning = sys.modules.get("haliax.partitioning")
    return None if partitioning is None else partitioning.current_thread_local_mapping()
