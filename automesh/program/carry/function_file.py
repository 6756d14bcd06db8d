"""Writes the Python functions of a step to bytes, and reads them to trace them on another mesh
(jax). Most steps have one.

A trace cannot be carried if a part of it runs per device (`shard_map`), or if Python code read the
sizes of the mesh: then the function itself must be traced on the other mesh. So it is pickled by
value, with all objects of the script that it refers to. The script's mesh and devices are left out,
and the reader replaces them by a plan's.

Some functions cannot be pickled or would behave differently in another process (a class that
registers itself with jax, an open file). Then the script is run again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from automesh.program.capture.abstract.arrays import is_abstract
from automesh.program.capture.hooks import Call, Jitted
from automesh.program.capture.step_call import MadeBefore, PartSource
from automesh.program.capture.unjitted import in_module, made_by
from automesh.program.carry.by_value import (
    answers_for_all,
    cached_function,
    library_function,
    tuple_of_arguments,
    users_modules_by_value,
    written_or_left_out,
)
from automesh.program.carry.meshes import Binding, CannotCarry
from automesh.program.carry.of_flax import has_nodes, nodes_register_later, tags_in_force
from automesh.program.carry.trace_file import Handed
from automesh.texts.exceptions import sentence_of

# NumPy arrays up to this size are pickled together with the object that holds them.
_LARGE_BYTES = 2**12


def write_functions(sources: Sequence[PartSource], leaves: Sequence[Any], handed: Handed) -> bytes:
    """Writes the functions of the calls that are a step, with their static arguments and the form
    of the others.

    Args:
      leaves: leaves of the dynamic arguments; the reader of the file replaces them with its own.
      handed: takes the meshes and arrays that the functions refer to.

    Raises:
      CannotCarry: one, or something that it refers to, cannot be pickled.
    """
    buffer = io.BytesIO()
    writer = _FunctionWriter(buffer, leaves, handed)
    try:
        with users_modules_by_value():
            writer.dump(has_nodes())
            writer.dump((len(sources), tags_in_force()))
            for number, source in enumerate(sources):
                call = source.call
                parts = _parts(call.function, call.settings)
                writer.dump((parts, call.args, call.kwargs, source.kept))
                writer.made(number, source.outputs)
            writer.dump([(kind, *how) for kind in writer.classes if (how := _registered(kind))])
    except CannotCarry:
        raise
    # Whatever the user's classes raise when they are asked how they are pickled.
    except Exception as error:
        raise CannotCarry(f"its function cannot be pickled ({sentence_of(error)})") from error
    return buffer.getvalue()


def read_functions(
    data: bytes, binding: Binding, *, arrays: Sequence[Any], leaves: Sequence[Any]
) -> tuple[list[PartSource], tuple[Any, ...]]:
    """Reads functions, and returns their calls on the meshes of `binding`, with the tags of the
    contexts of NNX in which they are traced.

    Args:
      arrays: in place of those that were handed out.
      leaves: of the dynamic arguments, on the new mesh.

    Raises:
      CannotCarry: something in it cannot be made here.
    """
    try:
        reader = _Reader(io.BytesIO(data), binding, arrays, leaves)
        with nodes_register_later(reader.load()):
            count, tags = reader.load()
            read = [reader.load() for _ in range(count)]
        for kind, taken_apart, put_together in reader.load():
            # Classes of Equinox register themselves when they are made.
            with contextlib.suppress(ValueError):
                jax.tree_util.register_pytree_node(kind, taken_apart, put_together)
        sources: list[PartSource] = []
        for parts, args, kwargs, kept in read:
            jitted = _jitted(*parts)
            call = Call(jitted=jitted, args=args, kwargs=kwargs, run=_nothing, function=jitted)
            sources.append(PartSource(call=call, outputs=(), kept=kept))
    # Whatever the user's classes raise when they are made anew.
    except Exception as error:
        if isinstance(error, CannotCarry):
            raise
        raise CannotCarry(f"its function cannot be read again ({sentence_of(error)})") from error
    return sources, tags


def _nothing() -> None:
    """Runs nothing: the call is only traced."""


class _FunctionWriter(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Any], handed: Handed) -> None:
        super().__init__(file)
        self._handed = handed
        self.classes: list[type[Any]] = []
        self._leaves = {id(leaf): place for place, leaf in enumerate(leaves) if _is_array(leaf)}
        self._made: dict[int, tuple[int, int]] = {}
        self._places = {device: place for place, device in enumerate(handed.own.devices.flat)}

    def made(self, part: int, outputs: Sequence[Any]) -> None:
        """Notes down what a call has returned, for the arguments of later ones."""
        self._made |= {
            id(output): (part, place) for place, output in enumerate(outputs) if _is_array(output)
        }

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Mesh) and not obj.empty:
            return "mesh", self._handed.mesh(obj)
        if isinstance(obj, AbstractMesh) and not obj.empty:
            return "abstract", self._handed.mesh(obj)
        if isinstance(obj, jax.Device):
            if obj not in self._places:
                raise CannotCarry("its function refers to a device that its mesh has not")
            return "device", self._places[obj]
        if _is_array(obj):
            if id(obj) in self._made:
                return "made", self._made[id(obj)]
            if id(obj) in self._leaves:
                return "leaf", self._leaves[id(obj)]
            return "array", self._handed.array(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Jitted):  # Written as jax's own function.
            return _jitted, _parts(obj.automesh_function, obj.automesh_settings)
        if (made := made_by(obj)) is not None:
            return _made, made
        for written in (tuple_of_arguments, library_function, cached_function, answers_for_all):
            if (how := written(obj)) is not None:
                return how
        how = super().reducer_override(obj)
        if how is not NotImplemented:
            if isinstance(obj, type):
                self.classes.append(obj)
            return how
        return written_or_left_out(obj, type(obj) in self.dispatch_table)


def _registered(kind: type[Any]) -> tuple[Any, Any] | None:
    """Returns the two functions with which a class of the script is registered with jax as a node
    of trees; None if it is not, or if this version of jax does not say."""
    trees: Any = importlib.import_module("jax._src.tree_util")
    entry: Any = getattr(trees, "_registry", {}).get(kind)
    return None if entry is None else (entry.to_iter, entry.from_iter)


def _is_array(value: Any) -> bool:
    is_large = isinstance(value, np.ndarray) and value.nbytes > _LARGE_BYTES
    return is_large or isinstance(value, (jax.Array, jax.Ref)) or is_abstract(value)


def _parts(function: Any, settings: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Returns the Python function that was jitted, and the settings of its jit: a pickled jitted
    function would lose how it is traced."""
    if settings is None:
        raise CannotCarry("how its function was jitted is not known")
    return function, settings


def _jitted(function: Any, settings: dict[str, Any]) -> Any:
    return importlib.import_module("jax._src.api").jit(function, **settings)


def _made(name: tuple[str, str], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    module, function = name
    return in_module(importlib.import_module(module), function)(*args, **settings)


class _Reader(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, binding: Binding, arrays: Sequence[Any], leaves: Sequence[Any]
    ) -> None:
        super().__init__(file)
        self._binding, self._arrays, self._leaves = binding, arrays, leaves

    def persistent_load(self, pid: Any) -> Any:
        kind, number = pid
        match kind:
            case "mesh":
                return self._binding.mesh(number)
            case "abstract":
                return self._binding.abstract_mesh(number, knows_devices=True)
            case "device":
                flat = self._binding.plan.devices.flat
                return flat[number % len(flat)]
            case "leaf":
                return self._leaves[number]
            case "made":
                return MadeBefore(part=number[0], output=number[1])
            case _:
                return self._arrays[number]
