"""Writes the trace of a step to bytes, and reads it back on another mesh (jax).

A trace (a jaxpr) names the meshes of the script in its types, shardings, contexts and inner
programs. The bytes name them by number, and the reader gives the mesh for each number. So a trace
is carried to another mesh, in another process and without the script, when it is read.

The bytes hold what lowering needs:

* objects that a library keeps under a name (primitives, markers such as `UNSPECIFIED`) are written
  as that name;
* a Python function that only differentiation would call (the rules of `custom_jvp`) is left out;
  its stand-in raises if it is called;
* places in the user's code are kept, so that findings still name lines;
* arrays that the trace holds are handed to the caller, who stores them.

The classes of a jaxpr and the traceback of an equation are private in jax, and only this module
uses them; read in jax 0.10.1 to 0.12.0.1. If a class has changed, `write_trace` raises
`CannotCarry` and the script is run again for each mesh.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from automesh.package import is_users_file
from automesh.program.capture.shown import line_of
from automesh.program.capture.world.meshes import text_of
from automesh.program.carry.by_value import reduced
from automesh.program.carry.meshes import Binding, CannotCarry, StoredMesh, stored_mesh
from automesh.program.spec_entries import entries_of
from automesh.texts.exceptions import sentence_of

_CORE: Any = importlib.import_module("jax._src.core")
_SOURCE: Any = importlib.import_module("jax._src.source_info_util")
_LINEAR: Any = importlib.import_module("jax._src.linear_util")
_LITERALS: Any = importlib.import_module("jax._src.literals")
# Typed numbers in a trace, which pickle would write as plain ones.
_SCALARS = (_LITERALS.TypedInt, _LITERALS.TypedFloat, _LITERALS.TypedComplex)
# Number of traceback frames that are kept: `explain` and MLIR's locations show no more.
_MOST_FRAMES = 10
# Parameters of collectives that name mesh axes.
_AXIS_PARAMETERS = frozenset(
    {"axes", "axis_name", "axis_names", "manual_axes", "newly_manual_axes"}
)


@dataclass(slots=True, kw_only=True)
class Handed:
    """The meshes and arrays that are stored apart from the bytes, which name them by number.

    Attributes:
      own: the script's mesh; other meshes are described by its devices.
      meshes, arrays: the meshes and arrays by number.
    """

    own: Mesh
    meshes: list[StoredMesh] = field(default_factory=list[StoredMesh])
    arrays: list[Any] = field(default_factory=list[Any])
    _numbers: dict[Any, int] = field(default_factory=dict[Any, int])

    def mesh(self, mesh: Any) -> int:
        """Returns the number of a mesh."""
        if mesh not in self._numbers:
            self._numbers[mesh] = len(self.meshes)
            self.meshes.append(stored_mesh(mesh, self.own))
        return self._numbers[mesh]

    def array(self, array: Any) -> int:
        """Returns the number of an array."""
        self.arrays.append(array)
        return len(self.arrays) - 1


def write_trace(value: Any, handed: Handed) -> bytes:
    """Writes a closed jaxpr, or anything that holds traces, shardings and meshes.

    Args:
      handed: collects its meshes and arrays.

    Raises:
      CannotCarry: it holds an object that has no meaning in another process.
    """
    buffer = io.BytesIO()
    writer = _TraceWriter(buffer, handed)
    try:
        writer.dump(value)
    except CannotCarry:
        raise
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CannotCarry(f"its trace cannot be written ({sentence_of(error)})") from error
    return buffer.getvalue()


def read_trace(data: bytes, binding: Binding, arrays: Sequence[Any]) -> Any:
    """Reads what `write_trace` wrote, on the meshes of `binding`.

    Args:
      arrays: the arrays by number.

    Raises:
      CannotCarry: a part of the program has other shapes on these meshes.
      ValueError: from jax, if a dimension does not divide evenly.
    """
    with _reading(_Reading(binding=binding, arrays=arrays)):
        try:
            return pickle.loads(data)
        except (AttributeError, ImportError) as error:
            raise CannotCarry(
                f"its trace holds what is in the script alone ({sentence_of(error)})"
            ) from error


# Writing


class _TraceWriter(pickle.Pickler):
    def __init__(self, file: io.BytesIO, handed: Handed) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._handed = handed
        self._numbers: dict[Any, int] = {}
        self._texts: dict[str, str] = {}
        # Keeps objects alive whose addresses pickle remembers.
        self._made: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:  # noqa: PLR0911 - one line a kind
        kind = type(obj)
        if (named := _names().get(id(obj))) is not None and named[2] is obj:
            return _by_name, named[:2]
        if kind is _CORE.Var or kind is _CORE.DropVar:
            return _variable, (kind is _CORE.DropVar, obj.aval)
        if kind is _CORE.ShapedArray:
            return _shaped, (_fields_of(obj),)
        if kind is _CORE.JaxprEqn:
            return self._equation(obj)
        if kind is _CORE.Jaxpr:
            return self._jaxpr(obj)
        if kind is _CORE.Literal:
            return _literal, (obj.val, obj.aval)
        if kind is _CORE.DebugInfo:
            return self._debug_info(obj)
        if kind is _CORE.JaxprEqnContext:
            return _context, (_context_of(obj),)
        if kind is _SOURCE.SourceInfo:
            return _source, (self._frames(obj.traceback), obj.name_stack)
        if kind is _SOURCE.Traceback:
            return _traceback, (self._frames(obj),)
        return self._of_devices(obj, kind)

    def _of_devices(self, obj: Any, kind: type[Any]) -> Any:  # noqa: C901, PLR0911
        if kind is Mesh:
            return _mesh, (self._handed.mesh(obj),)
        if kind is AbstractMesh:
            return _abstract_mesh, (self._handed.mesh(obj), obj.abstract_device is not None)
        if kind is NamedSharding:
            return _named_sharding, (obj.mesh, obj.spec, obj.memory_kind)
        if kind is PartitionSpec:
            settings = {
                name: getattr(obj, name)
                for name in ("unreduced", "reduced", "unreduced_kind")
                if getattr(obj, name, None)
            }
            return _spec, (entries_of(obj), settings)
        if kind is SingleDeviceSharding:
            return _single_device, (obj.memory_kind,)
        if isinstance(obj, Sharding):
            raise CannotCarry(f"it uses a {kind.__name__}, which names devices and no axes")
        if isinstance(obj, jax.Array):
            return _array, (self._handed.array(obj),)
        if isinstance(obj, _LITERALS.TypedNdArray):
            return _typed, (np.asarray(obj), obj.aval)
        if kind in _SCALARS:
            plain: Any = kind.__base__
            return _scalar, (kind.__name__, plain(obj), obj.dtype)
        if kind is np.ndarray and obj.nbytes > 4096:
            return _array, (self._handed.array(obj),)
        if isinstance(obj, jax.Device):
            raise CannotCarry("it names a single device")
        if isinstance(obj, _CORE.Primitive):
            raise CannotCarry(f"its operation `{obj.name}` is none that a library defines")
        if isinstance(obj, (np.dtype, type)):
            return reduced(obj) or NotImplemented
        if hasattr(obj, "_impl") and jax.dtypes.issubdtype(obj, jax.dtypes.prng_key):
            return _key_type, (str(obj._impl.name),)
        return self._of_functions(obj, kind)

    def _of_functions(self, obj: Any, kind: type[Any]) -> Any:
        if kind in (types.FunctionType, types.MethodType, types.BuiltinFunctionType):
            return NotImplemented if _is_importable(obj) else _gone(obj)
        if kind is _LINEAR.WrappedFun:
            return _gone_wrapped, (_name_of(obj), obj.debug_info)
        if kind.__module__.startswith("jax") and "thunk" in kind.__name__.lower():
            return _gone(obj)
        return reduced(obj) or NotImplemented

    def _equation(self, equation: Any) -> Any:
        name = equation.primitive.name
        if "callback" in name:
            raise CannotCarry(f"its step calls Python by `{name}` at {line_of(equation)}")
        if name == "custom_partitioning" and any(
            isinstance(one, types.FunctionType) and not _is_importable(one)
            for one in equation.params.values()
        ):
            # The compiler calls it. The step's own function, which is stored, too, refers to it.
            return _refuse, (
                f"a function of the script partitions its step at {line_of(equation)}",
            )
        sizes = None
        if name == "shard_map":
            sizes = _manual_sizes(equation.params)
        return _equation, (
            list(equation.invars),
            list(equation.outvars),
            equation.primitive,
            dict(equation.params),
            set(equation.effects),
            equation.source_info,
            equation.ctx,
            sizes,
        )

    def _jaxpr(self, jaxpr: Any) -> Any:
        consts = list(jaxpr.consts) if _JAXPR_HAS_CONSTS and jaxpr.consts else None
        return _jaxpr, (
            list(jaxpr.constvars),
            list(jaxpr.invars),
            list(jaxpr.outvars),
            list(jaxpr.eqns),
            set(jaxpr.effects),
            jaxpr.debug_info,
            bool(getattr(jaxpr, "is_high", False)),
            consts,
        )

    def _debug_info(self, info: Any) -> Any:
        names, paths = info.arg_names, info.result_paths
        return _debug, (
            str(info.traced_for),
            str(info.func_src_info),
            tuple(map(str, names)) if isinstance(names, (tuple, list)) else None,
            tuple(map(str, paths)) if isinstance(paths, (tuple, list)) else None,
        )

    def _frames(self, traceback: Any) -> Any:
        if traceback is None:
            return None
        found: list[tuple[str, str, int]] = []
        for frame in _SOURCE.user_frames(traceback):
            place = (self._text(frame.file_name), self._text(frame.function_name), frame.start_line)
            found.append(place)
            if len(found) == _MOST_FRAMES:
                break
        frames = tuple(found)
        kept = self._numbers.setdefault(frames, len(self._made))
        if kept == len(self._made):
            self._made.append(frames)
        return self._made[kept]

    def _text(self, text: str) -> str:
        return self._texts.setdefault(text, text)


def _refuse(why: str) -> Any:
    raise CannotCarry(why)


_JAXPR_HAS_CONSTS = "consts" in inspect.signature(_CORE.Jaxpr.__init__).parameters


def _manual_sizes(params: dict[str, Any]) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Returns the sizes of the manual axes of a `shard_map`, on which the shapes inside its body
    depend."""
    mesh = params["mesh"]
    manual = params.get("newly_manual_axes") or params.get("manual_axes")
    manual = manual or frozenset(mesh.axis_names)
    sizes = tuple(
        (str(text_of(name)), int(mesh.shape[name])) for name in mesh.axis_names if name in manual
    )
    return "shard_map", sizes


