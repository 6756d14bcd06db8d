"""Finds the user's names of the arrays that a jitted function gets (jax).

`jax.jit` names them by their positions. Wrappers such as `eqx.filter_jit` and `nnx.jit` hand it
flat lists, or parts of the user's objects, so arrays are followed by identity: to the arguments of
the function that the user's own line calls, with the names of its parameters.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import jax
import numpy as np

from automesh.package import is_users_file
from automesh.program.capture.frames import describe_function
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import SourceLine
from automesh.program.lower.static_args import Split, is_ref

# Parts of a path that a library adds between the user's objects and their arrays.
_ADDED = re.compile(r"\.(raw_value|value|get_raw_value\(\))$|\['?<flat index \d+>'?\]$")
_MANY = 10_000
_VARARGS, _VARKEYWORDS = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


def describe_call(call: Call) -> tuple[str, SourceLine]:
    """Returns the name of the function that the user has jitted, and the line where its code
    begins."""
    name, place = describe_function(call.function)
    # A loop is named after its body, but is not one turn of it.
    after = f"_{call.loop[0]}" if call.loop is not None else ""
    if place.file:
        return name + after, place
    for function, _, _ in _library_calls():
        inner, found = describe_function(function)
        if found.file:
            return inner + after, found
    return name + after, place


def leaf_names(call: Call, split: Split) -> tuple[str, ...]:
    """Returns, for each leaf of the dynamic arguments of a call, the user's name for it, such as
    `model.layers[0].weight`, `params['up']` or `x`."""
    by_place = [name for name, _ in _named(call.function, call.args, call.kwargs, split)]
    leaves = jax.tree.leaves(split.dynamic(call.args, call.kwargs))
    if len(by_place) != len(leaves):
        by_place = [name for name, _ in split.named_leaves(*split.dynamic(call.args, call.kwargs))]
    by_identity: dict[int, str] = {}
    for function, args, kwargs in _library_calls():
        for name, leaf in _named(function, args, kwargs, Split()):
            if isinstance(leaf, (jax.Array, np.ndarray)) or is_ref(leaf):
                by_identity.setdefault(id(leaf), _ADDED.sub("", name))
    return tuple(
        by_identity.get(id(leaf), name) for name, leaf in zip(by_place, leaves, strict=True)
    )


def _named(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], split: Split
) -> Iterator[tuple[str, Any]]:
    """Yields each leaf of the arguments with a name: that of its parameter and its path in it."""
    for name, value in _by_parameter(function, args, kwargs, split):
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            yield name + jax.tree_util.keystr(path), leaf


def _by_parameter(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], split: Split
) -> Iterator[tuple[str, Any]]:
    """Yields the dynamic arguments with their names, in the order in which jax flattens them."""
    names = parameter_names(function, len(args))
    for place, arg in enumerate(args):
        if place not in split.positions:
            yield names[place], arg
    # jax sorts keywords, as it does all dicts.
    for name in sorted(set(kwargs) - set(split.names)):
        yield name, kwargs[name]


def parameter_names(function: Any, count: int) -> list[str]:
    """Returns the names that a function has for its positional arguments."""
    names: list[str] = []
    rest = ""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind == parameter.VAR_POSITIONAL:
            rest = parameter.name
    more = range(max(count - len(names), 0))
    return [*names, *(f"{rest or 'args'}[{k if rest else k + len(names)}]" for k in more)][:count]


def _library_calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yields the calls of wrappers between the user's line and `jax.jit`, the user's own call
    first: the wrapped function, and the arguments that the wrapper got for it."""
    frames: list[FrameType] = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        code = frame.f_code
        if not code.co_flags & _VARARGS or not code.co_argcount:
            continue
        count = code.co_argcount + code.co_kwonlyargcount
        wrapper = frame.f_locals.get(code.co_varnames[0])
        args = frame.f_locals.get(code.co_varnames[count])
        kwargs: Any = {}
        if code.co_flags & _VARKEYWORDS:
            kwargs = frame.f_locals.get(code.co_varnames[count + 1])
        # The parameters of a compiled function have no names.
        is_jax = isinstance(wrapper, jax.stages.Compiled)
        if (
            callable(wrapper)
            and not is_jax
            and isinstance(args, tuple)
            and isinstance(kwargs, dict)
        ):
            yield (
                wrapper,
                cast("tuple[Any, ...]", args),
                cast("dict[str, Any]", kwargs),
            )


def _variables_at(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yields the variables of a function, the variables of its module that it names, and the
    attributes of its objects, such as `self.params`."""
    known = dict(frame.f_locals)
    named = {
        name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals
    }
    for name, value in (named | known).items():
        yield name, value
        module = sys.modules.get(type(value).__module__)
        file = getattr(module, "__file__", None) or "<"
        if is_users_file(file) and jax.tree_util.all_leaves([value]):
            for attribute, part in getattr(value, "__dict__", {}).items():
                yield f"{name}.{attribute}", part


def variables_like(forms: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the variables in scope at the user's line that hold arrays of all these shapes and
    types, each with its arrays."""
    wanted = Counter(forms)
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not wanted:
        return
    for name, value in _variables_at(frame):
        if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
            continue
        if name.startswith(("_", ".")):  # `.0` is what a comprehension goes through.
            continue
        # A data set as a list of rows is no state, and takes long to look through.
        if isinstance(value, (list, tuple, dict)) and len(cast("Any", value)) > _MANY:
            continue
        leaves = [
            leaf
            for leaf in jax.tree.leaves(value)
            if isinstance(leaf, (jax.Array, np.ndarray)) and hasattr(leaf, "dtype")
        ]
        if wanted <= Counter((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves):
            yield name, leaves
