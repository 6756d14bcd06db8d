"""How the outputs of one step become the arguments of the next, unless the workload says so itself
(jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from automesh.program.compiled import output_shardings
from automesh.program.elsewhere import is_absent
from automesh.program.stepping import is_concrete, is_ref, leaf_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """The default `advance`.

    Attributes:
      pairs: (position of an argument, position of the output that replaces it), static arguments
        not counted.
      whole: True if the step's output is a single value rather than a tuple of outputs.
      lost: leaves, counted over (args, kwargs), that are donated and that nothing replaces.
    """

    pairs: tuple[tuple[int, int], ...]
    whole: bool
    lost: tuple[int, ...]

    def advance(self, outputs: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the next step; references stay in place."""
        parts = (outputs,) if self.whole else outputs
        replaced = {position: parts[output] for position, output in self.pairs}
        return tuple(replaced.get(position, arg) for position, arg in enumerate(args))

    def shardings_after(
        self, args: tuple[Any, ...], compiled: jax.stages.Compiled
    ) -> tuple[Any, ...] | None:
        """The arguments as the second step gets them, abstract; None if the first gets them so
        already."""
        inputs: Any = compiled.input_shardings[0]
        outputs: Any = output_shardings(compiled)
        after = self.advance(outputs, tuple(inputs))
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
        for position, _ in self.pairs:
            leaves, tree = jax.tree.flatten(args[position])
            before = tree.flatten_up_to(inputs[position])
            now = tree.flatten_up_to(after[position])
            new[position] = tree.unflatten(
                [place(leaf, old, to) for leaf, old, to in zip(leaves, before, now, strict=True)]
            )
        return tuple(new) if changed else None


def default_carry(args: Sequence[Any], outputs: Any, donated: Sequence[bool]) -> Carry:
    """Pairs arguments with the outputs that replace them.

    Leading outputs replace leading arguments of the same structure, shapes and types; arguments
    that hold references are passed over. If none does, the one output that looks like the first,
    donated argument replaces it (`return loss, state`).

    Args:
      args: positional arguments without the static ones.
      outputs: tree of shapes and types that the step returns.
      donated: per leaf of (args, kwargs).
    """
    whole = type(outputs) not in (tuple, list)
    parts: list[Any] = [outputs] if whole else list(outputs)
    movable = [k for k, arg in enumerate(args) if not any(map(is_ref, jax.tree.leaves(arg)))]
    pairs: list[tuple[int, int]] = []
    for output, position in enumerate(movable[: len(parts)]):
        if _form(args[position]) != _form(parts[output]):
            break
        pairs.append((position, output))
    if not any(jax.tree.leaves(args[position]) for position, _ in pairs):
        pairs = _elsewhere(args, parts, movable, donated)
    return Carry(pairs=tuple(pairs), whole=whole, lost=_lost(args, pairs, donated))


def _elsewhere(
    args: Sequence[Any], parts: Sequence[Any], movable: Sequence[int], donated: Sequence[bool]
) -> list[tuple[int, int]]:
    if not movable or not any(donated[_offset(args, movable[0]) :][: _size(args[movable[0]])]):
        return []
    first = movable[0]
    alike = [k for k, part in enumerate(parts) if _form(part) == _form(args[first])]
    return [(first, alike[0])] if len(alike) == 1 else []


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


def _form(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (leaf_shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__))) for leaf in leaves
    ]
