"""What `named_jit` returns: places arguments and result, and keeps what `jit` must know."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from automesh.mesh.layout.context import is_tracing
from automesh.mesh.layout.place import place
from automesh.partition.calls import Parts, check_hashable, donated_leaves, take_apart
from automesh.partition.carriers import Leaf, map_leaves
from automesh.partition.context import require_mesh
from automesh.partition.mapping import (
    FrozenMapping,
    axis_mapping,
    frozen,
    mapping_or_current,
    traces_keyed_by,
)
from automesh.partition.nouns import MeshLike, ResourceMapping
from automesh.partition.specs import spec_of

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a call is compiled for: everything but its arrays.

    Attributes:
      parts: of `(function, args, kwargs)`.
      donated: of every array in them, whether it is donated.
      axis, out: the mappings inside the function and for its result.
      mesh: that of the result; None if it is not to be split.
    """

    parts: Parts
    donated: tuple[bool, ...]
    axis: FrozenMapping | None
    out: FrozenMapping | None
    mesh: MeshLike | None


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """What of a result is no array: part of its structure, for `jit`."""

    parts: Parts


class NamedJit(Generic[P, R]):
    """A jitted function that places its arguments and its result by their logical names."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        axis: ResourceMapping | None,
        into: ResourceMapping | None,
        out: ResourceMapping | None,
        donate: tuple[Any, Any],
        mesh: MeshLike | None,
        jit: Callable[[Callable[..., Any]], Any],
    ) -> None:
        self._fn, self._axis, self._into, self._out = fn, axis, into, out
        self._donate, self._mesh = donate, mesh
        functools.update_wrapper(self, fn, updated=())
        self._jitted = jit(_named(fn))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        donated, kept, call = self._prepared(args, kwargs)
        with _mesh_for(call), traces_keyed_by(call.axis):
            arrays, rest = self._jitted(donated, kept, call)
        return rest.parts.joined(arrays)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lowers the function for these arguments, of which any array may be abstract."""
        donated, kept, call = self._prepared(args, kwargs)
        with _mesh_for(call), traces_keyed_by(call.axis):
            return self._jitted.lower(donated, kept, call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # As the method of a class, like any function.
        return self if instance is None else MethodType(self, instance)

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any], _Call]:
        axis = mapping_or_current(self._axis)
        out = axis if self._out is None else mapping_or_current(self._out)
        into = None if self._into is None else mapping_or_current(self._into)
        wanted = self._mesh, axis, out, into
        mesh = None if all(one is None for one in wanted) else require_mesh(self._mesh)
        given = (args, kwargs)
        flags = donated_leaves(args, kwargs, *self._donate)
        whole = (self._fn, *given)
        arrays, parts = take_apart(whole)
        check_hashable(whole, parts)
        if into is not None and mesh is not None:
            given = _placed(given, into, mesh, donated=_donated(given, flags))
            arrays, parts = take_apart((self._fn, *given))
        # The arrays of the function itself, if it is a module, are kept.
        own = len(parts.leaves) - len(flags)
        flags = [False] * own + flags
        donated = tuple(
            flag for flag, leaf in zip(flags, parts.leaves, strict=True) if leaf is None
        )
        call = _Call(parts=parts, donated=donated, axis=frozen(axis), out=frozen(out), mesh=mesh)
        return (
            [array for array, flag in zip(arrays, donated, strict=True) if flag],
            [array for array, flag in zip(arrays, donated, strict=True) if not flag],
            call,
        )


def _named(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for `jit`, so that profiles show the name of `fn`."""

    def run(donated: Sequence[Any], kept: Sequence[Any], call: _Call) -> Any:
        return _run(donated, kept, call)

    run.__name__ = run.__qualname__ = str(getattr(fn, "__name__", type(fn).__name__))
    return run


def _run(donated: Sequence[Any], kept: Sequence[Any], call: _Call) -> Any:
    sources = iter(donated), iter(kept)
    arrays = [next(sources[0] if flag else sources[1]) for flag in call.donated]
    fn, args, kwargs = call.parts.joined(arrays)
    context = nullcontext() if call.axis is None else axis_mapping(dict(call.axis))
    with context:
        result = fn(*args, **kwargs)
    if call.out is not None and call.mesh is not None:
        result = _constrained(result, dict(call.out), call.mesh)
    arrays, parts = take_apart(result)
    return arrays, _Rest(parts=parts)


def _constrained(result: Any, mapping: ResourceMapping, mesh: MeshLike) -> Any:
    def constrain(leaf: Leaf) -> Any:
        if not leaf.is_array:
            return leaf.rebuild(leaf.array)
        spec = (
            PartitionSpec()
            if leaf.names is None
            else spec_of(leaf.named_shape(), mapping, mesh=mesh)
        )
        return leaf.rebuild(place(leaf.array, NamedSharding(mesh, spec), path=leaf.path))

    return map_leaves(result, constrain)


def _placed(
    given: tuple[Any, Any], mapping: ResourceMapping, mesh: MeshLike, *, donated: Container[int]
) -> tuple[Any, Any]:
    """Arguments where `mapping` puts them; of those whose id is in `donated` only the result stays.

    What cannot be placed raises before anything has moved.
    """
    wanted: list[NamedSharding | None] = []

    def note(leaf: Leaf) -> Any:
        wanted.append(_wanted(leaf, mapping, mesh))
        return leaf.rebuild(leaf.array)

    map_leaves(given, note)
    rest = iter(wanted)

    def put(leaf: Leaf) -> Any:
        sharding = next(rest)
        if sharding is None:
            return leaf.rebuild(leaf.array)
        moved = place(leaf.array, sharding, path=leaf.path)
        if id(leaf.array) in donated and moved is not leaf.array:
            _give_up(leaf.array, sharding)
        return leaf.rebuild(moved)

    return cast("tuple[Any, Any]", map_leaves(given, put))


def _wanted(leaf: Leaf, mapping: ResourceMapping, mesh: MeshLike) -> NamedSharding | None:
    """Where an argument is to be; None if it stays where it is."""
    if not leaf.is_array:
        return None
    if leaf.names is not None:
        return NamedSharding(mesh, spec_of(leaf.named_shape(), mapping, mesh=mesh))
    current = getattr(leaf.array, "sharding", None)
    alone = current is None or isinstance(current, SingleDeviceSharding)
    return NamedSharding(mesh, PartitionSpec()) if alone else None


def _donated(given: tuple[Any, Any], flags: Sequence[bool]) -> Container[int]:
    """The ids of donated arrays; one that is passed a second time must outlive its move."""
    leaves = jax.tree.leaves(given)
    times = Counter(map(id, leaves))
    pairs = zip(leaves, flags, strict=True)
    return {id(leaf) for leaf, flag in pairs if flag and times[id(leaf)] == 1}


def _give_up(array: Any, moved: NamedSharding) -> None:
    """Frees a donated array that has been copied.

    Where a device has the same part before and after, jax shares the memory instead of copying;
    that goes with the donation to the program.
    """
    if not isinstance(array, jax.Array) or is_tracing():
        return
    before, after = (
        {(device, str(part)) for device, part in parts.items()}
        for parts in (
            sharding.addressable_devices_indices_map(array.shape)
            for sharding in (array.sharding, moved)
        )
    )
    if before.isdisjoint(after):
        array.delete()


def _mesh_for(call: _Call) -> AbstractContextManager[Any]:
    # Code of others inside looks for the mesh in jax's own context alone.
    mesh = call.mesh
    if not isinstance(mesh, Mesh) or is_tracing() or jax.sharding.get_mesh() == mesh:
        return nullcontext()
    return jax.set_mesh(mesh)
