"""Applies a rule to whatever a script calls as its step: functions, methods, partials, and steps of
`jax.jit`, `nnx.jit` or `eqx.filter_jit` (jax).

The wrappers of libraries take objects apart, call a function of `jax.jit`, and put the objects
together again. This function is exchanged while the wrapper runs, so that all else stays theirs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError, WrongType
from automesh.mesh.mapping import MappedAxes
from automesh.mesh.rules.shardings import Shardings
from automesh.program.infer.search.applied import AppliedStep, said_kind
from automesh.program.lower.static_args import is_jitted
from automesh.program.script.module_objects import filters_arrays, is_nnx_jitted

# Where wrappers keep the function of `jax.jit`: Flax nnx 0.10 to 0.12, Equinox 0.11 to 0.13.
_INSIDE = ("jitted_fn", "_cached")


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class AppliedWrapper:
    """A step that a library has jitted, on a mesh.

    Attributes:
      function: what the script calls.
      wrapper: the object of the library in it.
      attribute: where it keeps the function of `jax.jit`.
      inner: this function, applied.
      first, keywords: arguments that `function` has been given already, as `self`.
    """

    function: Callable[..., Any]
    wrapper: Any
    attribute: str
    inner: AppliedStep
    first: tuple[Any, ...] = ()
    keywords: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; moves arguments to the rule's shardings if necessary."""
        with self._exchanged():
            return self.wrapper(*self.first, *args, **{**self.keywords, **kwargs})

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Returns the step with an object as its first argument, for a step that is a method."""
        return self if owner is None else types.MethodType(self, owner)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original step, which has the parameters of this callable."""
        return self.function

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step, as the library does."""
        with self._exchanged():
            return self.wrapper.lower(*self.first, *args, **{**self.keywords, **kwargs})

    @contextmanager
    def _exchanged(self) -> Generator[None]:
        own = getattr(self.wrapper, self.attribute)
        # Equinox's modules are frozen.
        object.__setattr__(self.wrapper, self.attribute, self.inner)
        try:
            yield
        finally:
            object.__setattr__(self.wrapper, self.attribute, own)


def apply_to(
    step: Any,
    *,
    mesh: Mesh,
    shardings: Shardings,
    mapping: Mapping[str, MappedAxes],
    options: Mapping[str, Any],
) -> AppliedStep | AppliedWrapper:
    """Gives a step the shardings of a rule.

    Args:
      step: a function, or one that `jax.jit`, `nnx.jit` or `eqx.filter_jit` has made; or a method
        or a partial of such a one.
      options: options for `jax.jit`, if the step is a plain function.

    Raises:
      WrongType: the step is no function.
      UsageError: the rule has no shardings; options are given for a jitted function; or the step is
        jitted by something else.
    """
    if not callable(step):
        raise WrongType(
            f"the step must be a function, got {said_kind(step)}",
            hint="give the training step: config.apply(train_step)",
        )
    if not shardings:
        raise UsageError(
            "the rule has no shardings that a step could be given",
            hint="`automesh search train.py --infer` writes them for a script that makes no mesh",
        )
    core, first, keywords = _without_first(step)
    is_wrapped = is_nnx_jitted(core) or filters_arrays(core)
    if options and (is_jitted(core) or is_wrapped):
        raise UsageError(
            f"the step is jitted already, so that `{next(iter(options))}` comes too late",
            hint="give it to `jax.jit`, or give `config.apply` the plain function",
        )
    plain = AppliedStep(
        function=step, inner=step, core=step, mesh=mesh, shardings=shardings, mapping=mapping
    )
    if is_wrapped:
        attribute = next((name for name in _INSIDE if is_jitted(getattr(core, name, None))), "")
        if not attribute:
            raise UsageError(
                f"the step is jitted by {type(core).__module__}.{type(core).__qualname__}, which "
                "`config.apply` does not know",
                hint="give it a function of jax.jit, nnx.jit or eqx.filter_jit, or the plain one",
            )
        inner = getattr(core, attribute)
        function = getattr(inner, "__wrapped__", inner)
        return AppliedWrapper(
            function=step,
            wrapper=core,
            attribute=attribute,
            inner=replace(plain, inner=inner, core=function, function=function),
            first=first,
            keywords=keywords,
        )
    if is_jitted(core):
        return replace(
            plain,
            inner=core,
            core=getattr(core, "__wrapped__", core),
            first=first,
            keywords=keywords,
        )
    return replace(plain, inner=jax.jit(step, **options))


def _without_first(step: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the jitted function that a method or a partial calls, with the arguments that it
    adds; the step itself if there is none in it."""
    core: Any = step
    first: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    for _ in range(16):
        if isinstance(core, types.MethodType):
            first, core = (core.__self__, *first), core.__func__
            continue
        if not isinstance(core, functools.partial) and not _is_library_partial(core):
            break
        part = cast("functools.partial[Any]", core)
        first, keywords = (*part.args, *first), {**part.keywords, **keywords}
        core = part.func
    if is_jitted(core) or is_nnx_jitted(core) or filters_arrays(core):
        return core, first, keywords
    return step, (), {}


def _is_library_partial(step: Any) -> bool:
    """Whether a value is an `eqx.Partial`: a method under `eqx.filter_jit` is one."""
    return filters_arrays(step) and all(hasattr(step, one) for one in ("func", "args", "keywords"))
