"""Models and optimizers that are objects: Flax nnx, Equinox (jax).

Neither library is imported here: objects of a library exist only if the process has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax


def is_nnx_object(node: Any) -> bool:
    """Whether it is an nnx module, optimizer, metric, stream of random numbers or variable.

    They are changed in place, and may share variables.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    # Before Flax 0.12 the common base class was `Object`.
    kinds = [getattr(nnx, name, None) for name in ("Pytree", "Object", "Variable")]
    return isinstance(node, tuple(kind for kind in kinds if isinstance(kind, type)))


def is_nnx_state(node: Any) -> bool:
    """Whether it is an `nnx.State`: variables of a module, without the module."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def is_nnx_jitted(step: Any) -> bool:
    """Whether `nnx.jit` has made a function: it takes nnx objects apart, jits the rest, and changes
    the objects."""
    return _root(step) == "flax" and hasattr(step, "jitted_fn")


def jax_function_in(step: Any) -> Any:
    """Returns the function of `jax.jit` inside a step of `nnx.jit`, which has the static arguments;
    otherwise `step`."""
    return step.jitted_fn if is_nnx_jitted(step) else step


def filters_arrays(step: Any) -> bool:
    """Whether Equinox's `filter_jit` or Haliax's `named_jit` has made a function: these treat
    everything except arrays as static, including numbers."""
    return _root(step) in ("equinox", "haliax")


def is_equinox_module(node: Any) -> bool:
    """Whether it is an Equinox module: its numbers are settings (the rate of a dropout), not
    arrays."""
    equinox: Any = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _root(step: Any) -> str:
    return type(step).__module__.partition(".")[0]


def split_objects(objects: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Takes nnx objects apart.

    Returns:
      The objects without their variables; and the variables of each object as a tree. A variable
      that two objects share only belongs to the first one.
    """
    nnx: Any = sys.modules["flax.nnx"]
    graph, state = nnx.split(tuple(objects))
    return graph, tuple(state.get(place) for place in range(len(objects)))


def merge_objects(graph: Any, states: Sequence[Any]) -> tuple[Any, ...]:
    """Makes new objects from the results of `split_objects`."""
    nnx: Any = sys.modules["flax.nnx"]
    parts = {place: state for place, state in enumerate(states) if jax.tree.leaves(state)}
    return tuple(nnx.merge(graph, nnx.State(parts)))
