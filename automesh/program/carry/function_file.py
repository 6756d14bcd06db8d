"""Writes the Python function of a step to bytes, and traces it anew on another mesh (jax).

A trace cannot be carried where a part of it runs on each device apart (`shard_map`), or where
Python asked the mesh for its sizes: on another mesh the function itself has to be traced. So it is
pickled by value, with all of the script that it refers to; the script's mesh and its devices are
left out, and whoever reads the bytes puts a plan's mesh in their place.

Not every function can be pickled, and not every one means the same in another process (a class that
is registered with jax where it is defined, an open file). Then the script is run again.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import jax
from jax.sharding import AbstractMesh, Mesh

from automesh.package import is_users_file
from automesh.program.capture.abstract_arrays import is_abstract
from automesh.program.capture.hooks import Call, Jitted
from automesh.program.carry.meshes import Binding, CannotCarry, StoredMesh, stored_mesh

_REFUSED = (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFunction:
    """What a function was written as.

    Attributes:
      data: the bytes.
      meshes: that it refers to, by number.
      arrays: that it refers to, by number; those of its arguments are not among them.
    """

    data: bytes
    meshes: tuple[StoredMesh, ...]
    arrays: tuple[Any, ...]


def write_function(call: Call, own: Mesh) -> WrittenFunction:
    """Writes the function of a call, with its static arguments and the form of the others.

    Raises:
      CannotCarry: it, or something that it refers to, cannot be pickled.
    """
    buffer = io.BytesIO()
    writer = _Writer(buffer, own, jax.tree.leaves((call.args, call.kwargs)))
    try:
        with _users_modules_by_value():
            writer.dump((call.jitted, call.args, call.kwargs))
    except _REFUSED as error:
        line = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CannotCarry(f"its function cannot be pickled ({line})") from error
    return WrittenFunction(
        data=buffer.getvalue(), meshes=tuple(writer.meshes), arrays=tuple(writer.arrays)
    )


def read_function(
    data: bytes, binding: Binding, *, arrays: Sequence[Any], leaves: Sequence[Any]
) -> Call:
    """The call on the meshes of `binding`.

    Args:
      arrays: in place of those that were handed out.
      leaves: of all its arguments, on the new mesh; what stands for a static one is not looked at.

    Raises:
      CannotCarry: something in it cannot be made here.
    """
    try:
        jitted, args, kwargs = _Reader(io.BytesIO(data), binding, arrays, leaves).load()
    # Whatever the user's classes raise when they are made anew.
    except Exception as error:
        if isinstance(error, CannotCarry):
            raise
        line = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CannotCarry(f"its function cannot be read again ({line})") from error
    return Call(jitted=jitted, args=args, kwargs=kwargs, run=lambda: None, function=jitted)


@contextmanager
def _users_modules_by_value() -> Generator[None]:
    """While the body runs, functions of the user's modules are pickled with their code: to import
    such a module elsewhere would make its meshes anew."""
    added: list[Any] = []
    try:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and isinstance(file, str) and is_users_file(file):
                cloudpickle.register_pickle_by_value(module)
                added.append(module)
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


class _Writer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, own: Mesh, leaves: Sequence[Any]) -> None:
        super().__init__(file)
        self.meshes: list[StoredMesh] = []
        self.arrays: list[Any] = []
        self._own = own
        self._numbers: dict[Any, int] = {}
        self._leaves = {id(leaf): place for place, leaf in enumerate(leaves) if _is_array(leaf)}
        self._places = {device: place for place, device in enumerate(own.devices.flat)}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Mesh) and not obj.empty:
            return "mesh", self._number(obj)
        if isinstance(obj, AbstractMesh) and not obj.empty:
            return "abstract", self._number(obj)
        if isinstance(obj, jax.Device):
            if obj not in self._places:
                raise CannotCarry("its function refers to a device that its mesh has not")
            return "device", self._places[obj]
        if _is_array(obj):
            if id(obj) in self._leaves:
                return "leaf", self._leaves[id(obj)]
            self.arrays.append(obj)
            return "array", len(self.arrays) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Jitted):
            return _jitted, (obj.automesh_function, obj.automesh_settings)
        return super().reducer_override(obj)

    def _number(self, mesh: Any) -> int:
        if mesh not in self._numbers:
            self._numbers[mesh] = len(self.meshes)
            self.meshes.append(stored_mesh(mesh, self._own))
        return self._numbers[mesh]


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, jax.Ref)) or is_abstract(value)


def _jitted(function: Any, settings: dict[str, Any]) -> Any:
    return jax.jit(function, **settings)


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
            case _:
                return self._arrays[number]
