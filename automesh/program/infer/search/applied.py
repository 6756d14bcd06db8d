"""Runs a step of a script with the shardings of a rule: `MeshConfig.apply` (jax).

At the first call with arguments of new shapes the step is traced, as in the search. The rule's
patterns split its arguments and the results that replace them. Arrays inside that need them get
constraints; these arrays are found from the program, as in the search.
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
    """The step, prepared for arguments of certain shapes.

    Attributes:
      shardings: shardings of the leaves of its arguments.
      jitted: the jitted step, which takes and returns leaves.
      results: the tree structure of the step's return value.
    """

    shardings: tuple[NamedSharding, ...]
    jitted: Any
    results: Any


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class AppliedStep:
    """A step that runs on a mesh and is called like the original one.

    Attributes:
      function: the original step.
      inner: the step as a jitted function, to be traced.
      mesh: the mesh of the rule.
    """

    function: Callable[..., Any]
    inner: Any
    mesh: Mesh
    shardings: Shardings
    mapping: Mapping[str, MappedAxes]
    _ready: dict[Any, _ReadyStep] = field(default_factory=dict[Any, _ReadyStep])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; moves arguments to the rule's shardings if necessary."""
        call, ready = self._prepared(args, kwargs)
        leaves = [_put(leaf, to) for leaf, to in zip(call, ready.shardings, strict=True)]
        return jax.tree.unflatten(ready.results, ready.jitted(*leaves))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original step, which has the parameters of this callable."""
        return self.function

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step, as `jax.jit(...).lower` does."""
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
    """Gives a step the shardings of a rule.

    Args:
      step: a function, or one that `jax.jit` has made.
      options: options for `jax.jit`, if the step is a plain function.

    Raises:
      WrongType: the step is no function.
      UsageError: the rule has no shardings; or options are given for a jitted function.
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
    """Pairs results with the arguments that they replace: the first argument without a pair that
    has the same structure, shapes and types. Numbers are skipped: a loss does not replace a
    learning rate."""
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
    """The properties of a leaf that a trace depends on."""
    if not hasattr(leaf, "dtype"):
        return (), type(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
    return leaf_shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False))


def _put(leaf: Any, to: NamedSharding) -> Any:
    """Moves an array to the step's sharding; jax itself places uncommitted arrays."""
    if not isinstance(leaf, jax.Array) or not getattr(leaf, "committed", True):
        return leaf
    return leaf if leaf.sharding.is_equivalent_to(to, leaf.ndim) else jax.device_put(leaf, to)
