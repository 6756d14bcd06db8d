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
* Where Python needs a value (`int(x)`, `if count > 0`, `np.asarray(x)`), what leads to it is
  computed (`deferred`); if that cannot be done, or is too much, `ValueNeeded` ends the script and
  names the line. A single floating number may be read, printed,
  fetched by `jax.device_get` or numpy, and compared: it is `nan`. Nearly all scripts read losses in
  this way between two steps, only to show them, or to stop a training that diverges: asked whether
  it is finite, it is (`unread`). A notice names the lines, as a script may also decide by such a
  number; `nan` is neither less nor more than any number.
* A counter of steps keeps its value, see `known_numbers`.

Private in jax: traces, tracers and primitives (`jax._src.core`), and that `jax.set_mesh` and
`jax.sharding.get_mesh` refuse to work under a trace. Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from automesh.errors import UsageError
from automesh.program.capture.abstract.arrays import AbstractArray, is_abstract, typed_on_mesh
from automesh.program.capture.abstract.deferred import (
    copied,
    deferred,
    given,
    is_pure,
    with_own_constants,
)
from automesh.program.capture.abstract.makers import hook_arrays, hook_likes, hook_meshes
from automesh.program.capture.abstract.placements import own_jit, placements
from automesh.program.capture.abstract.record import STATE
from automesh.program.capture.abstract.work import (
    LATER_BYTES,
    ON_A_MESH,
    SMALL_BYTES,
    concrete_mesh_in_force,
    is_light,
    nbytes,
)
from automesh.program.capture.known_numbers import (
    KnownNumber,
    is_countable,
    numbers_of,
    numbers_of_whole,
)
from automesh.program.capture.unread import counted_as_finite, is_unread, is_unread_number

_CORE: Any = importlib.import_module("jax._src.core")


class AbstractTrace(_CORE.Trace):
    """The trace that replaces jax's eager evaluation."""

    def stage_value(self, val: Any) -> Any:
        if isinstance(val, jax.Array):
            return val
        if np.asarray(val).nbytes <= SMALL_BYTES and concrete_mesh_in_force().empty:
            with _CORE.set_current_trace(_CORE.eval_trace):
                return _CORE.eval_trace.stage_value(val)
        made = AbstractArray(self, _CORE.typeof(val), None)
        made.later = given(val, made.aval.dtype)
        return made

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        args = list(tracers)
        if _can_be_real(primitive, args, params):
            with _CORE.set_current_trace(_CORE.eval_trace):
                return primitive.bind(*args, **params)
        avals = [_CORE.typeof(arg) for arg in args]
        with _CORE.set_current_trace(_CORE.eval_trace):
            out, effects = primitive.abstract_eval(*avals, **params)
        outs = list(out) if primitive.multiple_results else [out]
        placed = placements(primitive, args, params, outs)
        made = [
            AbstractArray(self, typed_on_mesh(aval, sharding), sharding)
            for aval, sharding in zip(outs, placed, strict=True)
        ]
        # What Python does besides giving results, such as a callback, is not done later.
        if not effects:
            self._keep(primitive, args, params, outs, made)
        return made if primitive.multiple_results else made[0]

    def _keep(
        self,
        primitive: Any,
        args: Sequence[Any],
        params: dict[str, Any],
        outs: Sequence[Any],
        made: Sequence[AbstractArray],
    ) -> None:
        """Keeps what makes the results of an operation, until Python asks for their values."""
        is_known = all(map(_is_known, args)) and is_light(primitive, args, params, LATER_BYTES)
        own = with_own_constants(params) if is_known and is_pure(primitive, params) else None
        if own is not None or any(map(is_countable, outs)):
            find = numbers_of if own is None else numbers_of_whole
            with _CORE.set_current_trace(_CORE.eval_trace):
                numbers = find(primitive, args, own or params, outs, _number_of)
            for array, number in zip(made, numbers, strict=True):
                array.number = number
        if any(array.number is None or array.number.reads_nan for array in made):
            placed = [array.placed for array in made]
            found = deferred(primitive, list(map(_kept, args)), params, outs, placed)
            for array, later in zip(made, found or (), strict=False):
                array.later = later

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
            outs = own_jit(inside)(*tracers)  # The watcher sees calls of the script's own jit.
        # Newer versions of jax want the results in the tree in which they returned them.
        return made[-1].update(outs) if hasattr(made[-1], "update") else outs

    def cur_qdd(self, x: Any) -> Any:
        return x.cur_qdd()


