"""Marks on values, and tasks on names of scopes: both define where a loss is cut into stages
(jax)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from automesh.errors import UsageError, WrongType, check_type, kind_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Marks are names of `checkpoint_name`, an identity that survives every transformation of jax.
_MARK = "automesh.stage_boundary"
_TASK = "automesh.task"
_MARK_NAME = re.compile(re.escape(_MARK) + r":(\d+):(\d+)")
_TASK_NAME = re.compile(re.escape(_TASK) + r":(\d+):.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRule:
    """A rule that assigns scopes to stages; see `register_task`."""

    pattern: re.Pattern[str]
    stage: int | Callable[[re.Match[str]], int]

    def stage_of(self, scope: str) -> int | None:
        """Returns the stage of a scope's name; None if the rule does not match."""
        match = self.pattern.fullmatch(scope)
        if match is None:
            return None
        stage: Any = self.stage if isinstance(self.stage, int) else self.stage(match)
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise UsageError(
                f"the task rule `{self.pattern.pattern}` gives {stage!r} for the scope `{scope}`; "
                "a stage is an int from 0"
            )
        return stage


TaskRules = tuple[TaskRule, ...]
_RULES: ContextVar[TaskRules] = ContextVar("automesh_task_rules", default=())


def stage_boundary(x: T) -> T:
    """Marks the end of a stage of a pipeline: the next stage continues with `x`.

    In a loss that is not run as a pipeline this does nothing.

    Args:
      x: a tree of arrays. All later work that depends on the result belongs to a later stage.

    Returns:
      The same tree; the loss must use this one from here on.

    Raises:
      UsageError: there are no arrays in `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import pipeline
      >>> def loss(params, batch):
      ...     hidden = jnp.tanh(batch["x"] @ params["first"])
      ...     hidden = pipeline.stage_boundary(hidden)
      ...     return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)
      >>> params = {"first": jnp.ones((4, 4)), "second": jnp.ones((4, 1))}
      >>> loss(params, {"x": jnp.zeros((8, 4)), "y": jnp.zeros((8, 1))}).item()
      0.0
    """
    leaves, structure = jax.tree.flatten(x)
    if not leaves:
        raise UsageError(
            f"`stage_boundary` got {kind_of(x)} without arrays",
            hint="give it what the next stage goes on with, and go on with what it returns",
        )
    marked = [
        checkpoint_name(leaf, f"{_MARK}:{place}:{len(leaves)}") for place, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, marked)


def read_mark(name: object) -> tuple[int, int] | None:
    """Reads a name in a program: the index of a leaf, and the number of leaves, of a mark; None if
    the name is no mark."""
    match = _MARK_NAME.fullmatch(name) if isinstance(name, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def task(fun: Callable[P, R], name: str | None = None, *, stage: int) -> Callable[P, R]:
    """Makes a function that one stage of a pipeline runs, as MultiMesh's tasks do.

    Args:
      fun: any function of arrays; its backward pass belongs to the same stage.
      name: a name for people; default: the name of `fun`.
      stage: the stage, from 0; several tasks may have the same one. Work outside of tasks is done
        on the stage that has its arguments.

    Raises:
      WrongType, UsageError: the stage is no int from 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from automesh import pipeline
      >>> first = pipeline.task(jnp.tanh, stage=0)
      >>> second = pipeline.task(lambda x, w: jnp.mean(x @ w), name="head", stage=1)
      >>> float(second(first(jnp.zeros((2, 4))), jnp.ones((4, 1))))
      0.0
    """
    if not callable(fun):
        raise WrongType(f"`task` takes a function, got {kind_of(fun)}")
    check_type(stage, int, "`stage` of a task must be an int")
    if stage < 0:
        raise UsageError(f"`stage` of a task is an int from 0, got {stage}")
    label = re.sub(r"\W+", "_", name or getattr(fun, "__name__", type(fun).__name__))

    @wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(f"{_TASK}:{stage}:{label}"):
            return fun(*args, **kwargs)

    return run


@contextlib.contextmanager
def register_task(pattern: str, stage: int | Callable[[re.Match[str]], int]) -> Generator[None]:
    """Cuts a loss by the names of its scopes, without a change to the model.

    `microbatch` and `train_step` keep the rules in force where they are called. The first rule
    that matches wins.

    Args:
      pattern: a regex for a whole part of a scope's name: the argument of `jax.named_scope`, or the
        name of a Flax module.
      stage: the stage, from 0, or a function that returns it for the match.

    Raises:
      WrongType: an argument has another type.
      UsageError: `pattern` is no regex.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from automesh import pipeline
      >>> def loss(params, batch):
      ...     for number, weight in enumerate(params):
      ...         with jax.named_scope(f"layers_{number}"):
      ...             batch = jnp.tanh(batch @ weight)
      ...     return jnp.mean(batch**2)
      >>> mesh = pipeline.MpmdMesh(jax.sharding.Mesh(jax.devices()[:2], ("pp",)))
      >>> with pipeline.register_task(r"layers_(\\d+)", lambda match: int(match[1]) // 2):
      ...     gradients = pipeline.microbatch(loss, mesh=mesh, num_microbatches=2)
      >>> value, _ = gradients([jnp.eye(4)] * 4, jnp.zeros((8, 4)))
      >>> float(value)
      0.0
    """
    check_type(pattern, str, "the pattern of a task must be a string")
    if not callable(stage):
        check_type(stage, int, "`stage` of a task must be an int or a function")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"`{pattern}` is not a regular expression: {error}") from error
    token = _RULES.set((*_RULES.get(), TaskRule(pattern=compiled, stage=stage)))
    try:
        yield
    finally:
        _RULES.reset(token)


def rules_in_force() -> TaskRules:
    """Returns the rules of all enclosing `register_task` contexts, outermost first."""
    return _RULES.get()


def find_task(scopes: Sequence[str], rules: TaskRules) -> int | None:
    """Returns the stage of the first scope name that a rule matches; None if no task is among
    them."""
    for scope in scopes:
        own = _TASK_NAME.fullmatch(scope)
        if own is not None:
            return int(own[1])
        for rule in rules:
            stage = rule.stage_of(scope)
            if stage is not None:
                return stage
    return None
