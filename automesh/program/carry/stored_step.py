"""The step of a script in a folder: its trace, its arguments, what it was jitted with (jax).

The folder is written by the run that found the step and read by every worker of the search. It
belongs to the search alone (mode 0700): what is read here is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from automesh.program.capture.hooks import Settings
from automesh.program.capture.nouns import AxisSplit
from automesh.program.capture.step_call import TracedCall
from automesh.program.carry.meshes import Binding, StoredMesh, stored_mesh
from automesh.program.carry.names import Path as LeafPath
from automesh.program.carry.names import paths_of, tree_of
from automesh.program.carry.trace_file import read_trace, write_trace
from automesh.program.carry.values import StoredLeaf, Values, bytes_of, dtype_of, write_values

# Arguments up to this size are stored; larger ones are made up where they are measured.
LARGEST_STORED_BYTES = 4 * 2**30
_STEP, _VALUES = "step.pickle", "values.bin"
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
    """What a folder holds, but for values.

    Attributes:
      own: the script's mesh.
      meshes: that the trace names, by number.
      trace: see `trace_file`.
      arrays: that the trace holds, by number.
      leaves: of the arguments, in order.
      paths: per argument, the way to each of its leaves.
      names: what the user calls the leaves.
      donated: per leaf of the arguments.
      compiler_options: as given to `jax.jit`.
      config: settings of jax that were in force.
    """

    own: StoredMesh
    meshes: tuple[StoredMesh, ...]
    trace: bytes
    arrays: tuple[StoredLeaf, ...]
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
    with_values: bool = True,
) -> StoredStep:
    """Writes a call with its trace to a folder.

    Args:
      own: the script's mesh.
      placed: per leaf of the arguments, where it was when the step was first called so, see
        `step_call.place_of`; what comes back from the step is where the compiler has put it.
      with_values: False for a run without arrays.

    Raises:
      CannotCarry: the trace means nothing in another process.
      OSError: the disk is full.
    """
    leaves = call.leaves
    closed: Any = call.traced.jaxpr
    written = write_trace(
        {
            "jaxpr": closed,
            "constants": call.settings.constants,
            "in_shardings": call.settings.in_shardings,
            "out_shardings": call.settings.out_shardings,
            "placed": tuple(placed),
            "context": call.context,
        },
        own,
    )
    every = [*leaves, *written.arrays]
    kept = with_values and bytes_of(every) <= LARGEST_STORED_BYTES
    described = write_values(every, folder / _VALUES, with_values=kept)
    step = StoredStep(
        own=stored_mesh(own, own),
        meshes=tuple(written.meshes),
        trace=written.data,
        arrays=described[len(leaves) :],
        leaves=described[: len(leaves)],
        paths=tuple(paths_of(arg) for arg in call.args),
        names=call.names,
        donated=tuple(call.settings.donated),
        compiler_options=tuple(sorted(call.settings.compiler_options.items())),
        config=_config(),
    )
    draft = folder / f"{_STEP}.draft"
    draft.write_bytes(pickle.dumps(step))
    draft.replace(folder / _STEP)
    return step


def store_in(folder: str, call: TracedCall, own: Mesh, placed: Sequence[Any]) -> None:
    """As `store`, with the values that there are, in a folder that holds nothing yet or an earlier
    run's step."""
    place = Path(folder)
    (place / _VALUES).unlink(missing_ok=True)
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
    """Reads what `store` wrote; unpickles it."""
    step = pickle.loads((folder / _STEP).read_bytes())
    assert isinstance(step, StoredStep)
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """Stands for the `jax.stages.Traced` of a call: all that is asked of it is its program."""

    jaxpr: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedCall:
    """A call on another mesh.

    Attributes:
      made: the mesh in place of the script's own.
    """

    call: TracedCall
    made: Mesh


def carried_call(
    step: StoredStep,
    folder: Path,
    plan: Mesh,
    *,
    splits: tuple[AxisSplit, ...] = (),
    with_values: bool,
) -> CarriedCall:
    """The stored call on the mesh of a plan.

    Args:
      with_values: makes the arguments on the devices; else they are described.

    Raises:
      CannotCarry: the program has other shapes on this mesh.
      ValueError: as jax raises it, where a dimension does not divide.
    """
    binding = Binding(plan=plan, stored=step.meshes, own=step.own, splits=splits)
    values = Values(folder / _VALUES)
    arrays = [_constant(leaf, values) for leaf in step.arrays]
    read = read_trace(step.trace, binding, arrays)
    pairs = list(zip(step.leaves, read["placed"], strict=True))
    if with_values:
        leaves = [values.made(leaf, to) for leaf, to in pairs]
    else:
        leaves = [_description(leaf, to) for leaf, to in pairs]
    args, first = [], 0
    for paths in step.paths:
        args.append(tree_of(paths, leaves[first : first + len(paths)]))
        first += len(paths)
    settings = Settings(
        constants=tuple(read["constants"]),
        in_shardings=tuple(read["in_shardings"]),
        out_shardings=tuple(read["out_shardings"]),
        donated=step.donated,
        compiler_options=dict(step.compiler_options),
    )
    traced: Any = _Program(jaxpr=read["jaxpr"])
    call = TracedCall(
        traced=traced,
        args=tuple(args),
        settings=settings,
        names=step.names,
        context=read["context"],
    )
    return CarriedCall(call=call, made=binding.own_mesh())


def _constant(leaf: StoredLeaf, values: Values) -> Any:
    if leaf.has_values:
        return values.made(leaf, None)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), weak_type=leaf.weak_type)


def _description(leaf: StoredLeaf, to: Any) -> Any:
    if leaf.number is not None:
        return leaf.number
    if leaf.is_host and leaf.offset < 0:
        return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf))
    more: dict[str, Any] = {"is_ref": True} if leaf.is_ref else {"weak_type": leaf.weak_type}
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), sharding=to, **more)
