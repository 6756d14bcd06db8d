"""Replaces functions of jax that a run without arrays cannot call: those that make an array of
parts, and those that refuse to work under a trace (jax)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from automesh.program.capture.abstract.arrays import AbstractArray, described, is_abstract
from automesh.program.capture.abstract.placements import known_sharding
from automesh.program.capture.abstract.record import STATE

_CORE: Any = importlib.import_module("jax._src.core")


def _outside(function: Any) -> Any:
    """Returns a function that works under our trace, though jax refuses to call it under any
    trace."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if STATE.trace is None or _CORE.trace_ctx.trace is not STATE.trace:
            return function(*args, **kwargs)
        with _CORE.set_current_trace(_CORE.eval_trace):
            return function(*args, **kwargs)

    return call


def hook_meshes() -> None:
    """Lets a script set and read the mesh in force under the trace of a run without arrays."""
    owner: Any = jax.set_mesh
    owner.__init__ = _outside(owner.__init__)
    internals: Any = importlib.import_module("jax._src.sharding_impls")
    public: Any = jax.sharding
    public.get_mesh = internals.get_mesh = _outside(internals.get_mesh)


def hook_arrays() -> None:
    """Replaces the functions that make an array of parts: they return the whole array without
    data."""
    owner: Any = jax
    for name, made in (
        ("make_array_from_callback", _of_callback),
        ("make_array_from_process_local_data", _of_process),
        ("make_array_from_single_device_arrays", _of_parts),
    ):
        original = getattr(jax, name)
        setattr(owner, name, _instead(original, made))


def _instead(original: Any, made: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if STATE.trace is None:
            return original(*args, **kwargs)
        return made(*args, **kwargs)

    return call


def _placed(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """Returns an array of unknown values with a sharding. jax makes it of zeros, so that it has the
    type that jax gives it."""
    made = jax.device_put(jax.numpy.zeros(tuple(shape), dtype), sharding)
    if is_abstract(made):
        made.number = made.later = None
    return made


def _of_callback(shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
    to = getattr(sharding, "sharding", sharding)
    if dtype is None:
        index = next(iter(to.devices_indices_map(tuple(shape)).values()))
        dtype = np.asarray(data_callback(index)).dtype
    return _placed(shape, dtype, to)


def _of_process(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
    def one(to: Any, local: Any, stated: Any = None) -> Any:
        whole = tuple(np.shape(local)) if stated is None else tuple(stated)
        # Every process has its own rows.
        if stated is None and whole and not to.is_fully_replicated:
            whole = (whole[0] * jax.process_count(), *whole[1:])
        whole = tuple(
            size if size is not None else own
            for size, own in zip(whole, np.shape(local), strict=True)
        )
        return _placed(whole, local.dtype, to)

    if isinstance(sharding, Sharding):
        if global_shape is None or all(isinstance(size, int | None) for size in global_shape):
            return jax.tree.map(lambda local: one(sharding, local, global_shape), local_data)
        return jax.tree.map(
            lambda local, shape: one(sharding, local, shape), local_data, global_shape
        )
    return jax.tree.map(one, sharding, local_data)


def _of_parts(shape: Any, sharding: Any, arrays: Any, *, dtype: Any = None) -> Any:
    return _placed(shape, dtype or arrays[0].dtype, sharding)


def hook_likes() -> None:
    """Makes `zeros_like` and the like put their result where their argument is, as they do unless
    it is a tracer."""
    internals: Any = importlib.import_module("jax._src.lax.lax")
    public: Any = jax.lax
    original = internals.full_like

    @functools.wraps(original)
    def full_like(x: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(x, fill_value, *args, **kwargs)
        if not is_abstract(x):
            return made
        given = {**dict(zip(("dtype", "shape", "sharding"), args, strict=False)), **kwargs}
        to = known_sharding(x)
        if given.get("sharding") is None and given.get("shape") is None and to is not None:
            return jax.device_put(made, to)
        return made

    internals.full_like = public.full_like = full_like


def mapped(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function returns that `jax.pmap` made: arrays without data if an argument has
    none, else the result of its run."""
    if not any(map(is_abstract, jax.tree.leaves((args, kwargs)))):
        with _CORE.set_current_trace(_CORE.eval_trace):
            return inner(*args, **kwargs)
    stated, keywords = described((args, kwargs))
    with _CORE.set_current_trace(_CORE.eval_trace):
        outs = jax.eval_shape(inner, *stated, **keywords)
    return jax.tree.map(lambda out: AbstractArray(STATE.trace, _CORE.typeof(out), None), outs)
