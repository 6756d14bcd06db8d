"""Enters the user's context around tracing and running, as often as needed (jax)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError, kind_of

# jax caches a trace by the function and its arguments. Values that `build` passes to the script's
# functions in other ways (thread-locals of Haliax and Flax, a global) are not in the key, so one
# plan's trace would be used for another. This is cheaper than `jax.clear_caches`, after which
# everything is traced again.
_call_of_build: Any = jax.make_user_context(default_value=None)
# The traces of a small model's step take some 2 MB, and jax keeps thousands.
MOST_CALLS = 32
_calls: set[Hashable] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """The context in which a workload is traced and run.

    Attributes:
      mesh: the mesh that `build` left set by `jax.set_mesh`.
      call: the arguments of `build`; jax's traces for one call are not used for another.
    """

    mesh: Mesh | None
    call: Hashable


@contextmanager
def traces_of(call: Hashable) -> Generator[None]:
    """Lets jax use only traces of the same call of `build` while the body runs.

    After `MOST_CALLS` calls, all traces are dropped.

    Args:
      call: the arguments of `build`.
    """
    if call not in _calls and len(_calls) >= MOST_CALLS:
        _calls.clear()
        jax.clear_caches()
    _calls.add(call)
    with _call_of_build(call):
        yield


@contextmanager
def no_ambient_mesh() -> Generator[None]:
    """Runs the body without a mesh set, and afterwards undoes any `jax.set_mesh` of the body."""
    with _in_force(None):
        yield


def ambient_mesh() -> Mesh | None:
    """Returns the mesh that is set by `jax.set_mesh`, if any."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


@contextmanager
def entered(ambient: Ambient, context: Any) -> Generator[None]:
    """Enters the context of `build`, with the mesh that it left set, then the user's context, which
    is made again if possible.

    Args:
      ambient: context of the workload's `Built`.
      context: `Workload.context`.

    Raises:
      UsageError: `context` is no context manager and no function that returns one.
    """
    with ExitStack() as stack:
        stack.enter_context(traces_of(ambient.call))
        stack.enter_context(_in_force(ambient.mesh))
        stack.enter_context(_fresh(context))
        yield


@contextmanager
def _in_force(mesh: Mesh | None) -> Generator[None]:
    # `jax.set_mesh` takes effect when it is created and restores on exit.
    with jax.set_mesh(mesh):
        yield


def _fresh(context: Any) -> AbstractContextManager[Any]:
    if context is None or isinstance(context, jax.set_mesh):
        # A `set_mesh` object works only once, when it is made; its mesh is known as the ambient
        # mesh.
        return nullcontext()
    if not isinstance(context, AbstractContextManager) and callable(context):
        made: Any = context()
        if isinstance(made, AbstractContextManager):
            return made
        raise UsageError(
            f"the workload's `context` returned {kind_of(made)}, which is no context manager",
            hint="return what you would write after `with`",
        )
    if isinstance(context, AbstractContextManager):
        # A generator-based one works only once; those of contextlib can be made again.
        again: Callable[[], AbstractContextManager[Any]] | None = getattr(
            context, "_recreate_cm", None
        )
        return again() if isinstance(context, ContextDecorator) and again else context
    raise UsageError(
        f"the workload's `context` is {kind_of(context)}, which is no context manager",
        hint="give what you would write after `with`, or a function that returns it",
    )
