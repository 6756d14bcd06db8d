"""The value that a build function may return if `(step, args)` is not enough (no jax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step on one mesh, with what a search needs to know about it.

    Attributes:
      step: a function, or one that is already jitted. A plain function is jitted with
        `static_argnums` and `donate_argnums`; a jitted one keeps its own settings.
      args: positional arguments: pytrees of `jax.ShapeDtypeStruct` (with shardings), arrays,
        mutable array references, or static values such as a config object.
      kwargs: keyword arguments, of the same kinds.
      static_argnums: positions in `args` of static arguments. Arguments that hold something other
        than arrays and numbers are static without being listed.
      donate_argnums: positions in `args` whose buffers the step may reuse.
      init: `init(mesh)` returns the real initial arguments: a tuple (or list) of all of `args` or
        of the leading ones, static ones left out, or the first argument alone. Leaves of `args`
        without a sharding take the sharding that the compiler gives to them as outputs of `init`.
      advance: `advance(outputs, args)` returns the arguments of the next step. By default leading
        outputs replace the leading arguments whose structure, shapes and types they have;
        references stay in place.
      context: a context manager, or a function without arguments that returns one, entered around
        tracing and running (`jax.set_mesh`, logical-axis rules).
      axis_types: `auto`, `explicit` or `manual` for all axes, or one of these (or
        `jax.sharding.AxisType`s) per mesh axis, as a sequence or by name. `build` is called again
        with such a mesh. None means Auto.
      baseline: the mesh that is used today, in text form such as `dp:2,tp:4`, knobs may follow
        (`dp:8 remat=full`): what others are compared with.
      facts: named integers that constraints of a search space may refer to, for example
        `{"num_kv_heads": 8}`. They may not depend on the mesh.
      tokens_per_step: tokens that one step consumes, 0 if that means nothing here.
    """

    step: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    static_argnums: int | Sequence[int] = ()
    donate_argnums: int | Sequence[int] = ()
    init: Callable[[Any], Any] | None = None
    advance: Callable[[Any, tuple[Any, ...]], Sequence[Any]] | None = None
    context: AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]] | None = None
    axis_types: Any = None
    baseline: str | None = None
    facts: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens_per_step: int = 0


@dataclass(frozen=True, slots=True)
class NamedWorkload(Workload):
    """A workload whose arguments have names in the user's script.

    Attributes:
      leaf_names: the user's names of the leaves of the arguments, in their order; leaves without
        one are named by their places.
      carried: (leaf of the arguments, leaf of the outputs) for each output that the script passes
        as this argument to its next step.
      unplaced: leaves of the arguments that the script has put on no mesh before its first step.
      source: file and line where the step's function begins; empty if unknown.
    """

    leaf_names: tuple[str, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    unplaced: tuple[int, ...] = ()
    source: tuple[str, int] = ("", 0)


def leaf_names_of(workload: Workload) -> tuple[str, ...]:
    """Returns the user's names of the leaves of the arguments; empty if only their places are
    known."""
    return workload.leaf_names if isinstance(workload, NamedWorkload) else ()