def _number_of(value: Any) -> KnownNumber | None:
    return value.number if is_abstract(value) else None


def _kept(value: Any) -> Any:
    """Returns what is kept of an argument until its operation is computed; None if its value is
    unknown."""
    if is_abstract(value):
        is_known = value.number is not None and not value.number.reads_nan
        return value.number if is_known else value.later
    if is_unread_number(value) or _has_unread(value):
        return None
    return copied(value) if isinstance(value, np.ndarray) else value


def _has_unread(value: Any) -> bool:
    """Whether a small array was made of a number without data, and is nan for that reason."""
    if not STATE.printed or not isinstance(value, (jax.Array, np.ndarray)):
        return False
    is_small = value.size > 0 and nbytes(value) <= SMALL_BYTES
    is_floating = is_small and jax.numpy.issubdtype(value.dtype, np.floating)
    return is_floating and bool(np.any(is_unread(np.asarray(value))))


def _can_be_real(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether an operation is small, on real arrays, and away from all meshes."""
    if primitive.name in ON_A_MESH or any(
        is_abstract(arg) or is_unread_number(arg) for arg in args
    ):
        return primitive.name == "device_put" and _is_small_put(args, params)
    return is_light(primitive, args, params, SMALL_BYTES)


def _is_small_put(args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether an operation puts small arrays where they are already."""
    return all(one is None for one in params.get("devices", (0,))) and all(
        not is_abstract(arg) and nbytes(arg) <= SMALL_BYTES for arg in args
    )


def _is_known(arg: Any) -> bool:
    """Whether the value of an argument is known, or can be computed when somebody asks for it."""
    if is_abstract(arg):
        return arg.number is not None and not arg.number.reads_nan
    # The script may write into an array of numpy before the value is computed.
    return not (isinstance(arg, np.ndarray) or is_unread_number(arg) or _has_unread(arg))


@contextmanager
def without_arrays() -> Generator[None]:
    """Makes operations outside of all transformations return arrays without data while the body
    runs.

    Raises:
      UsageError: this version of jax computes in another way.
    """
    _install()
    trace = AbstractTrace()
    STATE.trace = trace
    STATE.alive_bytes = STATE.most_bytes = 0
    STATE.printed.clear()
    STATE.decided = STATE.needed = None
    STATE.compiled.clear()
    try:
        with _CORE.set_current_trace(trace), counted_as_finite():
            yield
    finally:
        STATE.trace = None


def in_this_thread() -> AbstractContextManager[Any]:
    """Puts the trace of a run without arrays in force in a thread that the script has started; does
    nothing in a run with arrays."""
    return nullcontext() if STATE.trace is None else _CORE.set_current_trace(STATE.trace)


def is_without_arrays() -> bool:
    """Whether a script is being run without its arrays."""
    return STATE.trace is not None


def _install() -> None:
    if STATE.is_installed:
        return
    wanted = ("Trace", "Tracer", "eval_trace", "set_current_trace", "typeof", "trace_ctx")
    missing = [name for name in wanted if not hasattr(_CORE, name)]
    if missing:
        raise UsageError(
            f"jax {jax.__version__} computes in another way (it has no {', '.join(missing)}): a "
            "script cannot be run without its arrays",
            hint="use jax 0.10.1 to 0.12, or write a function `build(mesh)`",
        )
    STATE.is_installed = True
    hook_meshes()
    hook_arrays()
    hook_likes()
