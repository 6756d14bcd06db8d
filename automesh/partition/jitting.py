"""`named_jit` and `fsdp`: `jax.jit` for functions of arrays with logical names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import keystr

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.mesh.layout.context import is_tracing
from automesh.mesh.layout.place import place
from automesh.partition.carriers import NamedLeaf, is_array, map_leaves
from automesh.partition.mapping import (
    FrozenMapping,
    axis_mapping,
    frozen,
    mapping_or_current,
    require_mesh,
    traces_keyed_by,
)
from automesh.partition.nouns import MeshLike, ResourceMapping
from automesh.partition.specs import spec_of

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
_STATIC_HINT = "pass arrays, or hashable values such as numbers, strings and frozen dataclasses"

# Splits the arguments of a call into arrays and the static part, which is a key of `jit`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A leaf that is no array, with a key for which 1, 1.0 and True are three programs.

    Attributes:
      kind: its type.
      key: equal for equal values: the bits of a float, since 0.0 == -0.0 and NaN != NaN.
      value: any hashable object.
    """

    kind: type
    key: Any
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWithoutArrays:
    """A tree without its arrays.

    Attributes:
      structure: of the whole tree, a PyTreeDef.
      leaves: the other leaves, and None for every array.
    """

    structure: Any
    leaves: tuple[Static | None, ...]

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with these arrays in place of None, in order."""
        rest = iter(arrays)
        return self.structure.unflatten(
            next(rest) if leaf is None else leaf.value for leaf in self.leaves
        )


def take_apart(tree: Any) -> tuple[list[Any], TreeWithoutArrays]:
    """Splits a tree into its arrays, in order, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    rest = tuple(None if is_array(leaf) else _static(leaf) for leaf in leaves)
    return arrays, TreeWithoutArrays(structure=structure, leaves=rest)


def check_hashable(tree: Any, parts: TreeWithoutArrays) -> None:
    """Checks that `jit` can use the static part as a key.

    Raises:
      WrongType: a leaf of the tree is neither an array nor hashable.
    """
    try:
        hash(parts)
    except TypeError as error:
        raise WrongType(_unhashable(tree), hint=_STATIC_HINT) from error


def donated_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], donate_args: Any, donate_kwargs: Any
) -> list[bool]:
    """Says for every leaf of `(args, kwargs)` whether it is donated.

    Args:
      donate_args: one bool for all, or a sequence with, for each argument, a bool, a tree of bools
        that is a prefix of the argument, or a function leaf -> bool; other arguments are not
        donated.
      donate_kwargs: the same by name, in a dict.

    Raises:
      UsageError: there are more entries than arguments, or an entry does not fit its argument.
      WrongType: the entry of a leaf is no bool.
    """
    chosen = _for_each_argument(donate_args, len(args))
    named = _for_each_name(donate_kwargs, kwargs)
    flags: list[bool] = []
    for index, (wish, arg) in enumerate(zip(chosen, args, strict=True)):
        flags += _flags(wish, arg, f"donate_args[{index}]")
    # A dict is flattened in the order of its keys, sorted.
    for name in sorted(kwargs):
        flags += _flags(named.get(name, False), kwargs[name], f"donate_kwargs[{name!r}]")
    return flags


def _static(leaf: Any) -> Static:
    return Static(kind=type(leaf), key=_key(leaf), value=leaf)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return leaf.hex()
    return (leaf.real.hex(), leaf.imag.hex()) if isinstance(leaf, complex) else leaf


def _unhashable(tree: Any) -> str:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(leaf):
            try:
                hash(leaf)
            except TypeError:
                where = keystr(path[1:], simple=True, separator="/")
                return f"argument `{where}` is neither an array nor hashable, but {kind_of(leaf)}"
    return "the arguments have a tree whose static part is not hashable"


