"""Takes a call of a jitted function out of its script: a step of its own with its arguments (jax).

The function is traced where the script calls it, with all that is in force there (meshes, logical
axis rules, thread-locals of libraries). The result is that trace, as a function of its leaves,
which no longer needs the script.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, primitives
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from automesh.program.absent.device_queries import seen_by_scripts
from automesh.program.capture.abstract.arrays import described, is_abstract, without_data
from automesh.program.capture.abstract.trace import is_without_arrays
from automesh.program.capture.flow.names import leaf_names
from automesh.program.capture.flow.program import forwarded
from automesh.program.capture.hooks import Call, JitSettings, settings_of
from automesh.program.capture.nouns import Capture, Carried
from automesh.program.capture.shown import without_shown
from automesh.program.capture.split_axes import state_shardings
from automesh.program.lower.static_args import is_concrete, is_ref, split_of
from automesh.program.script.workload import NamedWorkload, Workload

# The argument for arrays without data that the step holds in addition to its arguments. Its name
# sorts last, so that the other arguments keep their positions.
_HELD = "~held"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Replaces a `jax.stages.Traced` where only its program is read."""

    jaxpr: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """One of several calls that are a step, in order to be traced again.

    Attributes:
      outputs: the leaves of what it has returned.
      kept: positions of the outputs that the whole step returns.
    """

    call: Call
    outputs: tuple[Any, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBefore:
    """Replaces an argument of a call: it is an output of an earlier one of several calls."""

    part: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call of a jitted function with its trace.

    Attributes:
      traced: the trace without calls that only show something on the host, see `shown`.
      args: the arguments without the static ones. Keyword arguments come last, sorted by name,
        which is the order in which jax takes their leaves.
      settings: what the function was jitted with.
      context: the mesh that `jax.set_mesh` had put in force; None without one.
      entered: the mesh that `with mesh:` had put in force; None without one.
      names: the user's names of the leaves of the arguments; empty if `trace` was not asked for
        them.
      source: the call itself; None if the step is made of several calls.
      sources: the calls, if it is made of several.
      taken: the arguments of these calls that are arguments of the step, which has copies of what
        the calls destroy.
    """

    traced: jax.stages.Traced | Program
    args: tuple[Any, ...]
    settings: JitSettings
    names: tuple[str, ...] = ()
    context: Mesh | None = None
    entered: Mesh | None = None
    source: Call | None = None
    sources: tuple[PartSource, ...] = ()
    taken: tuple[Any, ...] = ()

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.args)


def trace(call: Call, *, with_names: bool = False) -> TracedCall:
    """Traces a call where the script makes it.

    Args:
      with_names: whether to look for the user's names of its arrays.

    Raises:
      UsageError: this version of jax does not say which arguments are static.
    """
    stated, keywords = described((call.args, call.kwargs))
    workload = Workload(call.jitted, stated, keywords)
    traced = call.jitted.trace(*stated, **keywords)
    split = split_of(workload, call.jitted, traced)
    args, kwargs = split.dynamic(call.args, call.kwargs)
    program = without_shown(traced.jaxpr)
    return TracedCall(
        traced=traced if program is traced.jaxpr else Program(jaxpr=program),
        args=(*args, *(kwargs[name] for name in sorted(kwargs))),
        settings=settings_of(traced),
        names=leaf_names(call, split) if with_names else (),
        context=mesh_in_force(),
        entered=mesh_entered(),
        source=call,
    )


def mesh_in_force() -> Mesh | None:
    """Returns the mesh that `jax.set_mesh` has put in force; None if there is none, or if a trace
    is in progress, during which jax does not say."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if mesh.empty else mesh


def mesh_entered() -> Mesh | None:
    """Returns the mesh that a statement `with mesh:` has put in force, of which
    `jax.sharding.get_mesh` says nothing; None if there is none."""
    resources: Any = getattr(importlib.import_module("jax._src.mesh"), "thread_resources", None)
    mesh = None if resources is None else resources.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


def place_of(leaf: Any) -> Any:
    """Returns the placement of a leaf of the arguments; None for one that jax moves to where it is
    used."""
    if is_abstract(leaf):
        return leaf.placed
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def workload_of(call: TracedCall, capture: Capture, made: Mesh | None) -> Workload:
    """Returns the workload that does what the call does, with the arguments of the call.

    Args:
      made: the mesh that the script got for its own.
    """
    mesh = call.context
    args = _placed(call)
    begins = capture.step.defined_at
    if capture.splits and made is not None and AxisType.Explicit not in made.axis_types:
        call, args = _with_split_state(call, args, capture, made)
    pairs = _replaced(call, capture.step.carried)
    arranged = _arranged(call, pairs)
    held = [
        constant if _is_split(constant) else without_data(constant)
        for constant in (*call.settings.constants, *call.traced.jaxpr.consts)
        if _is_held(constant)
    ]
    return NamedWorkload(
        _jitted(call, capture.step.name, arranged),
        args,
        {_HELD: tuple(held)} if held else {},
        advance=None if arranged.leads else _advance(pairs, call.settings.donated),
        context=None if mesh is None else lambda: jax.set_mesh(mesh),
        axis_types=capture.searched.axis_types if capture.makes_mesh else None,
        # A mesh of fewer devices than there are cannot be compared with.
        baseline=str(capture.searched) if _has_all_devices(capture) else None,
        leaf_names=_names(call, len(jax.tree.leaves(args)), len(held)),
        carried=tuple(pairs),
        unplaced=capture.unplaced if capture.makes_mesh else (),
        source=(begins.file, begins.line),
    )


def _names(call: TracedCall, num_leaves: int, num_held: int) -> tuple[str, ...]:
    """Returns the user's names of the leaves of the arguments, and names of the arrays that the
    step holds, which come behind them."""
    if len(call.names) != num_leaves:
        return call.names
    return (*call.names, *(f"closed_over[{number}]" for number in range(num_held)))


def _has_all_devices(capture: Capture) -> bool:
    return (
        capture.makes_mesh
        and not capture.num_devices
        and capture.mesh.num_devices == seen_by_scripts()[2]
    )


def _is_held(constant: Any) -> bool:
    """Whether an array that the step holds is an argument of what is searched: it has no data, or
    is split over the mesh, which only shardings of arguments say."""
    is_described = is_abstract(constant) or isinstance(constant, jax.ShapeDtypeStruct)
    return is_described or _is_split(constant)


def _is_split(constant: Any) -> bool:
    if is_abstract(constant) or not isinstance(constant, jax.Array):
        return False
    sharding = constant.sharding
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def _with_split_state(
    call: TracedCall, args: tuple[Any, ...], capture: Capture, mesh: Mesh
) -> tuple[TracedCall, tuple[Any, ...]]:
    """Returns the call with the state split by the parts of axes that leave it whole, both as
    arguments and as the outputs that replace them."""
    leaves, tree = jax.tree.flatten(args)
    pairs = _pairs(capture.step.carried)
    found = state_shardings(leaves, [argument for argument, _ in pairs], mesh, capture.splits)
    placed = [
        _put(leaf, found[position]) if position in found else leaf
        for position, leaf in enumerate(leaves)
    ]
    after = list(call.settings.out_shardings)
    for argument, output in pairs:
        after[output] = found.get(argument, after[output])
    settings = replace(call.settings, out_shardings=tuple(after))
    return replace(call, settings=settings), tree.unflatten(placed)


def _placed(call: TracedCall) -> tuple[Any, ...]:
    """Returns the arguments with the shardings that `in_shardings` states."""
    leaves, tree = jax.tree.flatten(call.args)
    leaves = [_as_taken(without_data(leaf) if is_without_arrays() else leaf) for leaf in leaves]
    placed = [
        leaf if to is None or is_ref(leaf) else _put(leaf, to)
        for leaf, to in zip(leaves, call.settings.in_shardings, strict=True)
    ]
    return tree.unflatten(placed)


def _as_taken(leaf: Any) -> Any:
    """Returns an array of numpy as jax takes it: with 32 bits instead of 64, unless
    `jax_enable_x64` is set."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        dtype = taken_as(leaf.dtype)
        return leaf if dtype == leaf.dtype else leaf.update(dtype=dtype)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf, taken_as(leaf.dtype))
    return leaf


def taken_as(dtype: Any) -> Any:
    """Returns the type that jax gives to arrays of a type."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def weakly_typed(array: jax.Array) -> jax.Array:
    """Returns an array with a weak type, which gives way to the type of the array that it is
    combined with, like that of `jnp.full(shape, 0.1)`."""
    convert = primitives.convert_element_type_p
    return convert.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def _put(leaf: Any, to: Sharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=to)
    if is_without_arrays():
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf), sharding=to)
    return jax.device_put(leaf, to) if is_concrete(leaf) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arranged:
    """The order in which the step returns its outputs.

    Attributes:
      trees: the trees of the leading arguments that are replaced as a whole; what replaces them
        comes first.
      order: positions of the outputs, in the order in which the step returns them.
    """

    trees: tuple[Any, ...]
    order: tuple[int, ...]

    @property
    def leads(self) -> bool:
        return bool(self.trees)

    def outputs(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns outputs, or something for each of them, in the order and trees in which the step
        returns them."""
        rest = iter([leaves[position] for position in self.order])
        parts = [
            tree.unflatten([next(rest) for _ in range(tree.num_leaves)]) for tree in self.trees
        ]
        return (*parts, *rest)


def _arranged(call: TracedCall, pairs: Sequence[tuple[int, int]]) -> _Arranged:
    """Puts the outputs that replace arguments first, as training steps usually do, if all these
    arguments are the leading ones. The step is then carried on like any other."""
    replaces = dict(pairs)
    count = len(call.settings.out_shardings)
    trees: list[Any] = []
    first: list[int] = []
    position = 0
    for arg in call.args:
        tree = jax.tree.structure(arg)
        leaves = range(position, position + tree.num_leaves)
        if not all(leaf in replaces for leaf in leaves):
            break
        position += tree.num_leaves
        trees.append(tree)
        first += [replaces[leaf] for leaf in leaves]
    if len(first) != len(replaces) or len(set(first)) != len(first):
        trees, first = [], []
    rest = [output for output in range(count) if output not in set(first)]
    return _Arranged(trees=tuple(trees), order=(*first, *rest))


def _pairs(carried: Sequence[Carried]) -> list[tuple[int, int]]:
    """Returns pairs (leaf of the arguments, leaf of the outputs that replaces it)."""
    return [
        (run.argument + offset, run.output + offset)
        for run in carried
        for offset in range(run.count)
    ]


def _replaced(call: TracedCall, carried: Sequence[Carried]) -> list[tuple[int, int]]:
    """Returns pairs (leaf of the arguments, leaf of the outputs that replaces it): those of the
    state that the script gives back, and those of donated arguments that the step returns
    unchanged, such as a learning rate among the optimizer's variables. Nothing new shows that the
    latter come back, but after their donation only the output is left."""
    pairs = _pairs(carried)
    constants = len(call.settings.constants)
    arguments = {argument for argument, _ in pairs}
    outputs = {output for _, output in pairs}
    returned = forwarded(call.traced.jaxpr, num_constants=constants)
    for output, argument in enumerate(returned):
        if (
            argument is not None
            and argument not in arguments
            and output not in outputs
            and call.settings.donated[argument]
        ):
            arguments.add(argument)
            pairs.append((argument, output))
    return pairs


def _jitted(call: TracedCall, name: str, arranged: _Arranged) -> Any:
    closed, settings = call.traced.jaxpr, call.settings

    def step(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        held = iter(kwargs.pop(_HELD, ()))
        # Those that a jitted function hands to another, then those of the function itself.
        constants, own = (
            [next(held) if _is_held(constant) else constant for constant in one]
            for one in (settings.constants, closed.consts)
        )
        function = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, own))
        leaves = jax.tree.leaves((args, kwargs))
        return arranged.outputs(function(*constants, *leaves))

    step.__name__ = step.__qualname__ = name
    out: dict[str, Any] = {}
    if any(to is not None for to in settings.out_shardings):
        out["out_shardings"] = arranged.outputs(settings.out_shardings)
    if settings.compiler_options:
        out["compiler_options"] = settings.compiler_options
    return jax.jit(step, donate_argnums=_donated(call), **out)


def _donated(call: TracedCall) -> tuple[int, ...]:
    """Returns the positions of the arguments that are donated as a whole, as `donate_argnums` wants
    them."""
    found: list[int] = []
    first = 0
    for position, arg in enumerate(call.args):
        count = len(jax.tree.leaves(arg))
        if count and all(call.settings.donated[first : first + count]):
            found.append(position)
        first += count
    return tuple(found)


def _advance(
    pairs: Sequence[tuple[int, int]], donated: Sequence[bool]
) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] | None:
    """Returns a function that gives the outputs to the arguments of the next call, as the script
    does: the same arguments, if nothing comes back. None if they are donated, which leaves it to
    the forms of arguments and outputs what comes back."""
    if not pairs and any(donated):
        return None

    def advance(outputs: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        made = jax.tree.leaves(outputs)
        leaves, tree = jax.tree.flatten(args)
        for argument, output in pairs:
            if argument < len(leaves):
                leaves[argument] = made[output]
        return tree.unflatten(leaves)

    return advance
