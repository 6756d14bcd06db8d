"""Runs a step of a script with the shardings of a rule: `MeshConfig.apply` (jax).

At the first call with arguments of new shapes the step is traced, as in the search. The rule's
patterns split its arguments and the results that replace them. Arrays inside that need them get
constraints; these arrays are found from the program, as in the search.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, kind_of
from automesh.mesh.layout.shardings import not_covered, sharding_at
from automesh.mesh.mapping import MappedAxes
from automesh.mesh.rules.shardings import Shardings, path_of
from automesh.program.capture.hooks import Call
from automesh.program.capture.step_call import TracedCall, trace
from automesh.program.infer.classes import step_classes
from automesh.program.infer.search.build import constraints_of
from automesh.program.infer.search.constrain import constrained
from automesh.program.infer.search.layout import inner_splits
from automesh.program.infer.search.replaced import carried_of
from automesh.program.lower.static_args import (
    Split,
    is_ref,
    leaf_shape,
    split_of,
    static_by_description,
)
from automesh.program.script.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyStep:
    """The step, prepared for arguments of certain shapes.

    Attributes:
      shardings: shardings of the leaves of its arguments; None for a mutable reference.
      jitted: the jitted step, which takes and returns leaves.
      results: the tree structure of the step's return value.
    """

    shardings: tuple[Any, ...]
    jitted: Any
    results: Any


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class AppliedStep:
    """A step that runs on a mesh and is called like the original one.

    Attributes:
      function: the original step.
      inner: the step as a jitted function, to be traced.
      core: the function inside of `inner`, whose parameters name the arguments.
      mesh: the mesh of the rule.
      first, keywords: arguments that the original step has been given already, as `self`.
    """

    function: Callable[..., Any]
    inner: Any
    core: Callable[..., Any]
    mesh: Mesh
    shardings: Shardings
    mapping: Mapping[str, MappedAxes]
    first: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _ready: dict[Any, _ReadyStep] = field(default_factory=dict[Any, _ReadyStep])
    _static: dict[Any, Split] = field(default_factory=dict[Any, Split])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; moves arguments to the rule's shardings if necessary."""
        leaves, ready = self._prepared(args, kwargs)
        return jax.tree.unflatten(ready.results, ready.jitted(*_placed(leaves, ready)))

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Returns the step with an object as its first argument, for a step that is a method."""
        return self if owner is None else types.MethodType(self, owner)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original step, which has the parameters of this callable."""
        return self.function

    def lower(self, *args: Any, **kwargs: Any) -> AppliedLowered:
        """Lowers the step, as `jax.jit(...).lower` does."""
        leaves, ready = self._prepared(args, kwargs)
        return AppliedLowered(step=self, ready=ready, lowered=ready.jitted.lower(*leaves))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Describes the results, as `jax.eval_shape` does."""
        return jax.eval_shape(self.function, *args, **kwargs)

    def leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves that the prepared step takes: static arguments are left out."""
        whole, named = self._whole(args, kwargs)
        return jax.tree.leaves(self._split(whole, named).dynamic(whole, named))

    def _whole(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (*self.first, *args), {**self.keywords, **kwargs}

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Split:
        form = len(args), tuple(sorted(kwargs))
        if form not in self._static:
            workload = Workload(self.inner, args, dict(kwargs))
            self._static[form] = static_by_description(workload, self.inner)
        return self._static[form]

    def _prepared(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], _ReadyStep]:
        args, kwargs = self._whole(args, kwargs)
        split = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(split.dynamic(args, kwargs))
        static = (
            tuple(args[place] for place in split.positions),
            tuple((name, kwargs[name]) for name in split.names),
        )
        try:
            key = (tree, static, tuple(map(_form, leaves)))
            ready = self._ready.get(key)
        except TypeError as error:
            raise UsageError(
                f"an argument of `{_name(self.function)}` that is no array cannot be hashed, so "
                f"that the step cannot be jitted for it ({error})",
                hint="use a frozen dataclass or a tuple, or close over it: "
                "config.apply(functools.partial(step, setting))",
            ) from error
        if ready is not None:
            return leaves, ready
        call = trace(
            Call(
                jitted=self.inner,
                args=args,
                kwargs=dict(kwargs),
                run=lambda: None,
                function=self.core,
            ),
            with_names=True,
        )
        traced = self.inner.trace(*args, **kwargs)  # jax has this trace already.
        if len(call.leaves) != len(leaves):
            # Only the trace shows that an argument is static.
            form = len(args), tuple(sorted(kwargs))
            self._static[form] = split_of(
                Workload(self.inner, args, dict(kwargs)), self.inner, traced
            )
            return self._prepared(args[len(self.first) :], kwargs)
        ready = self._made(call, traced.out_info)
        # A step inside of a function that is being traced may hold what is of this trace alone.
        if not any(isinstance(one, Tracer) for one in call.settings.constants):
            self._ready[key] = ready
        return leaves, ready

    def _made(self, call: TracedCall, results: Any) -> _ReadyStep:
        before = self._shardings_of(call)
        carried = carried_of(call.args, results, _parameters(call))
        after: list[Any] = [None] * len(call.settings.out_shardings)
        for run in carried:
            for offset in range(run.count):
                after[run.output + offset] = before[run.argument + offset]
        classes = step_classes(call, carried)
        inner = inner_splits(classes, frozenset(self.mapping))
        program = constrained(call.traced.jaxpr, constraints_of(inner, self.mapping, self.mesh))
        function = jaxpr_as_fun(program)
        with jax.ensure_compile_time_eval():
            constants = [_on_mesh(one, self.mesh) for one in call.settings.constants]

        def step(*leaves: Any) -> Any:
            return tuple(function(*constants, *leaves))

        step.__name__ = step.__qualname__ = _name(self.function)
        donated = tuple(place for place, one in enumerate(call.settings.donated) if one)
        jitted = jax.jit(
            step,
            in_shardings=before,
            out_shardings=tuple(after),
            donate_argnums=donated,
            compiler_options=call.settings.compiler_options or None,
        )
        return _ReadyStep(shardings=before, jitted=jitted, results=jax.tree.structure(results))

    def _shardings_of(self, call: TracedCall) -> tuple[Any, ...]:
        """Returns the sharding of each leaf of the arguments. An array that no pattern covers keeps
        its sharding if it is on the mesh already, as gradients that another applied step has
        made."""
        found: list[Any] = []
        missing: dict[str, int] = {}
        for name, leaf in zip(call.names, call.leaves, strict=True):
            path, shape = path_of(name), leaf_shape(leaf)
            if is_ref(leaf):
                found.append(None)
            elif not self.shardings.first(path):
                if not _is_on(leaf, self.mesh):
                    missing[path] = len(shape)
                    continue
                found.append(leaf.sharding)
            else:
                found.append(
                    sharding_at(path, shape, self.shardings, mapping=self.mapping, mesh=self.mesh)
                )
        if missing:
            raise not_covered(missing, self.shardings)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLowered:
    """An applied step that is lowered: has what jax's `Lowered` has."""

    step: AppliedStep
    ready: _ReadyStep
    lowered: Any

    def compile(self, *args: Any, **kwargs: Any) -> AppliedCompiled:
        """Compiles the step."""
        compiled = self.lowered.compile(*args, **kwargs)
        return AppliedCompiled(step=self.step, ready=self.ready, compiled=compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedCompiled:
    """An applied step that is compiled: has what jax's `Compiled` has, and is called like it."""

    step: AppliedStep
    ready: _ReadyStep
    compiled: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; static arguments are left out."""
        leaves = jax.tree.leaves((args, kwargs))
        expected = len(self.ready.shardings)
        if len(leaves) != expected:
            raise UsageError(
                f"`{_name(self.step.function)}` was compiled for {expected} arrays, and is called "
                f"with {len(leaves)}",
                hint="call what is compiled with the same arguments, without the static ones",
            )
        shardings = self.ready.shardings
        placed = [
            leaf if to is None else jax.device_put(leaf, to)
            for leaf, to in zip(leaves, shardings, strict=True)
        ]
        return jax.tree.unflatten(self.ready.results, self.compiled(*placed))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _placed(leaves: Sequence[Any], ready: _ReadyStep) -> list[Any]:
    return [_put(leaf, to) for leaf, to in zip(leaves, ready.shardings, strict=True)]


def _parameters(call: TracedCall) -> list[str]:
    """Returns, for each argument, the name of the step's parameter, which its first leaf has."""
    found: list[str] = []
    place = 0
    for arg in call.args:
        count = len(jax.tree.leaves(arg))
        found.append(path_of(call.names[place]).partition("/")[0] if count else "")
        place += count
    return found


def _name(function: Any) -> str:
    return getattr(function, "__name__", "") or type(function).__name__


def _form(leaf: Any) -> tuple[Any, ...]:
    """Returns the properties of a leaf that a trace depends on."""
    if not hasattr(leaf, "dtype"):
        return (), type(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
    return leaf_shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False))


def _is_committed(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_array and bool(getattr(leaf, "committed", True))


def _is_on(leaf: Any, mesh: Mesh) -> bool:
    devices = set(mesh.devices.flat)
    return _is_committed(leaf) and set(leaf.sharding.device_set) == devices


def _on_mesh(constant: Any, mesh: Mesh) -> Any:
    """Returns an array that the step holds; one that was put on a device is copied to all of the
    mesh."""
    if not _is_committed(constant) or _is_on(constant, mesh):
        return constant
    return jax.device_put(constant, NamedSharding(mesh, PartitionSpec()))


def _put(leaf: Any, to: Any) -> Any:
    """Moves an array to the step's sharding; jax itself places uncommitted arrays."""
    if to is None or not _is_committed(leaf):
        return leaf
    return leaf if leaf.sharding.is_equivalent_to(to, leaf.ndim) else jax.device_put(leaf, to)


def said_kind(step: Any) -> str:
    """Describes what was given as a step, for errors."""
    return f"{kind_of(step)}: {step!r}"