def _for_each_argument(wish: Any, count: int) -> list[Any]:
    if wish is None or isinstance(wish, bool):
        return [bool(wish)] * count
    if not isinstance(wish, tuple | list):
        raise WrongType(
            f"`donate_args` must be a bool or a tuple with an entry for each argument, got {wish!r}"
        )
    wishes: list[Any] = list(wish)
    if len(wishes) > count:
        raise UsageError(
            f"expected {count} donate_args, got {len(wishes)}",
            hint="give one entry for each positional argument",
        )
    return wishes + [False] * (count - len(wishes))


def _for_each_name(wish: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if wish is None or isinstance(wish, bool):
        return dict.fromkeys(kwargs, bool(wish))
    if not isinstance(wish, Mapping):
        raise WrongType(f"`donate_kwargs` must be a bool or a dict by argument name, got {wish!r}")
    named: Mapping[str, Any] = wish
    for name in named:
        if name not in kwargs:
            raise UsageError(
                f"`donate_kwargs` names `{name}`, which the call does not pass by name"
                f"{did_you_mean(name, kwargs)}",
                hint=f"it passes by name: {', '.join(kwargs) or 'nothing'}",
            )
    return named


def _flags(wish: Any, argument: Any, where: str) -> list[bool]:
    leaves = jax.tree.leaves(argument)
    if isinstance(wish, bool):
        return [wish] * len(leaves)
    try:
        spread: list[Any] = jax.tree.leaves(jax.tree.broadcast(wish, argument))
    except ValueError as error:
        raise UsageError(
            f"`{where}` does not fit its argument: {str(error).splitlines()[0]}",
            hint="give a bool, or a tree of bools with the structure of the argument",
        ) from error
    return [
        _flag(one(leaf) if callable(one) else one, where)
        for one, leaf in zip(spread, leaves, strict=True)
    ]


def _flag(wish: object, where: str) -> bool:
    # Comparisons of sizes may give NumPy's bools.
    if not isinstance(wish, bool | np.bool_):
        raise WrongType(
            f"`{where}` must say by bools what is donated, got {kind_of(wish)}: {wish!r}",
            hint="give a bool, a tree of bools, or a function leaf -> bool",
        )
    return bool(wish)


# The result of `named_jit`: it places arguments and results, and passes the static part to `jit`.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The key of a compiled call: everything but its arrays.

    Attributes:
      parts: of `(function, args, kwargs)`.
      donated: for every array in them, whether it is donated.
      axis, out: the mappings inside the function and for its result.
      mesh: that of the result; None if the result is not split.
    """

    parts: TreeWithoutArrays
    donated: tuple[bool, ...]
    axis: FrozenMapping | None
    out: FrozenMapping | None
    mesh: MeshLike | None


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """The parts of a result that are no arrays: for `jit` part of its structure."""

    parts: TreeWithoutArrays


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
        """Lowers the function for these arguments; any array may be abstract."""
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
        # If the function is a module, its own arrays are not donated.
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
    """Makes a separate function for `jit`, so that profiles show the name of `fn`."""

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
    def constrain(leaf: NamedLeaf) -> Any:
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
    """Places arguments as `mapping` says, and frees the sources of those with an id in `donated`.

    Arguments that cannot be placed raise an error before anything has moved.
    """
    wanted: list[NamedSharding | None] = []

    def note(leaf: NamedLeaf) -> Any:
        wanted.append(_wanted_sharding(leaf, mapping, mesh))
        return leaf.rebuild(leaf.array)

    map_leaves(given, note)
    rest = iter(wanted)

    def put(leaf: NamedLeaf) -> Any:
        sharding = next(rest)
        if sharding is None:
            return leaf.rebuild(leaf.array)
        moved = place(leaf.array, sharding, path=leaf.path)
        if id(leaf.array) in donated and moved is not leaf.array:
            _free_source(leaf.array, sharding)
        return leaf.rebuild(moved)

    return cast("tuple[Any, Any]", map_leaves(given, put))


def _wanted_sharding(
    leaf: NamedLeaf, mapping: ResourceMapping, mesh: MeshLike
) -> NamedSharding | None:
    """Returns the wanted sharding of an argument; None if it stays where it is."""
    if not leaf.is_array:
        return None
    if leaf.names is not None:
        return NamedSharding(mesh, spec_of(leaf.named_shape(), mapping, mesh=mesh))
    current = getattr(leaf.array, "sharding", None)
    alone = current is None or isinstance(current, SingleDeviceSharding)
    return NamedSharding(mesh, PartitionSpec()) if alone else None


def _donated(given: tuple[Any, Any], flags: Sequence[bool]) -> Container[int]:
    """Returns the ids of donated arrays, except those that are passed a second time."""
    leaves = jax.tree.leaves(given)
    times = Counter(map(id, leaves))
    pairs = zip(leaves, flags, strict=True)
    return {id(leaf) for leaf, flag in pairs if flag and times[id(leaf)] == 1}


def _free_source(array: Any, moved: NamedSharding) -> None:
    """Frees a donated array that has been copied.

    Where a device has the same part before and after, jax shares the memory instead of copying; the
    donation to the program frees that.
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
    # Other libraries' code inside only finds the mesh in jax's own context.
    mesh = call.mesh
    if not isinstance(mesh, Mesh) or is_tracing() or jax.sharding.get_mesh() == mesh:
        return nullcontext()
    return jax.set_mesh(mesh)


@overload
def named_jit(
    fn: Callable[P, R],
    axis_resources: ResourceMapping | None = None,
    *,
    in_axis_resources: ResourceMapping | None = None,
    out_axis_resources: ResourceMapping | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    mesh: MeshLike | None = None,
    keep_unused: bool = False,
    backend: str | None = None,
    inline: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> NamedJit[P, R]: ...


@overload
def named_jit(
    fn: None = None,
    axis_resources: ResourceMapping | None = None,
    *,
    in_axis_resources: ResourceMapping | None = None,
    out_axis_resources: ResourceMapping | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    mesh: MeshLike | None = None,
    keep_unused: bool = False,
    backend: str | None = None,
    inline: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, R]], NamedJit[P, R]]: ...