def _fields_of(aval: Any) -> dict[str, Any]:
    return {name: getattr(aval, name) for name in type(aval).__slots__ if name[0] != "_"}


_CONTEXT_FIELDS = tuple(
    name
    for name in getattr(_CORE.JaxprEqnContext, "__slots__", ())
    if name[0] != "_" and name != "configs"
)


def _context_of(context: Any) -> dict[str, Any]:
    found = {name: getattr(context, name) for name in _CONTEXT_FIELDS}
    if found.get("xla_metadata") is not None:
        found["xla_metadata"] = dict(found["xla_metadata"])
    return found


def _name_of(function: Any) -> str:
    inner = getattr(function, "f", function)
    return str(getattr(inner, "__qualname__", getattr(inner, "__name__", type(inner).__name__)))


def _gone(function: Any) -> Any:
    return Gone, (_name_of(function),)


def _is_importable(function: Any) -> bool:
    """Whether another process can import the same function from a library by its name."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not module or "<" in name or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if isinstance(file, str) and is_users_file(file):
        return False
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


@functools.cache
def _names() -> dict[int, tuple[str, str, Any]]:
    """Returns named objects of libraries, as (module, name, object), by address.

    Classes and functions are not among them: pickle writes those by name itself.
    """
    plain = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, str, bytes)
    plain += (int, float, bool, tuple, list, dict, set, frozenset, type(None), np.ndarray, np.dtype)
    found: dict[int, tuple[str, str, Any]] = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name == "__main__" or is_users_file(file):
            continue
        if not name.startswith(("jax", "flax", "equinox", "haiku", "optax", "haliax")) and not any(
            isinstance(value, _CORE.Primitive) for value in list(vars(module).values())
        ):
            continue
        for key, value in list(vars(module).items()):
            if not isinstance(value, plain) and not isinstance(value, (jax.Array, Sharding)):
                found.setdefault(id(value), (name, key, value))
    return found


class Gone:
    """A stand-in for a function of the user that only differentiation would call."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise CannotCarry(f"`{self.__name__}` would be called, and is in the script alone")

    def __reduce__(self) -> Any:
        return Gone, (self.__name__,)


