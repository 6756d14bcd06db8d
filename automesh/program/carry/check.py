"""Whether the step that was carried to a mesh is the one of a real run there (jax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from automesh.program.lower.program_text import first_difference
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.script.build import Built


def difference(
    real: Built,
    carried: Built,
    *,
    lower: Callable[[Built], Any],
    name: str,
) -> str:
    """What a real run does in another way than the carried step, in a sentence; empty if nothing.

    Args:
      real, carried: on the same mesh.
      lower: lowers either.
      name: of the step, for the sentence.
    """
    said = _of_arguments(real, carried)
    if said:
        return said
    outcomes = [_lowered(lower, built) for built in (real, carried)]
    (program, error), (other, refusal) = outcomes
    if program is None or other is None:
        if program is None and other is None:
            return ""  # Refused by jax in both ways: "127 does not divide by 2".
        says = error or refusal
        return f"`{name}` cannot be lowered {'there' if program is None else 'as carried'} ({says})"
    if program.fingerprint(()) == other.fingerprint(()):
        return ""
    found = first_difference(program.lines(), other.lines())
    if found is None:
        return f"`{name}` runs on devices in another order there"
    where = f" at {found.place}" if found.place else ""
    return f"`{name}` is another program there{where}: `{found.line}`, and not `{found.other}`"


def _lowered(lower: Callable[[Built], Any], built: Built) -> tuple[Any, str]:
    try:
        return lower(built), ""
    # Whatever jax or the step raises: it counts only if it is raised in one of two ways.
    except Exception as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def _of_arguments(real: Built, carried: Built) -> str:
    ones, others = _leaves(real), _leaves(carried)
    if len(ones) != len(others):
        return f"its step has {len(ones)} arrays as arguments there, and {len(others)} elsewhere"
    for (path, one), (_, other) in zip(ones, others, strict=True):
        if _form(one) != _form(other):
            return f"`{path}` is {_form(one)} there, and {_form(other)} elsewhere"
    for (path, one), (_, other) in zip(ones, others, strict=True):
        first: Any = getattr(one, "sharding", None)
        second: Any = getattr(other, "sharding", None)
        if isinstance(first, NamedSharding) and isinstance(second, NamedSharding):
            if not first.is_equivalent_to(second, len(leaf_shape(one))):
                return f"`{path}` is split by {first.spec} there, and by {second.spec} elsewhere"
    return ""


def _leaves(built: Built) -> list[tuple[str, Any]]:
    tree = (built.workload.args, dict(built.workload.kwargs))
    return [
        (_name(jax.tree_util.keystr(path)), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _name(path: str) -> str:
    return f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}"


def _form(leaf: Any) -> str:
    if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
        return type(leaf).__name__
    return f"{leaf_dtype(leaf)}{list(leaf_shape(leaf))}"
