"""`named_jit` and `fsdp`: `jax.jit` for functions of arrays with logical names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from automesh.errors import WrongType, kind_of
from automesh.partition.jitted import NamedJit
from automesh.partition.nouns import MeshLike, ResourceMapping

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


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
    """`jax.jit` for a function of arrays with logical names; also a decorator.

    Arguments that are no arrays are static. Of the result, arrays with names follow
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
      in_axis_resources: where the arguments are moved to first; without it they stay where they
        are. Plain arrays stay where they are, unless on one device: then they are replicated.
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
      WrongType: `fn` cannot be called, an argument is neither an array nor hashable, or something
        else than bools says what is donated.
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
    """`named_jit` for fully sharded parameters: kept in one mapping, computed with in another.

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