# Reading


@dataclass(slots=True, kw_only=True)
class _Reading:
    binding: Binding
    arrays: Sequence[Any]
    tracebacks: dict[Any, Any] = field(default_factory=dict[Any, Any])


_READING: ContextVar[_Reading] = ContextVar("reading")


@contextmanager
def _reading(reading: _Reading) -> Any:
    token = _READING.set(reading)
    try:
        yield
    finally:
        _READING.reset(token)


def _by_name(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _variable(is_dropped: bool, aval: Any) -> Any:
    return (_CORE.DropVar if is_dropped else _CORE.Var)(aval)


def _shaped(fields: dict[str, Any]) -> Any:
    binding = _READING.get().binding
    manual = fields.get("manual_axis_type")
    if binding.splits and manual is not None:
        sets = {name: getattr(manual, name) for name in type(manual).__slots__ if name[0] != "_"}
        renamed = {name: binding.axes(value) for name, value in sets.items()}
        fields["manual_axis_type"] = type(manual)(**renamed)
    shape, dtype = fields.pop("shape"), fields.pop("dtype")
    return _CORE.ShapedArray(shape, dtype, **fields)


def _literal(value: Any, aval: Any) -> Any:
    return _CORE.Literal(value, aval)


def _typed(value: Any, aval: Any) -> Any:
    return _LITERALS.TypedNdArray(value, aval)


def _scalar(kind: str, value: Any, dtype: Any) -> Any:
    return getattr(_LITERALS, kind)(value, dtype)


def _equation(
    invars: Any,
    outvars: Any,
    primitive: Any,
    params: dict[str, Any],
    effects: Any,
    source_info: Any,
    context: Any,
    sizes: Any,
) -> Any:
    binding = _READING.get().binding
    if binding.splits:
        params = {
            name: binding.axes(value) if name in _AXIS_PARAMETERS else value
            for name, value in params.items()
        }
    made = _CORE.JaxprEqn(invars, outvars, primitive, params, effects, source_info, context)
    if primitive.name == "axis_index" and not isinstance(params["axis_name"], str):
        return _index_over_several(made, binding)
    if sizes is not None:
        binding.check_manual(*sizes, place=line_of(made))
    return made


def _index_over_several(equation: Any, binding: Binding) -> list[Any]:
    """Returns the equations that compute the position of a device along several axes together, for
    which jax has no operation."""
    names = tuple(equation.params["axis_name"])
    sizes = [(name, int(binding.plan.shape[name])) for name in names]
    config: Any = importlib.import_module("jax._src.config")
    meshes: Any = importlib.import_module("jax._src.mesh")
    aval = equation.outvars[0].aval
    with (
        _CORE.extend_axis_env_nd(sizes),
        meshes.use_abstract_mesh(aval.sharding.mesh),
        config._check_vma(bool(aval.manual_axis_type.varying)),
    ):
        traced: Any = jax.make_jaxpr(lambda: jax.lax.axis_index(names))().jaxpr
    (result,) = traced.outvars
    found: list[Any] = []
    for one in traced.eqns:
        outvars = [equation.outvars[0] if out is result else out for out in one.outvars]
        found.append(
            one.replace(outvars=outvars, source_info=equation.source_info, ctx=equation.ctx)
        )
    return found


def _jaxpr(
    constvars: Any,
    invars: Any,
    outvars: Any,
    equations: Any,
    effects: Any,
    debug_info: Any,
    is_high: bool,
    consts: Any,
) -> Any:
    more = {"consts": consts} if consts is not None else {}
    equations = [one for made in equations for one in (made if isinstance(made, list) else (made,))]
    return _CORE.Jaxpr(constvars, invars, outvars, equations, effects, debug_info, is_high, **more)


def _debug(traced_for: str, source: str, names: Any, paths: Any) -> Any:
    return _CORE.DebugInfo(traced_for, source, names, paths)


def _context(fields: dict[str, Any]) -> Any:
    kind = _CORE.JaxprEqnContext
    if hasattr(kind, "_create"):
        if fields.get("xla_metadata") is not None:
            fields["xla_metadata"] = tuple(sorted(fields["xla_metadata"].items()))
        return kind._create(*fields.values())
    made = kind()
    named = {
        "compute_on_context_manager": "compute_type",
        "threefry_partitionable": "threefry_partitionable",
        "abstract_mesh_context_manager": "cur_abstract_mesh",
        "remove_size_one_mesh_axis_from_type": "remove_size_one_mesh_axis",
    }
    config: Any = importlib.import_module("jax._src.config")
    states = {id(getattr(config, state)): key for state, key in named.items()}
    for name, value in fields.items():
        setattr(made, name, value)
    made.configs = [
        (state, fields[states[id(state)]] if id(state) in states else value)
        for state, value in made.configs
    ]
    return made


def _source(frames: Any, stack: Any) -> Any:
    return _SOURCE.SourceInfo(_traceback(frames), stack)


def _traceback(frames: Any) -> Any:
    """Makes a traceback with these frames, the innermost first. jax makes tracebacks only of
    running code, so code with these names and lines is run."""
    if (
        not frames
    ):  # Where jax traces a function of its own, no line of the user is in its traceback.
        return None
    made = _READING.get().tracebacks
    if frames not in made:
        run: Callable[[], Any] = _SOURCE.Traceback.get_traceback
        for file, function, line in frames:
            run = _calling(run, file, function, line)
        made[frames] = run()
    return made[frames]


def _calling(then: Callable[[], Any], file: str, function: str, line: int) -> Callable[[], Any]:
    def call() -> Any:
        return then()

    first = call.__code__.co_firstlineno
    # The call is in the line after the first one.
    code = call.__code__.replace(
        co_filename=file,
        co_name=function,
        co_qualname=function,
        co_firstlineno=max(line - (call.__code__.co_firstlineno + 1 - first), 1),
    )
    return types.FunctionType(code, {}, function, None, call.__closure__)


def _mesh(number: int) -> Mesh:
    return _READING.get().binding.mesh(number)


def _abstract_mesh(number: int, knows_devices: bool) -> AbstractMesh:
    return _READING.get().binding.abstract_mesh(number, knows_devices=knows_devices)


def _named_sharding(mesh: Any, spec: Any, memory_kind: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _spec(parts: tuple[Any, ...], settings: dict[str, Any]) -> PartitionSpec:
    binding = _READING.get().binding
    if binding.splits:
        parts = tuple(map(binding.axes, parts))
        settings = {name: binding.axes(value) for name, value in settings.items()}
    return PartitionSpec(*parts, **settings)


def _single_device(memory_kind: str | None) -> SingleDeviceSharding:
    device = _READING.get().binding.first_device
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def _array(number: int) -> Any:
    return _READING.get().arrays[number]


def _key_type(name: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=name)).dtype


def _gone_wrapped(name: str, debug_info: Any) -> Any:
    return _LINEAR.wrap_init(Gone(name), debug_info=debug_info)
