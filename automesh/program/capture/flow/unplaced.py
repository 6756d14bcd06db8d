"""Finds the arrays that a script has on one device when its first step begins (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from automesh.program.capture.abstract.arrays import is_abstract
from automesh.program.capture.flow.calls import leaf_bytes
from automesh.program.capture.step_call import TracedCall
from automesh.program.lower.static_args import is_ref

_LARGE_BYTES = 2**20


def unplaced(call: TracedCall, placed: Sequence[Any]) -> tuple[int, ...]:
    """Returns the arrays among the leaves of a call's arguments that nobody has put on a mesh, as
    what `jnp.zeros` makes.

    With a mesh in force, jax makes arrays on all of it. What `in_shardings` puts on the mesh in
    every call costs no second compile, and only large arrays cost memory.

    Args:
      placed: the placement of each leaf at the first call, see `step_call.place_of`.
    """
    if call.context is not None:
        return ()
    leaves = zip(call.leaves, call.settings.in_shardings, placed, strict=True)
    return tuple(
        number
        for number, (leaf, to, at) in enumerate(leaves)
        if at is None
        and (is_abstract(leaf) or isinstance(leaf, jax.Array))
        and not is_ref(leaf)
        and (to is None or leaf_bytes(leaf) >= _LARGE_BYTES)
    )
