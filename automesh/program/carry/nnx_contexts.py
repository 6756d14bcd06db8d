"""Flax NNX's contexts of a call (jax, and flax where the script has imported it).

`nnx.jit` calls what it jits in a context of NNX under a tag that the jitted function holds, and the
function asks for it when it is traced. So a function that is traced again in another process needs
a context under the same tag.

Private in flax: `flax.nnx.graphlib.GRAPH_CONTEXT` (formerly in `flax.nnx.graph`). Without it, such
a function is not traced again, and the script is run for each mesh.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

_HOMES = ("flax.nnx.graphlib", "flax.nnx.graph")


def tags_in_force() -> tuple[Any, ...]:
    """Returns the tags of the contexts that NNX has entered, the outermost first."""
    for home in _HOMES:
        context: Any = getattr(sys.modules.get(home), "GRAPH_CONTEXT", None)
        stacks: dict[Any, Any] = getattr(context, "update_context_stacks", None) or {}
        if stacks:
            return tuple(tag for tag, stack in stacks.items() for _ in stack)
    return ()


@contextmanager
def contexts_of(tags: Sequence[Any]) -> Generator[None]:
    """Enters new contexts under these tags while the body runs."""
    with ExitStack() as stack:
        for tag in tags:
            nnx: Any = importlib.import_module("flax.nnx")
            stack.enter_context(nnx.update_context(tag))
        yield
