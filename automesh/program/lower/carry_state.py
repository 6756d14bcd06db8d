"""Passes the outputs of one step on as arguments of the next, unless the workload has `advance`
(jax)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from automesh.program.absent.client import is_absent
from automesh.program.lower.compiled import output_shardings
from automesh.program.lower.static_args import is_concrete, is_ref, leaf_shape
from automesh.program.script.leaf_forms import forms_of, repacked, same_treedef, same_types
from automesh.program.script.pure_step import StepOutputs, TreeParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """The default `advance`.

    Attributes:
      pairs: (position of an argument, position of the output that replaces it), without static
        arguments. The first outputs are the arguments that the step changes in place.
      lost: indices of leaves in (args, kwargs) that are donated and that no output replaces.
      repacked: positions of arguments whose outputs have another treedef but leaves with the same
        names.
      structures: for each pair, the treedef of the output.
      is_state_alone: True if the step returns only its state, a list or a tuple, which counts as
        one output.
    """

    pairs: tuple[tuple[int, int], ...]
    lost: tuple[int, ...]
    repacked: frozenset[int] = frozenset()
    structures: tuple[Any, ...] = ()
    is_state_alone: bool = False

    def advance(self, outputs: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of the next step; references are kept."""
        parts = self.parts(outputs)
        new = list(args)
        for position, output in self.pairs:
            part = parts[output]
            new[position] = repacked(part, args[position]) if position in self.repacked else part
        return tuple(new)

    def returned_beside(self, outputs: Any) -> dict[str, Any]:
        """Returns the results that are no arguments of the next step, by path."""
        carried = {output for _, output in self.pairs}
        changed = len(outputs.changed) if isinstance(outputs, StepOutputs) else 0
        beside = {
            f"[{k - changed}]": part
            for k, part in enumerate(self.parts(outputs))
            if k >= changed and k not in carried
        }
        return {
            name + jax.tree_util.keystr(keys): leaf
            for name, part in beside.items()
            for keys, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
        }

    def shardings_after(
        self, args: tuple[Any, ...], compiled: jax.stages.Compiled
    ) -> tuple[Any, ...] | None:
        """Returns the abstract arguments of the second step; None if the first step has the same
        shardings."""
        inputs: Any = compiled.input_shardings[0]
        parts = self.parts(output_shardings(compiled))
        changed = False

        def place(leaf: Any, before: Any, now: Any) -> Any:
            nonlocal changed
            if before is None or now is None or is_ref(leaf):
                return leaf
            if now.is_equivalent_to(before, len(leaf_shape(leaf))):
                return leaf
            changed = True
            if is_concrete(leaf) and not any(map(is_absent, now.device_set)):
                return jax.device_put(leaf, now)
            return jax.ShapeDtypeStruct(leaf_shape(leaf), leaf.dtype, sharding=now)

        new = list(args)
        for (position, output), structure in zip(self.pairs, self.structures, strict=True):
            leaves, tree = jax.tree.flatten(args[position])
            # An unknown sharding is None, which is no leaf.
            before = tree.flatten_up_to(inputs[position])
            now = structure.flatten_up_to(parts[output])
            new[position] = tree.unflatten(
                [place(leaf, old, to) for leaf, old, to in zip(leaves, before, now, strict=True)]
            )
        return tuple(new) if changed else None

    def parts(self, outputs: Any) -> list[Any]:
        """Returns the outputs as a list."""
        return _parts(outputs, is_one=self.is_state_alone)


