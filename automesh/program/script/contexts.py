"""Entering the user's context around tracing and running, as often as needed (jax)."""

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

# jax knows a trace by the function and its arguments. What `build` hands to the script's functions
# by other roads (the thread-locals of Haliax and Flax, a global) is in no key of jax's: one plan's
# traces would serve another. Cheaper than `jax.clear_caches`, after which all is traced anew.
_call_of_build: Any = jax.make_user_context(default_value=None)
# The traces of a small model's step take some 2 MB, and jax keeps thousands.
MOST_CALLS = 32
_calls: set[Hashable] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """What is in force wherever a workload is traced and run.

    Attributes:
      mesh: that `build` left in force with `jax.set_mesh`.
      call: what `build` was called with: what jax traces under one call serves no other.
    """

    mesh: Mesh | None
    call: Hashable


@contextmanager
def traces_of(call: Hashable) -> Generator[None]:
    """Runs the body with the traces that jax has made for the same call of `build`, and no others.

    Beyond `MOST_CALLS`, all of them are forgotten.

    Args:
      call: what `build` is called with.
    """
    if call not in _calls and len(_calls) >= MOST_CALLS:
        _calls.clear()
        jax.clear_caches()
    _calls.add(call)
    with _call_of_build(call):
        yield


@contextmanager
def no_ambient_mesh() -> Generator[None]:
    """Runs the body without a mesh in force, and undoes any `jax.set_mesh` that the body leaves
    behind."""
    with _in_force(None):
        yield


def ambient_mesh() -> Mesh | None:
    """The mesh that `jax.set_mesh` has put in force, if any."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


@contextmanager
def entered(ambient: Ambient, context: Any) -> Generator[None]:
    """Enters what was in force for `build`, the mesh that it left behind among that, then the
    user's context, freshly made where it can be.

    Args:
      ambient: of the `Built` that the workload is from.
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
        # A `set_mesh` object works once, when made; what it put in force is known as the ambient
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
        # A generator-based one works once; those made by contextlib can be made anew.
        again: Callable[[], AbstractContextManager[Any]] | None = getattr(
            context, "_recreate_cm", None
        )
        return again() if isinstance(context, ContextDecorator) and again else context
    raise UsageError(
        f"the workload's `context` is {kind_of(context)}, which is no context manager",
        hint="give what you would write after `with`, or a function that returns it",
    )
