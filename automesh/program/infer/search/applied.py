"""A step of a script with the shardings of a rule: `MeshConfig.apply` (jax).

At the first call with arguments of new shapes the step is traced, as the search has traced it; its
arguments and what replaces them are split by the rule's patterns, and constraints stand at the
arrays inside that need them: which these are is told from the program, as in the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from automesh.errors import UsageError, WrongType, kind_of
from automesh.mesh.layout.shardings import sharding_at
from automesh.mesh.mapping import MappedAxes
from automesh.mesh.rules.shardings import Shardings, path_of
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import Carried
from automesh.program.capture.step_call import TracedCall, trace
from automesh.program.infer.classes import step_classes
from automesh.program.infer.search.build import constraints_of
from automesh.program.infer.search.constrain import constrained
from automesh.program.infer.search.layout import inner_splits
from automesh.program.lower.static_args import is_jitted, leaf_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyStep:
    """The step for arguments of some shapes.

    Attributes:
      shardings: of the leaves of its arguments.
      jitted: takes and gives leaves.
      results: the tree of what the step returns.
    """

    shardings: tuple[NamedSharding, ...]
    jitted: Any
    results: Any


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class AppliedStep:
    """A step that runs on a mesh, called as before.

    Attributes:
      function: the step as it was written.
      inner: as `jax.jit` has made it, to be traced.
      mesh: of the rule.
    """

    function: Callable[..., Any]
    inner: Any
    mesh: Mesh
    shardings: Shardings
    mapping: Mapping[str, MappedAxes]
    _ready: dict[Any, _ReadyStep] = field(default_factory=dict[Any, _ReadyStep])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; arguments that lie elsewhere are moved to where the rule wants them."""
        call, ready = self._prepared(args, kwargs)
        leaves = [_put(leaf, to) for leaf, to in zip(call, ready.shardings, strict=True)]
        return jax.tree.unflatten(ready.results, ready.jitted(*leaves))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The step as it was written: its parameters are those of this function."""
        return self.function

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program, as `jax.jit(...).lower` gives it."""
        call, ready = self._prepared(args, kwargs)
        return ready.jitted.lower(*call)

    def _prepared(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], _ReadyStep]:
        leaves, tree = jax.tree.flatten((args, dict(kwargs)))
        key = (tree, tuple(map(_form, leaves)))
        ready = self._ready.get(key)
        if ready is None:
            call = trace(
                Call(
                    jitted=self.inner,
                    args=args,
                    kwargs=dict(kwargs),
                    run=lambda: None,
                    function=self.function,
                ),
                with_names=True,
            )
            if len(call.leaves) != len(leaves):
                raise UsageError(
                    "the step has static arguments among its arrays, which `config.apply` does not "
                    "take",
                    hint="close over them: config.apply(functools.partial(step, setting))",
                )
            results = self.inner.trace(*args, **kwargs).out_info
            ready = self._ready[key] = self._made(call, results)
        return leaves, ready

    def _made(self, call: TracedCall, results: Any) -> _ReadyStep:
        before = tuple(
            sharding_at(
                path_of(name),
                leaf_shape(leaf),
                self.shardings,
                mapping=self.mapping,
                mesh=self.mesh,
            )
            for name, leaf in zip(call.names, call.leaves, strict=True)
        )
        carried = carried_of(call.args, results)
        after: list[Any] = [None] * len(call.settings.out_shardings)
        for run in carried:
            for offset in range(run.count):
                after[run.output + offset] = before[run.argument + offset]
        classes = step_classes(call, carried)
        inner = inner_splits(classes, frozenset(self.mapping))
        program = constrained(call.traced.jaxpr, constraints_of(inner, self.mapping, self.mesh))
        function = jaxpr_as_fun(program)
        constants = call.settings.constants

        def step(*leaves: Any) -> Any:
            return tuple(function(*constants, *leaves))

        step.__name__ = step.__qualname__ = getattr(self.function, "__name__", "step")
        donated = tuple(place for place, one in enumerate(call.settings.donated) if one)
        jitted = jax.jit(
            step,
            in_shardings=before,
            out_shardings=tuple(after),
            donate_argnums=donated,
            compiler_options=call.settings.compiler_options or None,
        )
        return _ReadyStep(shardings=before, jitted=jitted, results=jax.tree.structure(results))


def apply_to(
    step: Any,
    *,
    mesh: Mesh,
    shardings: Shardings,
    mapping: Mapping[str, MappedAxes],
    options: Mapping[str, Any],
) -> AppliedStep:
    """The step with the shardings of a rule.

    Args:
      step: a function, or one that `jax.jit` has made.
      options: for `jax.jit`, of a plain function.

    Raises:
      WrongType: it is no function.
      UsageError: there are no shardings; or options are given for what is jitted already.
    """
    if not callable(step):
        raise WrongType(
            f"the step must be a function, got {kind_of(step)}: {step!r}",
            hint="give the training step: config.apply(train_step)",
        )
    if not shardings:
        raise UsageError(
            "the rule has no shardings that a step could be given",
            hint="`automesh search train.py --infer` writes them for a script that makes no mesh",
        )
    if is_jitted(step):
        if options:
            raise UsageError(
                f"the step is jitted already, so that `{next(iter(options))}` comes too late",
                hint="give it to `jax.jit`, or give `config.apply` the plain function",
            )
        inner, function = step, getattr(step, "__wrapped__", step)
    else:
        inner, function = jax.jit(step, **options), step
    return AppliedStep(
        function=function, inner=inner, mesh=mesh, shardings=shardings, mapping=mapping
    )


def carried_of(args: Sequence[Any], results: Any) -> tuple[Carried, ...]:
    """Which results replace which arguments: of those of one structure, shapes and types, the
    first argument that is not replaced yet. Numbers are passed over: a loss is no new rate."""
    firsts: list[tuple[Any, Any, int]] = []
    place = 0
    for arg in args:
        leaves, tree = jax.tree.flatten(arg)
        firsts.append((tree, [_form(leaf)[:2] for leaf in leaves], place))
        place += len(leaves)
    found: list[Carried] = []
    output = 0
    taken: set[int] = set()
    parts = results if type(results) in (tuple, list) else [results]
    for result in parts:
        leaves, tree = jax.tree.flatten(result)
        forms = [_form(leaf)[:2] for leaf in leaves]
        for known, those, first in firsts:
            if (
                any(shape for shape, _ in forms)
                and first not in taken
                and (known, those) == (tree, forms)
            ):
                taken.add(first)
                found.append(Carried(output=output, argument=first, count=len(leaves)))
                break
        output += len(leaves)
    return tuple(found)


def _form(leaf: Any) -> tuple[Any, ...]:
    """What a program is traced for."""
    if not hasattr(leaf, "dtype"):
        return (), type(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
    return leaf_shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False))


def _put(leaf: Any, to: NamedSharding) -> Any:
    """An array that lies elsewhere, where the step takes it; what lies nowhere yet is put there by
    jax."""
    if not isinstance(leaf, jax.Array) or not getattr(leaf, "committed", True):
        return leaf
    return leaf if leaf.sharding.is_equivalent_to(to, leaf.ndim) else jax.device_put(leaf, to)
