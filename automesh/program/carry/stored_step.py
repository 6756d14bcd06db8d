"""Stores the step of a script in a folder: its trace, arguments and jit settings (jax).

The folder is written by the run that found the step and read by every worker of the search. Only
the search may use it (mode 0700): its content is unpickled, so it is checked first that the folder
belongs to this account.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from automesh.errors import UsageError
from automesh.foreign.private import read_own
from automesh.limits import PAYLOAD_BYTES, STORED_STEP_BYTES
from automesh.program.absent.device_queries import attached
from automesh.program.capture.flow.sequence import composed_anew
from automesh.program.capture.hooks import JitSettings
from automesh.program.capture.nouns import AxisSplit, CarriedBy
from automesh.program.capture.step_call import (
    PartSource,
    Program,
    TracedCall,
    place_of,
    trace,
)
from automesh.program.carry.function_file import read_functions, write_functions
from automesh.program.carry.meshes import Binding, CannotCarry, StoredMesh, stored_mesh
from automesh.program.carry.names import Path as LeafPath
from automesh.program.carry.names import paths_of, tree_of
from automesh.program.carry.of_flax import contexts_of
from automesh.program.carry.trace_file import Handed, read_trace, write_trace
from automesh.program.carry.values import (
    StoredLeaf,
    StoredStepLost,
    Values,
    bytes_of,
    digest_of,
    dtype_of,
    write_values,
)
from automesh.program.lower.static_args import leaf_shape
from automesh.program.notes import note
from automesh.reading import Unreadable
from automesh.texts.exceptions import sentence_of

# In jax's messages: "is not divisible", "does not evenly divide", "should be divisible".
_INDIVISIBLE = re.compile(r"\bdivi(des?|sible)\b")
# Arguments up to this size are stored; larger ones are made up for measurements.
LARGEST_STORED_BYTES = STORED_STEP_BYTES
# Objects that a function refers to besides its arguments, such as a data set, are stored up to this
# size.
LARGEST_HELD_BYTES = 2**28
_STEP, _VALUES = "step.pickle", "values.bin"
# The file that names the mesh of the script's first run, while its step is the stored one.
OWN_MESH = "own-mesh"
# The file begins with the digest of the pickled step.
_DIGEST_BYTES = 32
# Settings of jax that decide what a trace means when it is read. Others are the script's business
# (its guards and checks), or the worker's own (platforms, caches).
_CONFIG = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_softmax_custom_jvp",
    "jax_remove_size_one_mesh_axis_from_type",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """The content of a folder without values.

    Attributes:
      own: the script's mesh.
      meshes: the meshes that the trace names, by number.
      frame: shardings of arguments and outputs, and the meshes in force; see `trace_file`.
      trace: the program, as it was traced.
      function: the step's function, see `function_file`; empty if it cannot be pickled.
      arrays: the arrays that the trace and the function hold, by number.
      held_at: where these arrays are.
      leaves: leaves of the arguments, in order.
      paths: for each argument, the path of each of its leaves.
      names: the user's names of the leaves.
      donated: for each leaf of the arguments, whether it is donated.
      compiler_options: compiler options that `jax.jit` got.
      config: settings of jax that were in force.
    """

    own: StoredMesh
    meshes: tuple[StoredMesh, ...]
    frame: bytes
    trace: bytes
    function: bytes
    arrays: tuple[StoredLeaf, ...]
    held_at: bytes
    leaves: tuple[StoredLeaf, ...]
    paths: tuple[tuple[LeafPath, ...], ...]
    names: tuple[str, ...]
    donated: tuple[bool, ...]
    compiler_options: tuple[tuple[str, Any], ...]
    config: tuple[tuple[str, Any], ...]

    @property
    def has_values(self) -> bool:
        """Whether its arguments can be made as the script made them."""
        return all(leaf.has_values for leaf in (*self.leaves, *self.arrays))


def store(
    call: TracedCall,
    folder: Path,
    *,
    own: Mesh,
    placed: Sequence[Any],
    most_bytes: int = LARGEST_STORED_BYTES,
) -> StoredStep:
    """Writes a call with its trace to a folder.

    Args:
      own: the script's mesh.
      placed: per leaf of the arguments, where it was when the step was first called so, see
        `step_call.place_of`; what comes back from the step is where the compiler has put it.
      most_bytes: values of arguments, and of arrays that the step holds, are stored if they have at
        most so many bytes.

    Raises:
      CannotCarry: the trace means nothing in another process.
      OSError: the disk is full.
    """
    leaves, settings, handed = call.leaves, call.settings, Handed(own=own)
    frame = write_trace(
        (
            *(settings.in_shardings, settings.out_shardings, tuple(placed)),
            *(call.context, call.entered),
        ),
        handed,
    )
    program: Any = call.traced.jaxpr
    trace = write_trace((program, settings.constants), handed)
    function = _function_of(call, leaves, handed)
    held_at = write_trace(tuple(map(_split_of, handed.arrays)), handed)
    every = [*leaves, *handed.arrays]
    kept = bytes_of(every) <= most_bytes
    described = write_values(every, folder / _VALUES, with_values=kept)
    step = StoredStep(
        own=stored_mesh(own, own),
        meshes=tuple(handed.meshes),
        frame=frame,
        trace=trace,
        function=function,
        arrays=described[len(leaves) :],
        held_at=held_at,
        leaves=described[: len(leaves)],
        paths=tuple(paths_of(arg) for arg in call.args),
        names=call.names,
        donated=tuple(call.settings.donated),
        compiler_options=tuple(sorted(call.settings.compiler_options.items())),
        config=_config(),
    )
    draft = folder / f"{_STEP}.draft"
    content = pickle.dumps(step)
    draft.write_bytes(digest_of(content).encode() + content)
    draft.replace(folder / _STEP)
    return step


def _function_of(call: TracedCall, leaves: Sequence[Any], handed: Handed) -> bytes:
    """Pickles the function of a call, or its functions; empty if they cannot be pickled, or refer
    to too much data."""
    sources, taken = call.sources, call.taken
    if call.source is not None:
        sources, taken = (PartSource(call=call.source, outputs=(), kept=()),), leaves
    if not sources:
        return b""
    known = len(handed.arrays)
    try:
        function = write_functions(sources, taken, handed)
    except CannotCarry as error:
        note(f"the step can only be carried as it was traced: {error.message}")
        function = b""
    if not function or bytes_of(handed.arrays[known:]) > LARGEST_HELD_BYTES:
        del handed.arrays[known:]
        return b""
    return function


def store_in(folder: str, call: TracedCall, own: Mesh, placed: Sequence[Any]) -> None:
    """Stores a step as `store` does, with the values of its arguments; the folder is empty, or
    holds the step of an earlier run."""
    place = Path(folder)
    (place / _VALUES).unlink(missing_ok=True)
    (place / OWN_MESH).unlink(missing_ok=True)
    store(call, place, own=own, placed=placed)


def _config() -> tuple[tuple[str, Any], ...]:
    config: Any = jax.config
    found: list[tuple[str, Any]] = []
    for name in _CONFIG:
        try:
            found.append((name, getattr(config, name)))
        except AttributeError:  # Not of this version.
            continue
    return tuple(found)


def set_config(step: StoredStep) -> None:
    """Gives jax the settings that were in force when the step was traced."""
    config: Any = jax.config
    for name, value in step.config:
        if getattr(config, name, value) != value:
            config.update(name, value)


def read_step(folder: Path) -> StoredStep:
    """Reads what `store` wrote; unpickles it.

    Raises:
      StoredStepLost: it is gone or damaged, or others may have written it.
    """
    try:
        whole = read_own(folder / _STEP, limit_bytes=PAYLOAD_BYTES)
    except Unreadable as error:
        why = str(error).removeprefix(f"`{folder / _STEP}` ")
        raise StoredStepLost(f"{_STEP} cannot be read ({why})") from error
    digest, content = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if digest_of(content).encode() != digest:
        raise StoredStepLost(f"{_STEP} is damaged")
    try:
        step = pickle.loads(content)
    except (AttributeError, ImportError) as error:
        raise StoredStepLost(f"{_STEP} holds what is in the script alone ({error})") from error
    assert isinstance(step, StoredStep)
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedCall:
    """A call on another mesh.

    Attributes:
      made: the mesh that replaces the script's own.
    """

    call: TracedCall
    made: Mesh


def carried_call(
    step: StoredStep,
    folder: Path,
    plan: Mesh,
    *,
    splits: tuple[AxisSplit, ...] = (),
    by: CarriedBy,
    with_values: bool,
) -> CarriedCall:
    """Makes the stored call on the mesh of a plan.

    Args:
      by: `trace` uses the stored program, `function` traces the function again.
      with_values: whether to make the arguments on the devices; else they are only described.

    Raises:
      CannotCarry: the program has other shapes on this mesh.
      ValueError: as jax raises it, where a dimension does not divide.
    """
    binding = Binding(plan=plan, stored=step.meshes, own=step.own, splits=splits)
    values = Values(folder / _VALUES)
    arrays = _arrays_of(step, binding, values)
    in_shardings, out_shardings, placed, context, _ = read_trace(step.frame, binding, arrays)
    if by == "trace":
        program, constants = read_trace(step.trace, binding, arrays)
        traced: Any = Program(jaxpr=program)
        settings = JitSettings(
            constants=tuple(constants),
            in_shardings=tuple(in_shardings),
            out_shardings=tuple(out_shardings),
            donated=step.donated,
            compiler_options=dict(step.compiler_options),
        )
    else:
        traced, settings = _traced_anew(step, binding, values)
    if with_values:
        leaves = [values.made(leaf, to) for leaf, to in zip(step.leaves, placed, strict=True)]
    else:
        leaves = [_description(leaf, to) for leaf, to in zip(step.leaves, placed, strict=True)]
    args, first = [], 0
    for paths in step.paths:
        args.append(tree_of(paths, leaves[first : first + len(paths)]))
        first += len(paths)
    call = TracedCall(
        traced=traced, args=tuple(args), settings=settings, names=step.names, context=context
    )
    return CarriedCall(call=call, made=binding.own_mesh())


def placed_call(step: StoredStep, folder: Path, plan: Mesh, *, with_values: bool) -> TracedCall:
    """Makes the stored call of a step that knows no mesh; its arguments are not placed yet.

    Raises:
      CannotCarry: its program names devices.
    """
    binding = Binding(plan=plan, stored=step.meshes, own=step.own)
    values = Values(folder / _VALUES)
    arrays = [_constant(leaf, values, None) for leaf in step.arrays]
    program, constants = read_trace(step.trace, binding, arrays)
    leaves = [
        values.made(leaf, None) if with_values else _description(leaf, None) for leaf in step.leaves
    ]
    args, first = [], 0
    for paths in step.paths:
        args.append(tree_of(paths, leaves[first : first + len(paths)]))
        first += len(paths)
    count = len(program.jaxpr.outvars)
    settings = JitSettings(
        constants=tuple(constants),
        in_shardings=(None,) * len(leaves),
        out_shardings=(None,) * count,
        donated=step.donated,
        compiler_options=dict(step.compiler_options),
    )
    return TracedCall(
        traced=Program(jaxpr=program), args=tuple(args), settings=settings, names=step.names
    )


def is_indivisible(error: BaseException) -> bool:
    """Whether jax says that a dimension does not divide over a mesh: the mesh is the cause, and the
    script would fail there as well."""
    return isinstance(error, ValueError) and bool(_INDIVISIBLE.search(str(error)))


def _traced_anew(step: StoredStep, binding: Binding, values: Values) -> tuple[Any, JitSettings]:
    """Traces the step's function on the mesh of a plan; returns the trace and the settings of its
    jit.

    If an axis is split, the function is traced on the mesh that the script would make of the same
    devices, as it knows no other names of axes: some of its objects, such as a function of
    `shard_map`, hold them. That trace is then carried to the mesh of the plan.
    """
    if not binding.splits:
        return _traced_on(step, binding, values)
    whole = Binding(plan=binding.joined(), stored=step.meshes, own=step.own)
    traced, settings = _traced_on(step, whole, values)
    handed = Handed(own=whole.own_mesh())
    shardings = (tuple(settings.in_shardings), tuple(settings.out_shardings))
    written = write_trace((traced.jaxpr, settings.constants, *shardings), handed)
    held_at = write_trace(tuple(map(_split_of, handed.arrays)), handed)
    own = stored_mesh(handed.own, handed.own)
    parts = Binding(plan=binding.plan, stored=handed.meshes, own=own, splits=binding.splits)
    places = read_trace(held_at, parts, ())
    arrays = [_moved(one, to) for one, to in zip(handed.arrays, places, strict=True)]
    program, constants, in_shardings, out_shardings = read_trace(written, parts, arrays)
    return Program(jaxpr=program), replace(
        settings,
        constants=tuple(constants),
        in_shardings=tuple(in_shardings),
        out_shardings=tuple(out_shardings),
    )


def _traced_on(step: StoredStep, binding: Binding, values: Values) -> tuple[Any, JitSettings]:
    """Traces the step's function on a mesh with the script's own axes."""
    if not step.function:
        raise CannotCarry("its function is not stored")
    arrays = _arrays_of(step, binding, values)
    *_, placed, context, entered = read_trace(step.frame, binding, arrays)
    leaves = [_description(leaf, to) for leaf, to in zip(step.leaves, placed, strict=True)]
    sources, tags = read_functions(step.function, binding, arrays=arrays, leaves=leaves)
    with ExitStack() as stack:
        if context is not None:
            stack.enter_context(jax.set_mesh(context))
        if entered is not None:
            with warnings.catch_warnings():
                # That `with mesh:` is out of date was said to the script.
                warnings.simplefilter("ignore", DeprecationWarning)
                stack.enter_context(entered)
        stack.enter_context(contexts_of(tags))
        try:
            again = trace(sources[0].call) if len(sources) == 1 else composed_anew(sources)
        # An object is not as in the process of the script, or the arguments do not suit this
        # mesh, for which libraries have errors of their own.
        except Exception as error:
            if isinstance(error, UsageError) or is_indivisible(error):
                raise
            why = f"its function cannot be traced again ({sentence_of(error)})"
            raise CannotCarry(why) from error
    if len(again.leaves) != len(leaves) or any(
        leaf_shape(leaf) != leaf_shape(other)
        for leaf, other in zip(again.leaves, leaves, strict=True)
    ):
        raise CannotCarry("its function has other arguments when it is traced again")
    return again.traced, again.settings


def _split_of(array: Any) -> NamedSharding | None:
    """Returns how an array that a step holds is split, as a data set that the script has put on its
    mesh; None for one that is on no mesh."""
    place = place_of(array)
    return place if isinstance(place, NamedSharding) else None


def _moved(array: Any, to: NamedSharding | None) -> Any:
    """Returns an array that a step holds, or its description, on another mesh."""
    if to is None:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=to)
    return jax.device_put(array, to) if _is_here(to) else array


def _is_here(place: NamedSharding) -> bool:
    """Whether arrays can be put there: the devices of a plan may be absent."""
    return place.device_set <= set(attached())


def _arrays_of(step: StoredStep, binding: Binding, values: Values) -> list[Any]:
    places = read_trace(step.held_at, binding, ())
    return [_constant(leaf, values, to) for leaf, to in zip(step.arrays, places, strict=True)]


def _constant(leaf: StoredLeaf, values: Values, to: NamedSharding | None) -> Any:
    if leaf.has_values:
        return values.made(leaf, to if to is not None and _is_here(to) else None)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), weak_type=leaf.weak_type, sharding=to)


def _description(leaf: StoredLeaf, to: Any) -> Any:
    if leaf.number is not None:
        return leaf.number
    if leaf.is_host and leaf.offset < 0:
        return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf))
    more: dict[str, Any] = {"is_ref": True} if leaf.is_ref else {"weak_type": leaf.weak_type}
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), sharding=to, **more)
