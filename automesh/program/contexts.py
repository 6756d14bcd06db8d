"""Entering the user's context around tracing and running, as often as needed (jax)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError, kind_of


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
def entered(ambient: Mesh | None, context: Any) -> Generator[None]:
    """Enters the mesh that `build` left in force, then the user's context, freshly made where it
    can be.

    Args:
      ambient: what `ambient_mesh` gave right after `build`.
      context: `Workload.context`.

    Raises:
      UsageError: `context` is no context manager and no function that returns one.
    """
    with ExitStack() as stack:
        stack.enter_context(_in_force(ambient))
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