def named_jit(
    fn: Callable[P, R] | None = None,
    axis_resources: ResourceMapping | None = None,
    *,
    in_axis_resources: ResourceMapping | None = None,
    out_axis_resources: ResourceMapping | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    mesh: MeshLike | None = None,
    keep_unused: bool = False,
    backend: str | None = None,
    inline: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> NamedJit[P, R] | Callable[[Callable[P, R]], NamedJit[P, R]]:
    """Applies `jax.jit` to a function of arrays with logical names; also a decorator.

    Arguments that are no arrays are static. In the result, arrays with names follow
    `out_axis_resources`, plain ones are replicated. An nnx module goes in and out as its `State`.

    Example:
      >>> import jax
      >>> from automesh.partition import named_jit
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> double = named_jit(lambda x: 2 * x, {"batch": "data"}, mesh=mesh)
      >>> double(jax.numpy.ones(8)).sharding.is_fully_replicated
      True

    Args:
      fn: a function, or a callable module, whose arrays are then arguments too.
      axis_resources: the `axis_mapping` inside the function; default: that of the context.
      in_axis_resources: the arguments are first moved to this mapping; without it they stay where
        they are. Plain arrays stay where they are, unless on one device: then they are replicated.
      out_axis_resources: default: `axis_resources`.
      donate_args: for all arguments a bool, or for each one a bool, a tree of bools or a function
        leaf -> bool. An array that `in_axis_resources` moves is freed as soon as it is copied.
      donate_kwargs: the same by name.
      mesh: default: that of the context.
      keep_unused: see `jax.jit`; `backend`, `inline` and `compiler_options` as well.

    Returns:
      The jitted function; its `lower(...)` is that of `jax.jit`.

    Raises:
      UsageError: when called: a mapping without a mesh, or more `donate_args` than arguments.
      IllegalMapping: when called: see `shard`.
      WrongType: `fn` cannot be called, an argument is neither an array nor hashable, or donation is
        stated by other values than bools.
    """
    if fn is not None and not callable(fn):
        raise WrongType(
            f"`named_jit` needs a function, got {kind_of(fn)}",
            hint="give mappings by name: named_jit(fn, axis_resources={...})",
        )
    jit = functools.partial(
        jax.jit,
        static_argnums=2,
        donate_argnums=0,
        keep_unused=keep_unused,
        inline=bool(inline),
        compiler_options=None if compiler_options is None else dict(compiler_options),
        **({} if backend is None else {"backend": backend}),
    )
    wrap: Any = functools.partial(
        NamedJit[P, R],
        axis=axis_resources,
        into=in_axis_resources,
        out=out_axis_resources,
        donate=(donate_args, donate_kwargs),
        mesh=mesh,
        jit=jit,
    )
    return wrap if fn is None else wrap(fn)


@overload
def fsdp(
    fn: F,
    parameter_mapping: ResourceMapping,
    compute_mapping: ResourceMapping,
    *,
    mesh: MeshLike | None = None,
) -> F: ...


@overload
def fsdp(
    parameter_mapping: ResourceMapping,
    compute_mapping: ResourceMapping,
    *,
    mesh: MeshLike | None = None,
) -> Callable[[F], F]: ...


def fsdp(*args: Any, mesh: MeshLike | None = None, **kwargs: Any) -> Any:
    """Applies `named_jit` for fully sharded parameters, with another mapping for computing.

    Arguments and result follow `parameter_mapping`; inside the function `compute_mapping` holds.
    Also a decorator, without `fn`; all may be given by name.

    Example:
      >>> import jax
      >>> from automesh.partition import current_thread_local_mapping, fsdp
      >>> mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> @fsdp(parameter_mapping={"embed": "data"}, compute_mapping={"batch": "data"}, mesh=mesh)
      ... def step(x):
      ...     print(current_thread_local_mapping())
      ...     return x
      >>> step(jax.numpy.ones(8)).shape
      {'batch': 'data'}
      (8,)

    Args:
      fn: the function.
      parameter_mapping: of arguments and result.
      compute_mapping: inside the function.
      mesh: default: that of the context.

    Raises:
      WrongType: a mapping is missing, or given twice.
    """
    names = ("fn", "parameter_mapping", "compute_mapping")
    is_decorator = "fn" not in kwargs and not (args and callable(args[0]))
    places = names[1:] if is_decorator else names
    given = dict(zip(places, args, strict=False))
    twice = [name for name in given if name in kwargs]
    unknown = [name for name in kwargs if name not in names]
    missing = [name for name in places if name not in given and name not in kwargs]
    if twice or unknown or missing or len(args) > len(places):
        raise WrongType(
            "`fsdp` takes (fn, parameter_mapping, compute_mapping), or the mappings alone as a "
            f"decorator; {_what_is_wrong(args, twice, unknown, missing)}",
            hint="write fsdp(fn, parameter_mapping={...}, compute_mapping={...})",
        )
    given |= kwargs
    decorate: Any = named_jit(
        axis_resources=given["compute_mapping"],
        in_axis_resources=given["parameter_mapping"],
        out_axis_resources=given["parameter_mapping"],
        mesh=mesh,
    )
    return decorate if is_decorator else decorate(given["fn"])


def _what_is_wrong(
    args: Sequence[Any], twice: Sequence[str], unknown: Sequence[str], missing: Sequence[str]
) -> str:
    for names, fault in ((twice, "twice"), (unknown, "though it does not take it")):
        if names:
            return f"got `{names[0]}` {fault}"
    return f"`{missing[0]}` is missing" if missing else f"got {len(args)} arguments"
