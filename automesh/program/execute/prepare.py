"""Prepares a compiled plan for visits, except for its arrays (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from automesh.errors import UsageError
from automesh.program.execute.arguments import initial_args, maker, plan_leaves
from automesh.program.execute.value_domains import Domain
from automesh.program.lower import carry_state
from automesh.program.lower.any_step import StepProgram
from automesh.program.lower.lowering import SingleProgram
from automesh.program.lower.static_args import Split, is_concrete, is_ref, leaf_shape
from automesh.program.script.build import Built
from automesh.program.script.contexts import Ambient, entered
from automesh.program.script.leaf_forms import LeafForm, difference, forms_of
from automesh.program.script.pure_step import returned_of
from automesh.program.script.workload import NamedWorkload, Workload

Forms = tuple[tuple[str, tuple[LeafForm, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A compiled plan that can be visited repeatedly, without its arrays.

    Attributes:
      workload: the workload with abstract arrays; static arguments are kept.
      shardings: the executable's sharding of each leaf of (args, kwargs); None if it does not use
        the leaf.
      synthetic: positions of the leaves that are made up.
      make: makes these, in this order.
      build_again: calls the user's `build` again for the arrays that it makes; None if it makes
        none.
      donated: for each leaf, whether it is donated.
      settled: True if the default `advance` returns the state in the shardings of the step's
        inputs.
      values: `user` if no leaf is made up.
      loss_dtype: the coarsest float type of the program.
      fingerprint: fingerprint of the program.
      compared_outputs: gives the part of the step's outputs whose scalars are compared.
      forms: the forms of the arguments that `build` gave, by position (static ones too) and
        keyword.
    """

    mesh: Mesh
    ambient: Ambient
    workload: Workload
    split: Split
    tree: Any
    shardings: tuple[Any, ...]
    synthetic: tuple[int, ...]
    make: Callable[[], list[jax.Array]]
    build_again: Callable[[], Built] | None
    donated: tuple[bool, ...]
    carry: carry_state.Carry
    settled: bool
    values: Literal["synthetic", "user"]
    compiled: Callable[..., Any]
    loss_dtype: str
    fingerprint: str
    compared_outputs: Callable[[Any], Any] = returned_of
    forms: Forms = ()

    @property
    def lost(self) -> tuple[int, ...]:
        """Leaves that are donated and not replaced, so that each step needs them anew."""
        if self.workload.advance is None:
            return self.carry.lost
        if not isinstance(self.workload, NamedWorkload):
            return ()  # The user's function gives all arguments.
        replaced = {argument for argument, _ in self.workload.carried}
        return tuple(
            leaf for leaf, gone in enumerate(self.donated) if gone and leaf not in replaced
        )


def prepare(
    program: SingleProgram,
    compiled: jax.stages.Compiled,
    *,
    built: Built,
    fingerprint: str,
    loss_dtype: str,
    reference_domains: Callable[[], tuple[Domain, ...]],
    build_again: Callable[[], Built],
) -> Ready:
    """Makes a compiled plan ready; decides where the values of each leaf come from.

    Args:
      program: the program of `compiled`.
      built: what `build` gave.
      reference_domains: gives the possible values of each leaf from the step on one mesh that is
        the same for all plans. Is called only if there are leaves to make up.
      build_again: calls the user's `build` again with the same mesh and knobs.

    Raises:
      UsageError: what `init` gives does not fit the arguments.
    """
    workload = program.built.workload
    tree = (program.args, program.kwargs)
    leaves, structure = jax.tree.flatten(tree)
    shardings = tuple(structure.flatten_up_to(compiled.input_shardings))
    covered = covered_by_init(program)
    concrete = [is_concrete(leaf) for leaf in leaves]
    synthetic = tuple(k for k in range(len(leaves)) if not covered[k] and not concrete[k])
    safe = domains_of(program, reference_domains()) if synthetic else [Domain()] * len(leaves)
    planned = plan_leaves(tree, compiled.input_shardings, safe, program.built.mesh)
    arrays_of_build = any(
        isinstance(leaf, (jax.Array, jax.Ref)) and not covered[k] for k, leaf in enumerate(leaves)
    )
    return Ready(
        mesh=program.built.mesh,
        ambient=program.built.ambient,
        workload=abstract(workload),
        split=program.split,
        tree=jax.tree.map(_struct, tree),
        shardings=shardings,
        synthetic=synthetic,
        make=maker([planned[k] for k in synthetic]),
        build_again=build_again if arrays_of_build else None,
        donated=program.donated,
        carry=program.carry,
        settled=program.carry.shardings_after(program.args, compiled) is None,
        values="synthetic" if synthetic else "user",
        compiled=compiled,
        loss_dtype=loss_dtype,
        fingerprint=fingerprint,
        forms=forms_by_argument(built.workload),
    )


def forms_by_argument(workload: Workload) -> Forms:
    """Returns the form of each argument of the step, by its name: `args[0]`."""
    named = [(f"args[{place}]", arg) for place, arg in enumerate(workload.args)]
    named += [(f"kwargs[{name!r}]", arg) for name, arg in workload.kwargs.items()]
    return tuple((name, forms_of(arg)) for name, arg in named)


