"""Runs a script without its arrays: what it computes has a shape, a type and a sharding, but no
data (jax).

This serves devices that are not here, and arrays that no single device can hold. While a script
runs, a trace of ours replaces the trace with which jax computes outside of all transformations. It
gets each operation that the script asks for, and a call of a jitted function as one operation. It
describes the result by jax's own rules (`Primitive.abstract_eval`), and returns an `AbstractArray`,
which every check takes for a `jax.Array`.

* The script says where an array is put: by `device_put`, by `out_shardings`, or by the type of an
  array with Explicit axes. Where it leaves that to the compiler (a jitted function over a mesh
  without `out_shardings`, an eager operation on sharded arrays), this one operation is compiled,
  but not run, so that the array is put where the compiler would put it.
* Small results of small operations on real arrays are computed, such as random keys, counters and a
  table of positions. Python may look at them. Results of larger ones, such as the order in which a
  data set is shuffled, are computed if it does.
* Where Python needs a value that does not exist (`int(x)`, `if count > 0`, `np.asarray(x)`),
  `ValueNeeded` ends the script and names the line. A single floating number may be read, printed,
  fetched by `jax.device_get` or numpy, and compared: it is `nan`. Nearly all scripts read losses in
  this way between two steps, only to show them, or to stop a training that diverges: asked whether
  it is finite, it is (`unread`). A notice names the lines, as a script may also decide by such a
  number; `nan` is neither less nor more than any number.
* A counter of steps keeps its value, see `known_numbers`.

Private in jax: traces, tracers and primitives (`jax._src.core`), and that `jax.set_mesh` and
`jax.sharding.get_mesh` refuse to work under a trace. Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from automesh.errors import UsageError
from automesh.package import is_users_file
from automesh.program.absent.device_queries import attached
from automesh.program.capture.frames import asking_line
from automesh.program.capture.known_numbers import (
    KnownNumber,
    is_countable,
    numbers_of,
    numbers_of_whole,
)
from automesh.program.capture.nouns import SourceLine
from automesh.program.capture.unread import UNREAD, counted_as_finite, is_unread_number
from automesh.program.capture.world.meshes import same_on
from automesh.program.kernels.stand_ins import is_for_accelerators, standing_in
from automesh.program.lower.compiled import output_shardings
from automesh.program.lower.compiler_options import compile_quickly

_CORE: Any = importlib.import_module("jax._src.core")
# The most bytes of intermediate results of an operation that is computed.
_SMALL_BYTES = 2**18
# And of one that is computed only if Python asks for its result, such as an order of a data set.
_LATER_BYTES = 2**26
# Operations that compute each element of their result from the same element of their arguments.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and", "atan2", "ceil", "clamp", "convert_element_type", "copy", "copy_p",
    "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
# Operations whose parameters state the mesh on which they run.
_ON_A_MESH = frozenset({"sharding_constraint", "shard_map", "reshard", "mesh_cast", "device_put"})


class ValueNeeded(UsageError):
    """The error that Python needs the value of an array without data."""


@dataclass(slots=True)
class _ArraysState:
    """The data of this process about the run without arrays.

    Attributes:
      trace: the trace in force while a script runs without its arrays.
      alive_bytes, most_bytes: bytes of the arrays that the script holds now, and the most that it
        held.
      printed: lines that were given `nan` for a number.
      decided: the first line that compared a number that was `nan`.
      needed: the last value that Python asked for in vain.
      compiled: the shardings of the results of each operation that was compiled to find them.
    """

    trace: Any = None
    is_installed: bool = False
    alive_bytes: int = 0
    most_bytes: int = 0
    printed: dict[SourceLine, None] = field(default_factory=dict[SourceLine, None])
    decided: SourceLine | None = None
    needed: ValueNeeded | None = None
    compiled: dict[Any, tuple[Sharding | None, ...]] = field(
        default_factory=dict[Any, "tuple[Sharding | None, ...]"]
    )


_STATE = _ArraysState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The record of the last run without arrays.

    Attributes:
      most_bytes: the most bytes of arrays that the script held at the same time.
      printed: lines that were given `nan` for a number.
      decided: the first line that compared such a number; None if there was none.
      needed: the error for the last value that Python asked for in vain, even if the script caught
        it; None if there was none.
    """

    most_bytes: int
    printed: tuple[SourceLine, ...]
    decided: SourceLine | None
    needed: ValueNeeded | None


