"""What a function that uses Flax needs in another process (jax, and flax where the script has
imported it).

`nnx.jit` calls what it jits in a context of NNX under a tag that the jitted function holds, and the
function asks for it when it is traced. So a function that is traced again in another process needs
a context under the same tag.

Classes of `flax.struct.PyTreeNode`, such as a script's own `TrainState`, register themselves with
jax as soon as they are made. pickle makes a class before it knows its fields, so it would be a node
without children; it is registered later, as it was in the script.

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


def has_nodes() -> bool:
    """Whether a script may have classes of `flax.struct.PyTreeNode`."""
    return "flax.struct" in sys.modules


@contextmanager
def nodes_register_later(has_nodes: bool) -> Generator[None]:
    """Keeps classes of `flax.struct.PyTreeNode` that are read with a function from registering
    themselves with jax while the body runs; those of libraries that it imports do."""
    if not has_nodes:
        yield
        return
    node: Any = importlib.import_module("flax.struct").PyTreeNode
    own = vars(node)["__init_subclass__"]

    def made(kind: type[Any], **settings: Any) -> None:
        if kind.__module__ != "__main__" and kind.__module__ in sys.modules:
            own.__func__(kind, **settings)

    node.__init_subclass__ = classmethod(made)
    try:
        yield
    finally:
        node.__init_subclass__ = own


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