def change_of(now: Forms, before: Forms) -> str:
    """Returns the first difference between the arguments that two calls of `build` gave, in words;
    empty if there is none."""
    known = dict(before)
    for name, forms in now:
        if found := difference(forms, known.get(name, ()), where=name):
            return found
    return f"{len(now)} of them, was {len(before)}" if len(now) != len(before) else ""


def covered_by_init(program: StepProgram) -> list[bool]:
    """Returns, for each leaf, whether `init` gives its value. Traces `init` for that, or calls it
    if that fails."""
    built, args = program.built, program.args
    leaves = len(jax.tree.leaves((args, program.kwargs)))
    if (init := built.workload.init) is None:
        return [False] * leaves
    with entered(built.ambient, built.workload.context):
        try:
            # The `init` of a pipeline places arrays on the submeshes, which cannot be traced.
            is_called = not isinstance(program, SingleProgram)
            shapes = None if is_called else jax.eval_shape(lambda: init(built.mesh))
        # As in `arguments`: if it cannot be traced for any reason, the real call shows its result.
        except Exception:  # noqa: BLE001
            is_called, shapes = True, None
        given = initial_args(init(built.mesh) if is_called else shapes, args)
    flags = [start is not None for start, arg in zip(given, args) for _ in jax.tree.leaves(arg)]
    return flags + [False] * (leaves - len(flags))


def domains_of(program: StepProgram, reference: Sequence[Domain]) -> Sequence[Domain]:
    """Returns the possible values of each leaf of a step.

    Args:
      reference: domains of the step on the mesh on which it is looked at, see `prepare`.
    """
    if isinstance(program, SingleProgram) and len(reference) == len(
        jax.tree.leaves((program.args, program.kwargs))
    ):
        return reference
    # The arguments differ, for a pipeline or because of a knob, so use the plan's own trace.
    return program.domains()


def abstract(workload: Workload) -> Workload:
    """Returns the workload without its arrays."""
    return replace(workload, args=jax.tree.map(_struct, workload.args), kwargs={})


def _struct(leaf: Any) -> Any:
    if not isinstance(leaf, (jax.Array, jax.Ref)):
        return leaf
    extra = {"is_ref": True} if is_ref(leaf) else {}
    return jax.ShapeDtypeStruct(leaf_shape(leaf), leaf.dtype, sharding=leaf.sharding, **extra)


def state(ready: Ready) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of the first step, on the devices, with the same global values at every
    call.

    Call it inside the workload's context.

    Raises:
      UsageError: `build` or `init` gives other arguments than before.
    """
    leaves, structure = jax.tree.flatten(ready.tree)
    if ready.build_again is not None:
        leaves = _built_leaves(ready)
    from_init: set[int] = set()
    if ready.workload.init is not None:
        given = initial_args(ready.workload.init(ready.mesh), ready.tree[0])
        position = 0
        for start, arg in zip(given, ready.tree[0]):
            size = len(jax.tree.leaves(arg))
            if start is not None:
                leaves[position : position + size] = jax.tree.leaves(start)
                from_init.update(range(position, position + size))
            position += size
        del given
    for position, array in zip(ready.synthetic, ready.make(), strict=True):
        leaves[position] = jax.new_ref(array) if is_ref(leaves[position]) else array
    made = {*ready.synthetic}
    seen: set[int] = set()
    for position, leaf in enumerate(leaves):
        if position not in made:
            # Results of `init` may be donated, unless it returned the same array twice.
            shared = position not in from_init or id(leaf) in seen
            seen.add(id(leaf))
            copy = shared and ready.donated[position] and not is_elsewhere(leaf)
            # One by one in place, so that at most one leaf exists twice at a time.
            leaves[position] = _owned(leaf, ready.shardings[position], copy=copy)
    return structure.unflatten(leaves)


def _built_leaves(ready: Ready) -> list[Any]:
    """Returns the leaves of the arguments from a new call of `build`, in the structure of the first
    call.

    Functions and settings in the arguments are new objects in every call. They are not compared,
    since the compiled step uses its own.
    """
    assert ready.build_again is not None
    workload = ready.build_again().workload
    if found := change_of(forms_by_argument(workload), ready.forms):
        raise UsageError(
            "`build` returned other arguments when it was called again on the same mesh: " + found,
            hint="let what it returns depend on its parameters alone",
        )
    return jax.tree.leaves(ready.split.dynamic(workload.args, workload.kwargs))


def _owned(leaf: Any, sharding: Any, *, copy: bool) -> Any:
    """Returns the user's leaf in the executable's sharding; a copy if the step will overwrite
    it."""
    if is_ref(leaf):
        return jax.new_ref(_owned(leaf[...], sharding, copy=True))
    if isinstance(leaf, (np.ndarray, np.generic)) and sharding is not None:
        return jax.device_put(leaf, sharding)
    if not isinstance(leaf, jax.Array):
        return leaf
    # A moved array may share buffers with the original one.
    placed = conform(leaf, sharding)
    return duplicate(placed) if copy else placed


def conform(leaf: Any, sharding: Any) -> Any:
    """Moves an array to `sharding`, unless it already has it or `sharding` is None."""
    if sharding is None or not isinstance(leaf, jax.Array):
        return leaf
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


def is_elsewhere(leaf: Any) -> bool:
    """Whether only other processes hold an array, so that this one cannot donate it."""
    return isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices


def duplicate(array: jax.Array) -> jax.Array:
    """Returns a copy with buffers of its own, in the same place."""
    return jnp.array(array, copy=True)