def default_carry(args: Sequence[Any], outputs: Any, donated: Sequence[bool]) -> Carry:
    """Pairs arguments with the outputs that replace them.

    An argument that the step changes in place replaces itself. A list or tuple of the same form as
    the first argument, or as a donated one, replaces it as a whole. Leading outputs replace leading
    arguments whose leaves have the same names, shapes and types; this skips arguments that hold
    references or no arrays, or were changed in place. Outputs of the same form replace the
    remaining donated arguments (`return loss, model, opt_state`). If nothing is donated, they
    replace leading arguments in the same way, but only if one of these has integers, such as the
    count of an optimizer: others could be gradients.

    Args:
      args: positional arguments without the static ones.
      outputs: tree of shapes and types that the step returns.
      donated: for each leaf of (args, kwargs), whether it is donated.
    """
    pairs = _in_place(args, outputs)
    taken = {position for position, _ in pairs}
    movable = [
        position
        for position, arg in enumerate(args)
        if position not in taken
        and (leaves := jax.tree.leaves(arg))
        and not any(map(is_ref, leaves))
    ]
    is_state_alone = any(
        _is_state(args[k], outputs)
        for k in movable
        if k == movable[0] or any(donated[_offset(args, k) :][: _size(args[k])])
    )
    parts = _parts(outputs, is_one=is_state_alone)
    pairs += _leading(args, parts, movable, first_output=len(pairs))
    taken, used = {position for position, _ in pairs}, {output for _, output in pairs}
    pairs += _donated(
        args,
        [None if k in used else part for k, part in enumerate(parts)],
        [position for position in movable if position not in taken],
        donated,
    )
    if not pairs and not any(donated):
        pairs = _behind(args, parts, movable)
    structures = [jax.tree.structure(parts[output]) for _, output in pairs]
    return Carry(
        pairs=tuple(pairs),
        lost=_lost(args, pairs, donated),
        repacked=frozenset(
            position
            for (position, _), structure in zip(pairs, structures, strict=True)
            if not same_treedef(jax.tree.structure(args[position]), structure)
        ),
        structures=tuple(structures),
        is_state_alone=is_state_alone,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedLeaves:
    """The state of a step, array by array, with indices of the lowered program.

    Attributes:
      names: names of all arguments.
      pairs: (argument, the result that replaces it in the next step).
      changed: donated arguments that come back in another type: (argument, type of the result).
      lost: other donated arguments that nothing replaces.
      on_one_device: arguments that are on a single device.
      source: file and line of the step's function; empty if unknown.
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, str], ...]
    lost: tuple[int, ...]
    on_one_device: tuple[int, ...] = ()
    source: tuple[str, int] = ("", 0)


def carried_leaves(
    carry: Carry,
    args: Sequence[Any],
    outputs: Any,
    *,
    names: Sequence[str],
    kept: Sequence[int],
    unplaced: Collection[int] = (),
    source: tuple[str, int] = ("", 0),
) -> CarriedLeaves:
    """Describes the default `advance`, array by array.

    Args:
      args: positional arguments without the static ones.
      outputs: tree of shapes and types that the step returns.
      names: the names of all leaves of the arguments.
      kept: the leaves that are arguments of the lowered program, since the step uses them.
      unplaced: leaves that the script has put on no mesh.
      source: file and line of the step's function.
    """
    places = {leaf: place for place, leaf in enumerate(kept)}
    parts = carry.parts(outputs)
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + _size(part))
    pairs = [
        (places[leaf], begins[output] + number)
        for position, output in carry.pairs
        for number in range(_size(args[position]))
        if (leaf := _offset(args, position) + number) in places
    ]
    every = _with_paths(args)
    taken = {result for _, result in pairs}
    changed, lost = _changed_and_lost(
        {leaf: every[leaf] for leaf in carry.lost if leaf in places and leaf < len(every)},
        [one for number, one in enumerate(_with_paths(parts)) if number not in taken],
    )
    return CarriedLeaves(
        names=tuple(names[leaf] for leaf in kept),
        pairs=tuple(pairs),
        changed=tuple((places[leaf], dtype) for leaf, dtype in changed),
        lost=tuple(places[leaf] for leaf in lost),
        on_one_device=tuple(
            places[leaf]
            for leaf, (_, one) in enumerate(every)
            if leaf in places and (leaf in unplaced or _is_on_one_device(one))
        ),
        source=source,
    )


def _is_on_one_device(leaf: Any) -> bool:
    return isinstance(_sharding(leaf), jax.sharding.SingleDeviceSharding)


# A leaf, and where it is in its argument or output.
_Placed = tuple[str, Any]


def _with_paths(trees: Sequence[Any]) -> list[_Placed]:
    return [
        (jax.tree_util.keystr(path), leaf)
        for tree in trees
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _changed_and_lost(
    given: dict[int, _Placed], others: list[_Placed]
) -> tuple[list[tuple[int, str]], list[int]]:
    """Divides donated leaves without a pair into those that change their type and those lost.

    An output at the same place of its tree is the leaf's successor; among the other outputs, one of
    the same shape and type takes its memory, and one of another type is the leaf with its type
    changed.

    Args:
      given: the leaves, by number.
      others: the outputs without a pair.
    """
    changed: list[tuple[int, str]] = []
    for is_meant in (_is_at_the_same_place, _is_alike, _has_the_same_shape):
        for leaf, one in list(given.items()):
            like = next((other for other in others if is_meant(one, other)), None)
            if like is None:
                continue
            others = [other for other in others if other is not like]
            del given[leaf]
            if like[1].dtype != one[1].dtype:
                changed.append((leaf, str(like[1].dtype)))
    return sorted(changed), list(given)


def _is_at_the_same_place(one: _Placed, other: _Placed) -> bool:
    return bool(one[0]) and one[0] == other[0] and _has_the_same_shape(one, other)


def _is_alike(one: _Placed, other: _Placed) -> bool:
    return _has_the_same_shape(one, other) and one[1].dtype == other[1].dtype


def _has_the_same_shape(one: _Placed, other: _Placed) -> bool:
    return leaf_shape(one[1]) == leaf_shape(other[1])


def _sharding(leaf: Any) -> Any:
    return None if is_ref(leaf) else getattr(leaf, "sharding", None)


def source_of(traced: jax.stages.Traced) -> tuple[str, int]:
    """Returns the file and line of the traced function; ("", 0) if jax does not state them."""
    # `DebugInfo.func_src_info` of jax/_src/core.py: `step at /path/train.py:12`.
    closed: Any = traced.jaxpr
    info = getattr(closed.jaxpr, "debug_info", None)
    text = str(getattr(info, "func_src_info", "") or "")
    place = text.rpartition(" at ")[2]
    file, _, line = place.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else ("", 0)


def _parts(outputs: Any, *, is_one: bool) -> list[Any]:
    """Returns the outputs of a step as a list; its return value counts as one or as several."""
    changed = list(outputs.changed) if isinstance(outputs, StepOutputs) else []
    returned = outputs.returned if isinstance(outputs, StepOutputs) else outputs
    is_several = type(returned) in (tuple, list) and not is_one
    return [*changed, *(returned if is_several else [returned])]


def _is_state(argument: Any, outputs: Any) -> bool:
    """Whether a step returns only a list or a tuple that has the form of an argument."""
    returned = outputs.returned if isinstance(outputs, StepOutputs) else outputs
    return (
        type(returned) in (tuple, list)
        and type(argument) in (tuple, list)
        and same_types(forms_of(argument), forms_of(returned))
    )


def _in_place(args: Sequence[Any], outputs: Any) -> list[tuple[int, int]]:
    if not isinstance(outputs, StepOutputs):
        return []
    positions = {id(arg.frame): k for k, arg in enumerate(args) if isinstance(arg, TreeParts)}
    return [(positions[id(held.frame)], k) for k, held in enumerate(outputs.changed)]


def _leading(
    args: Sequence[Any], parts: Sequence[Any], movable: Sequence[int], *, first_output: int
) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for output, position in enumerate(movable[: len(parts) - first_output], start=first_output):
        if not same_types(forms_of(args[position]), forms_of(parts[output])):
            break
        pairs.append((position, output))
    return pairs


def _behind(
    args: Sequence[Any], parts: Sequence[Any], movable: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs leading arguments with outputs behind others, if they hold integers: a loss comes
    first, and the step gives nothing away."""
    for first in range(1, len(parts)):
        pairs: list[tuple[int, int]] = []
        for output, position in enumerate(movable[: len(parts) - first], start=first):
            if not same_types(forms_of(args[position]), forms_of(parts[output])):
                break
            pairs.append((position, output))
        dtypes = {form.dtype for position, _ in pairs for form in forms_of(args[position])}
        if any(dtype.startswith(("int", "uint")) for dtype in dtypes):
            return pairs
    return []


def _donated(
    args: Sequence[Any], parts: Sequence[Any], movable: Sequence[int], donated: Sequence[bool]
) -> list[tuple[int, int]]:
    """Pairs donated arguments with outputs of the same form, in order, as the compiler does with
    their buffers. Forms with more outputs than donated arguments get no pairs.

    Args:
      parts: the outputs; None for those that already have a pair.
    """
    forms = [None if part is None else forms_of(part) for part in parts]
    pairs: list[tuple[int, int]] = []
    given = [k for k in movable if any(donated[_offset(args, k) :][: _size(args[k])])]
    while given:
        mine = forms_of(args[given[0]])
        alike = [k for k in given if same_types(forms_of(args[k]), mine)]
        outputs = [k for k, form in enumerate(forms) if form and same_types(form, mine)]
        if len(outputs) <= len(alike):
            pairs += zip(alike, outputs)
        given = [k for k in given if k not in alike]
    return pairs


def _offset(args: Sequence[Any], position: int) -> int:
    return sum(_size(arg) for arg in args[:position])


def _size(arg: Any) -> int:
    return len(jax.tree.leaves(arg))


def _lost(
    args: Sequence[Any], pairs: Sequence[tuple[int, int]], donated: Sequence[bool]
) -> tuple[int, ...]:
    kept: set[int] = set()
    for position, _ in pairs:
        start = _offset(args, position)
        kept.update(range(start, start + _size(args[position])))
    return tuple(leaf for leaf, gone in enumerate(donated) if gone and leaf not in kept)
