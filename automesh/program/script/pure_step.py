"""Turns steps whose arguments hold more than arrays into functions of arrays only (jax).

jax traces functions of pytrees whose leaves are arrays. A model is often more than that: an Equinox
module also has functions and settings as leaves, an nnx module is changed in place, a batch may
contain the name of its data set. In the user's own loop `filter_jit`, `named_jit` or `nnx.jit` take
such arguments apart. A search traces the step without calling it, so this module takes them apart.

An argument of that kind becomes a `TreeParts`: a pytree of its arrays, and the rest as static data.
Arguments that the step changes in place are returned with its outputs, as `StepOutputs`. Arguments
with only arrays, and steps that `jax.jit` has made, are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from automesh.errors import UsageError
from automesh.program.lower.static_args import is_array_like, is_jitted, stated_static
from automesh.program.script.leaf_forms import LeafForm, forms_of, same_names
from automesh.program.script.module_objects import (
    filters_arrays,
    is_equinox_module,
    is_nnx_object,
    is_nnx_state,
    merge_objects,
    split_objects,
)
from automesh.program.script.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """A leaf that is no array; it keeps the value that it had when the argument was taken apart."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """A leaf that is an nnx object, one of several that were split together.

    Attributes:
      graph: graph of all these objects, without their variables.
      place: index of this one among them.
      count: number of these objects.
    """

    graph: Any
    place: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The parts of a tree other than its arrays. Equal only to itself, since jax keeps it in
    treedefs.

    Attributes:
      leaves: for each leaf of the tree a `_Fixed`, an `_Object`, or None for an array.
      names: names of the leaves that are no `_Fixed`, as Python expressions: `.layers[0].weight`.
    """

    structure: Any
    leaves: tuple[_Fixed | _Object | None, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A key that leads to a leaf, as jax prints it."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class TreeParts:
    """A tree taken apart.

    Attributes:
      parts: its arrays and, for nnx objects, their variables as trees.
      frame: the rest.
    """

    parts: tuple[Any, ...]
    frame: Frame


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """The outputs of a step that changes arguments in place.

    Attributes:
      changed: these arguments after the step; each has the frame of its argument.
      returned: the return value of the step.
    """

    changed: tuple[TreeParts, ...]
    returned: Any


def _register() -> None:
    def with_keys(held: TreeParts) -> tuple[tuple[tuple[_Name, Any], ...], Frame]:
        return tuple(zip(map(_Name, held.frame.names), held.parts, strict=True)), held.frame

    def rebuilt(frame: Frame, parts: Iterable[Any]) -> TreeParts:
        return TreeParts(tuple(parts), frame)

    jax.tree_util.register_pytree_with_keys(
        TreeParts, with_keys, rebuilt, lambda held: (held.parts, held.frame)
    )
    jax.tree_util.register_pytree_node(
        StepOutputs,
        lambda outputs: ((outputs.changed, outputs.returned), None),
        lambda _, parts: StepOutputs(*parts),
    )


_register()


def returned_of(outputs: Any) -> Any:
    """Returns the return value of the step, without the arguments that it has changed."""
    return outputs.returned if isinstance(outputs, StepOutputs) else outputs


def pure(workload: Workload) -> Workload:
    """Returns the workload with its arguments taken apart if necessary, and with a step, an `init`
    and an `advance` that take and return such arguments."""
    if is_jitted(workload.step):
        return workload
    holding = _Holding(numbers_are_fixed=filters_arrays(workload.step))
    static = stated_static(workload)
    given = [*workload.args, *workload.kwargs.values()]
    places = [*range(len(workload.args)), *workload.kwargs]
    drafts = [
        _static(tree) if place in static.names else holding.draft(tree)
        for place, tree in zip(places, given, strict=True)
    ]
    # Static arguments keep their positions: `init` leaves them out, and counts the others.
    drafts = [
        draft if place not in static.positions else replace(draft, needs_it=False)
        for place, draft in zip(places, drafts, strict=True)
    ]
    if not any(draft.needs_it for draft in drafts):
        return workload
    held = _taken(drafts)
    args, kwargs = held[: len(workload.args)], held[len(workload.args) :]
    first = (type(workload.args[0]), forms_of(args[0])) if args else (None, ())
    return replace(
        workload,
        step=holding.step(workload.step),
        args=tuple(args),
        static_argnums=static.positions,
        kwargs=dict(zip(workload.kwargs, kwargs, strict=True)),
        init=workload.init and holding.init(workload.init, *first),
        advance=workload.advance and holding.advance(workload.advance),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Takes trees apart and puts them together again.

    Attributes:
      numbers_are_fixed: whether Python numbers are settings everywhere, and not only in Equinox
        modules.
    """

    numbers_are_fixed: bool

    def take(self, trees: Sequence[Any], *, from_step: bool = False) -> list[Any]:
        """Takes trees apart if necessary.

        Args:
          from_step: whether they are return values of the step, where even a tree without arrays is
            taken apart.
        """
        return _taken([self.draft(tree, or_any_fixed=from_step) for tree in trees])

    def draft(self, tree: Any, *, or_any_fixed: bool = False) -> _Draft:
        """Flattens a tree. One without arrays becomes a static argument, unless `or_any_fixed`."""
        fixed: list[bool] = []
        has_settings = False
        # Equinox modules first, as a whole: a number is a setting in them, but an array elsewhere.
        for node in jax.tree.leaves(tree, is_leaf=lambda n: _is_leaf(n) or is_equinox_module(n)):
            is_module = is_equinox_module(node)
            for leaf in jax.tree.leaves(node, is_leaf=_is_leaf):
                is_setting = _is_number(leaf) and (is_module or self.numbers_are_fixed)
                has_settings = has_settings or is_setting
                fixed.append(is_setting or not (is_array_like(leaf) or _is_leaf(leaf)))
        named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
        is_mixed = any(fixed) and (or_any_fixed or not all(fixed))
        return _Draft(
            tree=tree,
            structure=structure,
            names=tuple(jax.tree_util.keystr(path) for path, _ in named),
            leaves=tuple(leaf for _, leaf in named),
            fixed=tuple(fixed),
            needs_it=is_mixed or has_settings or any(is_nnx_object(leaf) for _, leaf in named),
        )

    def step(self, step: Any) -> Any:
        """Returns the step as a function of the results of `take`."""

        @functools.wraps(step, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            opened = _Opened.of([*args, *kwargs.values()])
            returned = step(
                *opened.trees[: len(args)],
                **dict(zip(kwargs, opened.trees[len(args) :], strict=True)),
            )
            changed = opened.changed()
            by_position = {id(_frame(arg)) for arg in args}
            if any(id(held.frame) not in by_position for held in changed):
                raise UsageError(
                    "the step changes a keyword argument in place",
                    hint="give the argument by its position, in `args`",
                )
            parts = self._parts(returned, from_step=True)
            return StepOutputs(tuple(changed), parts) if changed else parts

        return call

    def _parts(self, returned: Any, *, from_step: bool = False) -> Any:
        if type(returned) in (tuple, list):
            return type(returned)(self.take(returned, from_step=from_step))
        return self.take([returned], from_step=from_step)[0]

    def init(self, init: Any, kind: Any, forms: Sequence[LeafForm]) -> Any:
        """Returns the workload's `init`, changed to return arguments as `take` does.

        Args:
          kind: class of the first argument.
          forms: leaves of the first argument.
        """

        @functools.wraps(init, updated=())
        def call(mesh: Any) -> Any:
            returned = init(mesh)
            # A single argument that is itself a tuple, as in `initial.initial_args`.
            if type(returned) is kind:
                (whole,) = self.take([returned])
                if same_names(forms_of(whole), forms):
                    return (whole,)
            return self._parts(returned)

        return call

    def advance(self, advance: Any) -> Any:
        """Returns the workload's `advance`, changed to take and return arguments as `take` does."""

        @functools.wraps(advance, updated=())
        def call(outputs: Any, args: Sequence[Any]) -> Any:
            changed = outputs.changed if isinstance(outputs, StepOutputs) else ()
            frames = {id(held.frame): held for held in changed}
            now = [frames.get(id(_frame(arg)), arg) for arg in args]
            returned = returned_of(outputs)
            whole = type(returned) not in (tuple, list)
            parts = _Opened.of([returned] if whole else returned).trees
            opened = parts[0] if whole else type(returned)(parts)
            return self._parts(advance(opened, tuple(_Opened.of(now).trees)))

        return call


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A tree, flattened.

    Attributes:
      fixed: for each leaf, whether it is no array.
      needs_it: whether it must be taken apart; False for a tree of arrays, and for a static
        argument.
    """

    tree: Any
    structure: Any
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    fixed: tuple[bool, ...]
    needs_it: bool

    @property
    def objects(self) -> list[Any]:
        """The leaves that are nnx objects and must be split."""
        pairs = zip(self.leaves, self.fixed, strict=True)
        return [leaf for leaf, is_fixed in pairs if not is_fixed and is_nnx_object(leaf)]

    def held(self, graph: Any, states: Any, count: int) -> TreeParts:
        """Takes the tree apart; `states` goes on with the next object of those in `graph`."""
        parts: list[Any] = []
        kinds: list[_Fixed | _Object | None] = []
        for leaf, is_fixed in zip(self.leaves, self.fixed, strict=True):
            if is_fixed:
                kinds.append(_Fixed(leaf))
            elif is_nnx_object(leaf):
                place, state = next(states)
                kinds.append(_Object(graph, place, count))
                parts.append(state)
            else:
                kinds.append(None)
                parts.append(leaf)
        kept = zip(self.names, self.fixed, strict=True)
        names = tuple(name for name, is_fixed in kept if not is_fixed)
        return TreeParts(tuple(parts), Frame(self.structure, tuple(kinds), names))


def _static(tree: Any) -> _Draft:
    """Makes a draft of a static argument, which is one leaf."""
    whole = jax.tree.structure(0)
    return _Draft(
        tree=tree, structure=whole, names=("",), leaves=(tree,), fixed=(True,), needs_it=True
    )


def _taken(drafts: Sequence[_Draft]) -> list[Any]:
    """Takes trees apart together, since their nnx objects may share variables."""
    objects = [leaf for draft in drafts if draft.needs_it for leaf in draft.objects]
    graph, states = split_objects(objects) if objects else (None, ())
    rest = iter(enumerate(states))
    return [
        draft.held(graph, rest, len(objects)) if draft.needs_it else draft.tree for draft in drafts
    ]


@dataclass(slots=True, kw_only=True)
class _Opened:
    """Trees put together again, for one call.

    Attributes:
      trees: in the order of `given`; trees that were not taken apart are unchanged.
      objects: nnx objects by graph, in their order, with the variables that they had.
    """

    given: tuple[Any, ...]
    trees: list[Any] = field(default_factory=list[Any])
    objects: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = field(
        default_factory=dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]]
    )

    @staticmethod
    def of(given: Sequence[Any]) -> _Opened:
        opened = _Opened(given=tuple(given))
        graphs: dict[int, tuple[Any, dict[int, Any], int]] = {}
        for held in given:
            for kind, part in _kinds_of(held):
                if isinstance(kind, _Object):
                    _, states, _ = graphs.setdefault(id(kind.graph), (kind.graph, {}, kind.count))
                    states[kind.place] = part
        for key, (graph, states, count) in graphs.items():
            ordered = tuple(states.get(place) for place in range(count))
            # Before anything changes: the objects may be made of these very variables.
            before = tuple(map(_by_name, ordered))
            opened.objects[key] = (merge_objects(graph, ordered), before)
        opened.trees = [opened._tree(held) for held in given]
        return opened

    def _tree(self, held: Any) -> Any:
        if not isinstance(held, TreeParts):
            return held
        parts = iter(held.parts)
        leaves: list[Any] = []
        for kind in held.frame.leaves:
            if isinstance(kind, _Fixed):
                leaves.append(kind.value)
                continue
            part = next(parts)
            is_object = isinstance(kind, _Object)
            leaves.append(self.objects[id(kind.graph)][0][kind.place] if is_object else part)
        return held.frame.structure.unflatten(leaves)

    def changed(self) -> list[TreeParts]:
        """Returns the arguments whose variables have changed, with the new variables."""
        after = {key: split_objects(objects)[1] for key, (objects, _) in self.objects.items()}
        found: list[TreeParts] = []
        for held in self.given:
            parts: list[Any] = []
            is_other = False
            for kind, part in _kinds_of(held):
                if not isinstance(kind, _Object):
                    parts.append(part)
                    continue
                before = self.objects[id(kind.graph)][1][kind.place]
                now = _by_name(after[id(kind.graph)][kind.place])
                # New variables, such as intermediate values that a layer records, are no part of
                # the state.
                leaves = [now.get(name, leaf) for name, leaf in before.items()]
                is_other = is_other or any(map(_is_not, leaves, before.values()))
                parts.append(jax.tree.unflatten(jax.tree.structure(part), leaves))
            if is_other:
                found.append(TreeParts(tuple(parts), held.frame))
        return found


def _is_not(one: Any, other: Any) -> bool:
    return one is not other


def _by_name(tree: Any) -> Mapping[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _kinds_of(held: Any) -> list[tuple[_Object | None, Any]]:
    """Returns the parts of a tree that was taken apart, each with its kind; empty for another
    tree."""
    if not isinstance(held, TreeParts):
        return []
    kinds = [kind for kind in held.frame.leaves if not isinstance(kind, _Fixed)]
    return list(zip(kinds, held.parts, strict=True))


def _frame(arg: Any) -> Frame | None:
    return arg.frame if isinstance(arg, TreeParts) else None


def _is_leaf(node: Any) -> bool:
    """Whether a tree is cut at this node. The variables of an `nnx.State` are treated as named
    arrays, since the step itself merges them."""
    return is_nnx_object(node) or is_nnx_state(node)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex))
