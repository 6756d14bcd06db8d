"""Divides an axis of the script's mesh into several axes, as `--split data=dp,fsdp` asks for (jax).

The script still says `data`. While it runs, jax takes that name for all axes that replace it: in a
`PartitionSpec`, in `mesh.shape[...]`, as the axis of a collective and of `shard_map`. So an array
that the script splits over `data` is split over both dp and fsdp.

That alone would be the same program for every division of the devices between the two. The second
axis also splits what `data` leaves whole. If no part of `data` splits an array that the step
carries on (parameters, the optimizer's state), it is split over fsdp along the largest dimension
that fsdp divides, and the step returns it with this sharding. This is not done with Explicit axes:
there the sharding is part of the type of an array, and the script states the types of the step.

Changed in jax while a script runs: `PartitionSpec.__new__`, `Mesh.shape`, functions of `jax.lax`
and `jax.shard_map`. Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import collections
import functools
import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.program.capture.nouns import AxisSplit, names_in_place
from automesh.program.lower.static_args import leaf_shape
from automesh.program.spec_entries import entries_of

# Elements of the smallest array that is split: to gather a smaller one costs more than it saves.
LEAST_ELEMENTS = 1024
_COLLECTIVES = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ppermute",
    "pshuffle",
    "pbroadcast",
    "axis_index",
    "axis_size",
)


@dataclass(slots=True)
class _SplitState:
    """The meaning of the script's names of axes in this process while the script runs."""

    into: Mapping[str, tuple[str, ...]]
    is_installed: bool = False


_STATE = _SplitState({})


@contextmanager
def meaning(splits: Sequence[AxisSplit]) -> Generator[None]:
    """Makes the names of divided axes mean the axes that replace them while the body runs.

    Raises:
      UsageError: this version of jax makes its partition specs in another way.
    """
    if not splits:
        yield
        return
    _install()
    _STATE.into = names_in_place(splits)
    try:
        yield
    finally:
        _STATE.into = {}


def translated(names: Any) -> Any:
    """Returns the name of an axis, or several names, as axes of the search; anything else as it
    is."""
    into = _STATE.into
    if not into:
        return names
    if isinstance(names, str):
        return into.get(names, names)
    if isinstance(names, (tuple, list, set, frozenset)):
        kind: Any = type(cast("Any", names))
        if kind not in (tuple, list, set, frozenset):
            return cast("Any", names)
        parts: list[Any] = []
        for name in cast("Sequence[Any]", names):
            parts += into.get(name, (name,)) if isinstance(name, str) else (name,)
        return kind(parts)
    return names


class _Shape(collections.OrderedDict[Any, int]):
    """The sizes of a mesh, in which the script's own names have sizes, too."""

    def __missing__(self, name: Any) -> int:
        parts = _STATE.into.get(name) if isinstance(name, str) else None
        if parts is None or any(part not in self for part in parts):
            raise KeyError(name)
        return math.prod(self[part] for part in parts)


def _install() -> None:
    if _STATE.is_installed:
        return
    made = vars(PartitionSpec).get("__new__")
    if made is None or not isinstance(vars(Mesh).get("shape"), functools.cached_property):
        raise UsageError(
            f"`--split` does not work with jax {jax.__version__}, whose partition specs are made "
            "in another way",
            hint="use jax 0.10.1 to 0.12",
        )
    _STATE.is_installed = True
    _hook_specs(made.__func__ if isinstance(made, staticmethod) else made)
    _hook_shapes()
    for name in _COLLECTIVES:
        function = getattr(jax.lax, name, None)
        if function is not None:
            setattr(jax.lax, name, _with_names(function, ("axis_name",)))
    owner: Any = jax
    owner.shard_map = _with_names(owner.shard_map, ("axis_names",))


def _hook_specs(original: Callable[..., Any]) -> None:
    def make(cls: type[PartitionSpec], *partitions: Any, **settings: Any) -> Any:
        if _STATE.into:
            partitions = tuple(map(translated, partitions))
            settings = {name: translated(value) for name, value in settings.items()}
        return original(cls, *partitions, **settings)

    owner: Any = PartitionSpec
    owner.__new__ = staticmethod(make)


