"""Which arguments of a step have no values of the user's (jax)."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from automesh.program.lower.static_args import is_concrete
from automesh.program.script.workload import Workload


def made_up_arguments(workload: Workload) -> tuple[str, ...]:
    """Arguments that are only described, and whose values are made up on the devices.

    Returns:
      Names of the step's parameters, or `args[1]` where they are not known. Empty if the workload
      has an `init`, which may give any of them.
    """
    if workload.init is not None:
        return ()
    parameters = _parameters(workload.step)
    named = [
        (parameters[place] if place < len(parameters) else f"args[{place}]", arg)
        for place, arg in enumerate(workload.args)
    ]
    named += list(workload.kwargs.items())
    return tuple(name for name, arg in named if _has_described(arg))


def _has_described(arg: Any) -> bool:
    return any(hasattr(leaf, "shape") and not is_concrete(leaf) for leaf in jax.tree.leaves(arg))


def _parameters(step: Any) -> list[str]:
    """Positional parameters of the step, as far as they have names of their own."""
    try:
        found = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of a callable that says nothing of its parameters
        return []
    names: list[str] = []
    for one in found:
        if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            break
        names.append(one.name)
    return names
