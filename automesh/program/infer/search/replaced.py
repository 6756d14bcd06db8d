"""Pairs results of a step with the arguments that they replace in the next call (jax).

The search sees which arrays come back, since it runs the loop of the script. `MeshConfig.apply`
does not, and compares trees: their structures, shapes, types and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from automesh.program.capture.nouns import Carried
from automesh.program.lower.static_args import leaf_shape

_Path = tuple[str, ...]
_Form = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """Leaves of a tree.

    Attributes:
      paths: the keys that lead to each leaf.
      forms: shape and type of each leaf.
    """

    paths: Sequence[_Path]
    forms: Sequence[_Form]


def carried_of(args: Sequence[Any], results: Any, names: Sequence[str] = ()) -> tuple[Carried, ...]:
    """Pairs parts of the results with the arguments that they replace.

    An argument is replaced by the part of the results that has the same structure, shapes and
    types: by one under its own name, else by the first one that is left. If no part fits the whole
    argument, its own parts are looked for. Numbers are skipped: a loss does not replace a learning
    rate.

    Args:
      args: the step's arguments, without static ones.
      names: for each argument, the name of its parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> w, m = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
      >>> carried_of((w, m), {"m": m, "w": w}, ("w", "m"))
      (Carried(output=1, argument=0, count=1), Carried(output=0, argument=1, count=1))
    """
    made = _leaves(results)
    taken: set[int] = set()
    found: list[Carried] = []
    place = 0
    wanted: list[tuple[_Leaves, int, str]] = []
    for number, arg in enumerate(args):
        known = _leaves(arg)
        wanted.append((known, place, names[number] if number < len(names) else ""))
        place += len(known.forms)
    own = frozenset(name for _, _, name in wanted if name)
    for known, first, name in wanted:
        found += _replaced(known, first, name, made, taken, own)
    return tuple(found)


def _replaced(
    known: _Leaves, first: int, name: str, made: _Leaves, taken: set[int], own: frozenset[str]
) -> list[Carried]:
    if not any(shape for shape, _ in known.forms):
        return []
    count = len(known.forms)
    best: tuple[bool, int] | None = None
    for start in range(len(made.forms) - count + 1):
        prefix = _prefix(known, made, start)
        if prefix is None or any(place in taken for place in range(start, start + count)):
            continue
        # A part that has another argument's name belongs to that one.
        if name not in prefix and own & set(prefix):
            continue
        rank = (name not in prefix, start)
        if best is None or rank < best:
            best = rank
    if best is not None:
        taken.update(range(best[1], best[1] + count))
        return [Carried(output=best[1], argument=first, count=count)]
    found: list[Carried] = []
    for part, offset, key in _children(known):
        found += _replaced(part, first + offset, key, made, taken, own - {name})
    return found


def _prefix(known: _Leaves, made: _Leaves, start: int) -> _Path | None:
    """Returns the keys that lead to a part of the results with the structure of an argument; None
    if the leaves from `start` on are no such part."""
    prefix: _Path | None = None
    for place, (path, form) in enumerate(zip(known.paths, known.forms, strict=True), start):
        if made.forms[place] != form:
            return None
        whole = made.paths[place]
        cut = len(whole) - len(path)
        if cut < 0 or whole[cut:] != path or prefix not in (None, whole[:cut]):
            return None
        prefix = whole[:cut]
    return prefix


def _children(known: _Leaves) -> list[tuple[_Leaves, int, str]]:
    """Returns the parts of a tree, each with the place of its first leaf and its key."""
    found: list[tuple[_Leaves, int, str]] = []
    begun = 0
    for place in range(1, len(known.paths) + 1):
        key = known.paths[begun][:1]
        if place < len(known.paths) and key and known.paths[place][:1] == key:
            continue
        if key:
            paths = [path[1:] for path in known.paths[begun:place]]
            part = _Leaves(paths=paths, forms=known.forms[begun:place])
            found.append((part, begun, key[0]))
        begun = place
    return found


def _leaves(tree: Any) -> _Leaves:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return _Leaves(
        paths=[tuple(map(_key, path)) for path, _ in leaves],
        forms=[(leaf_shape(leaf), str(jax.dtypes.result_type(leaf))) for _, leaf in leaves],
    )


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