def seen() -> Seen:
    """Returns what the last run without arrays did."""
    return Seen(
        most_bytes=_STATE.most_bytes,
        printed=tuple(_STATE.printed),
        decided=_STATE.decided,
        needed=_STATE.needed,
    )


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf is an array without data."""
    return isinstance(leaf, AbstractArray)


def described(tree: Any) -> Any:
    """Returns a tree with each array without data as a `jax.ShapeDtypeStruct`; other leaves stay as
    they are."""
    if _STATE.trace is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.described() if is_abstract(leaf) else leaf, tree)


def without_data(leaf: Any) -> Any:
    """Returns an argument of a step: an array as a `jax.ShapeDtypeStruct`, anything else as it
    is."""
    if is_abstract(leaf):
        return leaf.described()
    if isinstance(leaf, jax.Array):
        to = leaf.sharding if getattr(leaf, "committed", True) else None
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to, weak_type=weak)
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def bytes_alive() -> int:
    """Returns the bytes of the arrays that a script holds, with and without data."""
    real = sum(int(array.nbytes) for array in jax.live_arrays())
    return real + _STATE.alive_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractShard:
    """The part of an array without data that one device holds; replaces `jax.Shard`."""

    device: Any
    index: Any
    replica_id: int
    data: AbstractArray


class AbstractArray(_CORE.Tracer):
    """An array without data, as the script sees it."""

    __slots__ = ("nbytes", "number", "placed", "state")

    number: KnownNumber | None
    placed: Sharding | None
    nbytes: int

    def __init__(self, trace: Any, aval: Any, sharding: Sharding | None) -> None:
        # The attributes of a tracer have other names in other versions of jax.
        super().__init__(trace, aval) if _TAKES_AVAL else super().__init__(trace)
        if not _TAKES_AVAL:
            self.aval = aval
        self.placed = sharding
        self.number = None
        self.nbytes = _aval_bytes(aval)
        # Python empties modules before it deletes the last arrays, so each array keeps the state
        # itself.
        self.state = _STATE
        _STATE.alive_bytes += self.nbytes
        _STATE.most_bytes = max(_STATE.most_bytes, _STATE.alive_bytes)

    def __del__(self) -> None:
        self.state.alive_bytes -= self.nbytes

    def described(self) -> jax.ShapeDtypeStruct:
        """Returns its shape, its type and its sharding."""
        aval: Any = self.aval
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=self.placed, weak_type=bool(aval.weak_type)
        )

    @property
    def sharding(self) -> Sharding:
        return self.placed or SingleDeviceSharding(attached()[0])

    @property
    def committed(self) -> bool:
        return self.placed is not None

    _committed = committed

    @property
    def device(self) -> Any:
        return next(iter(self.sharding.device_set))

    @property
    def is_fully_addressable(self) -> bool:
        return True

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharding.is_fully_replicated

    def devices(self) -> set[Any]:
        return self.sharding.device_set

    def block_until_ready(self) -> AbstractArray:
        return self

    def copy_to_host_async(self) -> None:
        """Does nothing: there is no data to copy."""

    def delete(self) -> None:
        """Does nothing: there is no data to delete."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        """Returns True, as jax does for an array that is computed."""
        return True

    @property
    def format(self) -> Any:
        """As jax's, with a layout that is left to the compiler."""
        return Format(None, self.sharding)

    def on_device_size_in_bytes(self) -> int:
        """Returns the bytes on all its devices together, as jax does."""
        return sum(shard.data.nbytes for shard in self.addressable_shards)

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'jax.Array'")

    def __float__(self) -> float:
        aval: Any = self.aval
        if aval.shape:
            raise _needed(self)
        value = self._value_if_known()
        if value is not None:
            return float(value)
        _STATE.printed.setdefault(asking_line())
        return UNREAD

    def _value_if_known(self) -> Any:
        """Returns the number that this array holds; None if that is not known without data."""
        if self.number is None:
            return None
        with _CORE.set_current_trace(_CORE.eval_trace):
            value = self.number.value()
        if value is not None and self.number.reads_nan:
            place = asking_line()
            _STATE.printed.setdefault(place)
            _STATE.decided = _STATE.decided or place
        return value

    def _told(self) -> Any:
        """Returns the number that this array holds.

        Raises:
          ValueNeeded: it is not known without data.
        """
        value = self._value_if_known()
        if value is None:
            raise _needed(self)
        return value

    def __bool__(self) -> bool:
        return bool(self._told())

    def __int__(self) -> int:
        return int(self._told())

    def __index__(self) -> int:
        return int(self._told())

    def __format__(self, spec: str) -> str:
        aval: Any = self.aval
        value = self._value_if_known()
        if value is not None:
            return format(value[()], spec)
        if spec and aval.shape:
            raise TypeError("unsupported format string passed to Array.__format__")
        _STATE.printed.setdefault(asking_line())
        return format(math.nan, spec.rstrip("d")) if spec else str(self)

    def __repr__(self) -> str:
        aval: Any = self.aval
        return f"Array({'nan' if not aval.shape else '...'}, {aval.str_short()})"

    def __str__(self) -> str:
        aval: Any = self.aval
        value = self._value_if_known()
        if value is not None:
            return str(value)
        return repr(self) if aval.shape else "nan"

    def item(self, *_: Any) -> Any:
        aval: Any = self.aval
        if jax.numpy.issubdtype(aval.dtype, np.floating) and not aval.shape:
            return float(self)
        return self._told().item()

    def tolist(self) -> Any:
        """Returns nested lists, as jax does."""
        aval: Any = self.aval
        return self._told().tolist() if aval.shape else self.item()

    def addressable_data(self, index: int) -> AbstractArray:
        """Returns the array of one device, as jax does."""
        return self.addressable_shards[index].data

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        aval: Any = self.aval
        is_shown = not aval.shape and jax.numpy.issubdtype(aval.dtype, np.floating)
        # `jax.device_get` of losses, and means of them, are to be shown, too.
        value = np.asarray(float(self), aval.dtype) if is_shown else self._told()
        return np.array(value, dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[Any]:
        aval: Any = self.aval
        if not aval.shape:
            raise TypeError("iteration over a 0-d array")
        # One by one: an operation that gives all rows of a large array takes minutes to compile.
        return (self[row] for row in range(aval.shape[0]))

    def _asked(self, *_: Any, **__: Any) -> Any:
        raise _needed(self)

    __complex__ = __dlpack__ = _asked
    __hex__ = __oct__ = __reduce__ = _asked
    tobytes = unsafe_buffer_pointer = _asked

    @property
    def addressable_shards(self) -> list[AbstractShard]:
        aval: Any = self.aval
        to, shape = self.sharding, tuple(aval.shape)
        part = jax.ShapeDtypeStruct(to.shard_shape(shape), aval.dtype)
        seen: dict[str, int] = {}
        shards: list[AbstractShard] = []
        for device, index in to.devices_indices_map(shape).items():
            seen[str(index)] = seen.get(str(index), -1) + 1
            shards.append(
                AbstractShard(
                    device=device,
                    index=index,
                    replica_id=seen[str(index)],
                    data=_part_of(part, device),
                )
            )
        return shards

    @property
    def global_shards(self) -> list[AbstractShard]:
        return self.addressable_shards


def _typed(aval: Any, sharding: Sharding | None) -> Any:
    """Returns the type that jax gives to an array with a sharding: with its mesh. A jitted function
    is then traced once, for the description of its arguments and for its run."""
    update: Any = getattr(_CORE, "update_aval_with_sharding", None)
    mesh: Any = getattr(getattr(aval, "sharding", None), "mesh", None)
    return aval if update is None or mesh is None or not mesh.empty else update(aval, sharding)


def _part_of(part: jax.ShapeDtypeStruct, device: Any) -> AbstractArray:
    return AbstractArray(_STATE.trace, _CORE.typeof(part), SingleDeviceSharding(device))


_TAKES_AVAL = "aval" in inspect.signature(_CORE.Tracer.__init__).parameters


def needed_at_line(what: str, place: SourceLine | None = None) -> ValueNeeded:
    """Returns the error that a line of the script, by default the one that runs now, needs arrays
    that have no data."""
    _STATE.needed = ValueNeeded(
        f"{place or asking_line()} {what}, which is not there: the script is run without the data "
        "of its arrays",
        hint="do without it before the third call of the step, or write a function `build(mesh)`",
    )
    return _STATE.needed


def _needed(array: AbstractArray) -> ValueNeeded:
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    place, name, code = "?", "", ""
    if frame is not None:
        place = str(SourceLine(file=frame.f_code.co_filename, line=frame.f_lineno))
        names = [name for name, value in frame.f_locals.items() if value is array]
        name, code = names[0] if names else "", _code_at(frame)
    aval: Any = array.aval
    what = f"`{name}`" if name else f"an array {aval.str_short()}"
    what += f" for `{code}`" if code else ""
    _STATE.needed = ValueNeeded(
        f"{place} needs the value of {what}, which is not there: the script is run without the "
        "data of its arrays",
        hint="do without it before the third call of the step, or write a function `build(mesh)`; "
        "a single floating number can be printed, read and compared, as nan",
    )
    return _STATE.needed


def _code_at(frame: FrameType) -> str:
    """Returns the source text of what a frame is about to do; empty if that is long."""
    positions = list(frame.f_code.co_positions())[: frame.f_lasti // 2 + 1]
    # In Python 3.11 a jump has the place of its whole `if` statement; its condition stands before.
    on_one_line = (one for one in reversed(positions[-2:]) if one[0] == one[1])
    line, _, first, end = next(on_one_line, (None,) * 4)
    if line is None:
        return ""
    # Python counts columns in bytes.
    text = linecache.getline(frame.f_code.co_filename, line).encode()[first:end].decode()
    return text if len(text) <= 60 else ""


class _AbstractTrace(_CORE.Trace):
    """The trace that replaces jax's eager evaluation."""

    def stage_value(self, val: Any) -> Any:
        if isinstance(val, jax.Array):
            return val
        if np.asarray(val).nbytes <= _SMALL_BYTES and _concrete_mesh_in_force().empty:
            with _CORE.set_current_trace(_CORE.eval_trace):
                return _CORE.eval_trace.stage_value(val)
        return AbstractArray(self, _CORE.typeof(val), None)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        args = list(tracers)
        if _can_be_real(primitive, args, params):
            with _CORE.set_current_trace(_CORE.eval_trace):
                return primitive.bind(*args, **params)
        avals = [_CORE.typeof(arg) for arg in args]
        with _CORE.set_current_trace(_CORE.eval_trace):
            out, _ = primitive.abstract_eval(*avals, **params)
        outs = list(out) if primitive.multiple_results else [out]
        placed = _placements(primitive, args, params, outs)
        made = [
            AbstractArray(self, _typed(aval, sharding), sharding)
            for aval, sharding in zip(outs, placed, strict=True)
        ]
        is_known = all(map(_is_known, args)) and _is_light(primitive, args, params, _LATER_BYTES)
        if is_known or any(map(is_countable, outs)):
            find = numbers_of_whole if is_known else numbers_of
            with _CORE.set_current_trace(_CORE.eval_trace):
                numbers = find(primitive, args, params, outs, _number_of)
            for array, number in zip(made, numbers, strict=True):
                array.number = number
        return made if primitive.multiple_results else made[0]

    # jax passes these parameters by name.
    def process_call(self, call_primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        del call_primitive, params
        with _CORE.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_custom_jvp_call(self, *given: Any, **_: Any) -> Any:
        _, fun, _, tracers = given
        with _CORE.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, *given: Any, **_: Any) -> Any:
        _, fun, _, _, tracers = given
        with _CORE.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        """Evaluates a `shard_map` outside of jit as if it were inside of one."""
        made: list[Any] = []

        def inside(*args: Any) -> list[Any]:
            trace: Any = _CORE.trace_ctx.trace
            made.append(trace.process_shard_map(primitive, fun, args, **params))
            return list(made[-1])

        with _CORE.set_current_trace(self):
            outs = _jit(inside)(*tracers)  # The watcher sees calls of the script's own jit.
        # Newer versions of jax want the results in the tree in which they returned them.
        return made[-1].update(outs) if hasattr(made[-1], "update") else outs

    def cur_qdd(self, x: Any) -> Any:
        return x.cur_qdd()


def _number_of(value: Any) -> KnownNumber | None:
    return value.number if is_abstract(value) else None


def _can_be_real(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether an operation is small, on real arrays, and away from all meshes."""
    if primitive.name in _ON_A_MESH or any(
        is_abstract(arg) or is_unread_number(arg) for arg in args
    ):
        return primitive.name == "device_put" and _is_small_put(args, params)
    return _is_light(primitive, args, params, _SMALL_BYTES)


def _is_known(arg: Any) -> bool:
    """Whether the value of an argument is known, or can be computed when somebody asks for it."""
    if is_abstract(arg):
        return arg.number is not None and not arg.number.reads_nan
    # The script may write into an array of numpy before the value is computed.
    return not isinstance(arg, np.ndarray) and not is_unread_number(arg)


def _is_light(
    primitive: Any, args: Sequence[Any], params: dict[str, Any], limit_bytes: int
) -> bool:
    """Whether an operation is away from all meshes, and its arguments and its intermediate results
    have few bytes."""
    if primitive.name in _ON_A_MESH:
        return False
    if any(_nbytes(arg) > limit_bytes or _is_on_mesh(arg) for arg in args):
        return False
    if not _concrete_mesh_in_force().empty:
        return False
    jaxpr = params.get("jaxpr")
    if primitive.name in ("pjit", "jit"):
        stated = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if any(isinstance(one, Sharding) for one in stated):
            return False
    if jaxpr is None:
        with _CORE.set_current_trace(_CORE.eval_trace):
            out, _ = primitive.abstract_eval(*map(_CORE.typeof, args), **params)
        outs = list(out) if primitive.multiple_results else [out]
        return sum(map(_aval_bytes, outs)) <= limit_bytes
    return _work(jaxpr) <= limit_bytes


def _is_small_put(args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether an operation puts small arrays where they are already."""
    return all(one is None for one in params.get("devices", (0,))) and all(
        not is_abstract(arg) and _nbytes(arg) <= _SMALL_BYTES for arg in args
    )


def _nbytes(value: Any) -> int:
    return int(getattr(value, "nbytes", 0) or 0)


def _aval_bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return math.prod(aval.shape) * int(dtype.itemsize) if dtype is not None else 0


def _is_on_mesh(value: Any) -> bool:
    return isinstance(getattr(value, "sharding", None), NamedSharding)


def _work(jaxpr: Any) -> float:
    """Returns the bytes of all intermediate results of a program; infinity if it runs on a mesh or
    on an accelerator."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for equation in inner.eqns:
        if equation.primitive.name in _ON_A_MESH or is_for_accelerators(equation):
            return math.inf
        total += sum(_aval_bytes(variable.aval) for variable in equation.outvars)
        times = equation.params.get("length", 1)
        for part in core.jaxprs_in_params(equation.params):
            total += times * _work(part)
    return total


def _concrete_mesh_in_force() -> Any:
    return importlib.import_module("jax._src.mesh").get_concrete_mesh()


def _placements(
    primitive: Any, args: Sequence[Any], params: dict[str, Any], outs: Sequence[Any]
) -> tuple[Sharding | None, ...]:
    """Returns the sharding of each result of an operation; None for the default device."""
    name = primitive.name
    if name == "device_put":
        put = [_sharding_of(one) for one in params["devices"]]
        return tuple(to or _known(arg) for to, arg in zip(put, args, strict=True))
    typed = [_from_type(aval, args) for aval in outs]
    if name in ("pjit", "jit"):
        stated = [one if isinstance(one, Sharding) else None for one in params["out_shardings"]]
        typed = [said or by_type for said, by_type in zip(stated, typed, strict=True)]
    if name in ("sharding_constraint", "reshard"):
        to: Any = params.get("sharding") or params.get("dst_sharding")
        # Under `vmap` a new dimension is left to the compiler.
        if PartitionSpec.UNCONSTRAINED not in getattr(to, "spec", ()):
            typed = [by_type or _on_concrete(to, args) for by_type in typed]
    if all(typed) or not _concerns_mesh(args, params):
        return tuple(typed)
    if name in _ELEMENTWISE:
        same = {_known(arg) for arg in args if np.shape(arg) == outs[0].shape} - {None}
        if len(same) == 1:
            return (same.pop(),)
    compiled = _compiled_shardings(primitive, args, params)
    return tuple(said or by for said, by in zip(typed, compiled, strict=True))


def _sharding_of(to: Any) -> Sharding | None:
    if isinstance(to, Sharding):
        return to
    if isinstance(getattr(to, "sharding", None), Sharding):
        return to.sharding  # A format.
    return SingleDeviceSharding(to) if isinstance(to, jax.Device) else None


def _known(value: Any) -> Sharding | None:
    """Returns the sharding of an argument that was put somewhere; None if nobody has put it
    anywhere."""
    if is_abstract(value):
        return value.placed
    if isinstance(value, jax.Array) and getattr(value, "committed", False):
        return value.sharding
    return None


def _from_type(aval: Any, args: Sequence[Any]) -> Sharding | None:
    """Returns the sharding that the type of an array states, on a mesh with Explicit axes."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh: Any = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.are_all_axes_explicit:
        return None
    return _on_concrete(sharding, args)


def _on_concrete(sharding: Any, args: Sequence[Any]) -> Sharding | None:
    """Returns a sharding over the concrete mesh that the abstract mesh of a sharding stands for."""
    if not isinstance(sharding, NamedSharding):
        return sharding if isinstance(sharding, Sharding) else None
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    candidates = [_concrete_mesh_in_force()]
    candidates += [one.mesh for arg in args if isinstance(one := _known(arg), NamedSharding)]
    for mesh in candidates:
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            return NamedSharding(mesh, sharding.spec)
    return None


def _concerns_mesh(args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether some argument, or the program itself, is split over several devices."""
    for arg in args:
        sharding = _known(arg)
        if sharding is not None and len(sharding.device_set) > 1:
            return True
    if any(math.isinf(_work(part)) for part in core.jaxprs_in_params(params)):
        return True
    return any(isinstance(one, NamedSharding) for one in params.get("in_shardings", ()))


def _compiled_shardings(
    primitive: Any, args: Sequence[Any], params: dict[str, Any]
) -> tuple[Sharding | None, ...]:
    """Returns the shardings that the compiler chooses for the results of an operation, where nobody
    has stated them."""
    inputs = [described(arg) if is_abstract(arg) else arg for arg in args]
    key = _key(primitive, inputs, params)
    if key is not None and key in _STATE.compiled:
        return _STATE.compiled[key]

    def operation(*values: Any) -> list[Any]:
        found = primitive.bind(*values, **params)
        return list(found) if primitive.multiple_results else [found]

    programs = core.jaxprs_in_params(params)
    with _CORE.set_current_trace(_CORE.eval_trace), standing_in(programs):
        lowered = _jit(operation).lower(*inputs)
        compiled = compile_quickly(lowered, attached()[0])
    mesh = _mesh_among(inputs, params)
    shardings = tuple(_named(sharding, mesh) for sharding in output_shardings(compiled))
    if key is not None:
        _STATE.compiled[key] = shardings
    return shardings


def _key(primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    try:
        key = (
            primitive,
            tuple(sorted(params.items())),
            tuple(
                (np.shape(operand), str(operand.dtype), getattr(operand, "sharding", None))
                for operand in inputs
            ),
        )
        hash(key)
    except (TypeError, AttributeError):
        return None
    return key


def _mesh_among(inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    for one in (*(getattr(value, "sharding", None) for value in inputs), *params.values()):
        if isinstance(one, NamedSharding) and isinstance(one.mesh, jax.sharding.Mesh):
            return one.mesh
    return None


def _named(sharding: Any, mesh: Any) -> Sharding | None:
    if isinstance(sharding, SingleDeviceSharding) and mesh is not None and mesh.size > 1:
        return None  # No input has a place, as in an `init` that reads only shapes.
    if not isinstance(sharding, NamedSharding) or mesh is None:
        return sharding if isinstance(sharding, Sharding) else None
    if sharding.mesh.axis_names != mesh.axis_names:
        return same_on(sharding, mesh) or sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


@contextmanager
def without_arrays() -> Generator[None]:
    """Makes operations outside of all transformations return arrays without data while the body
    runs.

    Raises:
      UsageError: this version of jax computes in another way.
    """
    _install()
    trace = _AbstractTrace()
    _STATE.trace = trace
    _STATE.alive_bytes = _STATE.most_bytes = 0
    _STATE.printed.clear()
    _STATE.decided = _STATE.needed = None
    _STATE.compiled.clear()
    try:
        with _CORE.set_current_trace(trace), counted_as_finite():
            yield
    finally:
        _STATE.trace = None


def in_this_thread() -> AbstractContextManager[Any]:
    """Puts the trace of a run without arrays in force in a thread that the script has started; does
    nothing in a run with arrays."""
    return nullcontext() if _STATE.trace is None else _CORE.set_current_trace(_STATE.trace)


def is_without_arrays() -> bool:
    """Whether a script is being run without its arrays."""
    return _STATE.trace is not None


def _jit(function: Any) -> Any:
    """Returns what jax's own `jax.jit` makes of a function, also while a hook replaces it."""
    return importlib.import_module("jax._src.api").jit(function)


def _install() -> None:
    if _STATE.is_installed:
        return
    wanted = ("Trace", "Tracer", "eval_trace", "set_current_trace", "typeof", "trace_ctx")
    missing = [name for name in wanted if not hasattr(_CORE, name)]
    if missing:
        raise UsageError(
            f"jax {jax.__version__} computes in another way (it has no {', '.join(missing)}): a "
            "script cannot be run without its arrays",
            hint="use jax 0.10.1 to 0.12, or write a function `build(mesh)`",
        )
    _STATE.is_installed = True
    _hook_meshes()
    _hook_arrays()
    _hook_likes()


def _outside(function: Any) -> Any:
    """Returns a function that works under our trace, though jax refuses to call it under any
    trace."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _STATE.trace is None or _CORE.trace_ctx.trace is not _STATE.trace:
            return function(*args, **kwargs)
        with _CORE.set_current_trace(_CORE.eval_trace):
            return function(*args, **kwargs)

    return call


def _hook_meshes() -> None:
    owner: Any = jax.set_mesh
    owner.__init__ = _outside(owner.__init__)
    internals: Any = importlib.import_module("jax._src.sharding_impls")
    public: Any = jax.sharding
    public.get_mesh = internals.get_mesh = _outside(internals.get_mesh)


def _hook_arrays() -> None:
    """Replaces the functions that make an array of parts: they return the whole array without
    data."""
    owner: Any = jax
    for name, made in (
        ("make_array_from_callback", _of_callback),
        ("make_array_from_process_local_data", _of_process),
        ("make_array_from_single_device_arrays", _of_parts),
    ):
        original = getattr(jax, name)
        setattr(owner, name, _instead(original, made))


def _instead(original: Any, made: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _STATE.trace is None:
            return original(*args, **kwargs)
        return made(*args, **kwargs)

    return call


def _placed(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """Returns zeros with a sharding. jax makes them, so that the array has the type that jax gives
    it."""
    zeros = jax.numpy.zeros(tuple(shape), dtype)
    return jax.device_put(zeros, sharding)


def _of_callback(shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
    to = getattr(sharding, "sharding", sharding)
    if dtype is None:
        index = next(iter(to.devices_indices_map(tuple(shape)).values()))
        dtype = np.asarray(data_callback(index)).dtype
    return _placed(shape, dtype, to)


def _of_process(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
    def one(to: Any, local: Any, stated: Any = None) -> Any:
        whole = tuple(np.shape(local)) if stated is None else tuple(stated)
        # Every process has its own rows.
        if stated is None and whole and not to.is_fully_replicated:
            whole = (whole[0] * jax.process_count(), *whole[1:])
        whole = tuple(
            size if size is not None else own
            for size, own in zip(whole, np.shape(local), strict=True)
        )
        return _placed(whole, local.dtype, to)

    if isinstance(sharding, Sharding):
        if global_shape is None or all(isinstance(size, int | None) for size in global_shape):
            return jax.tree.map(lambda local: one(sharding, local, global_shape), local_data)
        return jax.tree.map(
            lambda local, shape: one(sharding, local, shape), local_data, global_shape
        )
    return jax.tree.map(one, sharding, local_data)


def _of_parts(shape: Any, sharding: Any, arrays: Any, *, dtype: Any = None) -> Any:
    return _placed(shape, dtype or arrays[0].dtype, sharding)


def _hook_likes() -> None:
    """Makes `zeros_like` and the like put their result where their argument is, as they do unless
    it is a tracer."""
    internals: Any = importlib.import_module("jax._src.lax.lax")
    public: Any = jax.lax
    original = internals.full_like

    @functools.wraps(original)
    def full_like(x: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(x, fill_value, *args, **kwargs)
        if not is_abstract(x):
            return made
        given = {**dict(zip(("dtype", "shape", "sharding"), args, strict=False)), **kwargs}
        to = _known(x)
        if given.get("sharding") is None and given.get("shape") is None and to is not None:
            return jax.device_put(made, to)
        return made

    internals.full_like = public.full_like = full_like