def _hook_shapes() -> None:
    @functools.lru_cache(maxsize=256)
    def of(sizes: tuple[tuple[str, int], ...]) -> _Shape:
        return _Shape(sizes)

    # No `cached_property`, as jax's own is: jax gives equal meshes one object, which may keep the
    # sizes that were read before the script's names meant anything.
    owners: tuple[Any, ...] = (Mesh, AbstractMesh)
    for owner in owners:
        owner.shape = property(lambda mesh: of(mesh.shape_tuple))


def _with_names(function: Any, names: Sequence[str]) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _STATE.into:
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which raises an error about them
        for name in names:
            if name in given.arguments:
                given.arguments[name] = translated(given.arguments[name])
        return function(*given.args, **given.kwargs)

    return call


def split_names(
    names: Sequence[str], shape: Sequence[int], types: Any, splits: Sequence[AxisSplit]
) -> tuple[tuple[str, ...], tuple[int, ...], Any]:
    """Returns the names, sizes and types of a mesh of the script that is not searched, with each
    divided axis replaced by its parts: the first part has the size of the axis, the others have
    size 1."""
    into = names_in_place(splits)
    found: list[tuple[str, int, Any]] = []
    kinds = types if isinstance(types, tuple) else (types,) * len(names)
    for name, size, kind in zip(names, shape, cast("tuple[Any, ...]", kinds), strict=True):
        first, *rest = into.get(name, (name,))
        found += [(first, size, kind), *((other, 1, kind) for other in rest)]
    kept = tuple(kind for _, _, kind in found) if isinstance(types, tuple) else types
    return tuple(name for name, _, _ in found), tuple(size for _, size, _ in found), kept


def state_shardings(
    leaves: Sequence[Any], carried: Sequence[int], mesh: Mesh, splits: Sequence[AxisSplit]
) -> dict[int, NamedSharding]:
    """Returns, for each carried leaf that an axis leaves whole, the sharding by which its parts
    split it.

    Args:
      leaves: leaves of the step's arguments, with their shardings.
      carried: positions of the leaves that the step carries on.
    """
    found: dict[int, NamedSharding] = {}
    for position in carried:
        leaf = leaves[position]
        spec = _spec_on(leaf, mesh)
        before = spec
        for split in splits:
            spec = _with_parts(spec, leaf, mesh, split)
        if spec != before:
            found[position] = NamedSharding(mesh, PartitionSpec(*spec))
    return found


_Spec = tuple[tuple[str, ...], ...]


def _spec_on(leaf: Any, mesh: Mesh) -> _Spec:
    """Returns, for each dimension, the axes that split it; none for a leaf that is not on the
    mesh."""
    shape = leaf_shape(leaf)
    sharding: Any = getattr(leaf, "sharding", None)
    stated: Sequence[Any] = ()
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names:
        stated = entries_of(sharding.spec)
    parts = [part if isinstance(part, tuple) else (part,) if part else () for part in stated]
    return tuple(
        tuple(name for name in part if isinstance(name, str))
        for part in (*parts, *[()] * (len(shape) - len(parts)))
    )


def _with_parts(spec: _Spec, leaf: Any, mesh: Mesh, split: AxisSplit) -> _Spec:
    shape = leaf_shape(leaf)
    used = {name for part in spec for name in part}
    if used & set(split.into) or math.prod(shape) < LEAST_ELEMENTS:
        return spec
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
        return spec
    more = split.into[1:]
    times = math.prod(mesh.shape[name] for name in more)

    def left(dimension: int) -> int:
        return shape[dimension] // math.prod(mesh.shape[name] for name in spec[dimension])

    # Dimensions that are whole come first, then larger ones; of equal ones, the first.
    order = sorted(range(len(shape)), key=lambda one: (bool(spec[one]), -shape[one]))
    for dimension in order:
        if left(dimension) % times == 0:
            return tuple(
                (*part, *more) if number == dimension else part for number, part in enumerate(spec)
            )
    return spec
