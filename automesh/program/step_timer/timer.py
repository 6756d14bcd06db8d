"""Times the training step of an unmodified program, from inside of it (jax, without automesh).

The step is the jitted function that is called again and again with arguments of the same shapes,
and has the most bytes of them. The program runs its own loop, and the timer only calls what the
program itself would call. A sample is as many iterations as take a tenth of a second, from the end
of one step to the end of a later one, with one synchronization. So data that the loop waits for and
further jitted functions that it calls belong to its time.

The results are written, as lines of JSON, into a file of this process:
  {"kind": "jax", "version": ...}
  {"kind": "step", "name", "file", "line", "argument_bytes", "devices"}   replaces an earlier one
  {"kind": "losses", "values": [...], "dtypes": [...]}    scalar floats that its first calls return
  {"kind": "sample", "seconds": of one step, "steps": of the sample}
  {"kind": "done"}                                        after which the process ends
  {"kind": "error", "text": ...}                          nothing more is timed
This file runs in the Python of the user's command: it imports only `jax` and the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEEN_TWICE_BEFORE = 3  # the call with which a function is taken for the step
# first calls of a function whose arguments are examined; each examination walks over them
LOOKS = 8
LOSS_CALLS = 3
SAMPLE_S = 0.1  # to start a chain and wait for its end takes 0.1 to 1 ms
MOST_STEPS = 200
LEAST_SAMPLES = 5
PATIENCE_S = 30.0


@dataclass(frozen=True)
class OriginalFunctions:
    """Functions that the timer needs, saved before the program can replace them.

    Attributes:
      clock: `time.perf_counter`.
      encode: `json.dumps`.
      leave: `os._exit`.
    """

    clock: Callable[[], float]
    encode: Callable[[Any], str]
    leave: Callable[[int], Any]


def start(
    jax: Any,
    *,
    kept: OriginalFunctions,
    folder: str,
    skip: int,
    steps: int,
    slow_s: float,
    few: int,
) -> None:
    """Puts a timer between the program and `jax.jit`.

    Args:
      kept: the functions that the timer calls, even if the program has replaced them.
      folder: the folder for the file.
      skip: first calls of the step that are not timed: they compile and warm up.
      steps: timed steps after which the process is ended.
      slow_s: after so many seconds of timed steps `few` samples are enough.
    """
    place = Path(folder) / f"{os.getpid()}.jsonl"
    timer = Timer(jax, kept, place, skip=max(skip, 1), steps=steps, slow_s=slow_s, few=few)
    jit = jax.jit

    @functools.wraps(jit)
    def timed_jit(*args: Any, **kwargs: Any) -> Any:
        made = jit(*args, **kwargs)
        if hasattr(made, "lower"):
            return TimedFunction(timer, made)
        return lambda function: TimedFunction(timer, made(function))  # `jit(static_argnames=...)`

    jax.jit = timed_jit
    _time_compiled(jax, timer)
    timer.write(kind="jax", version=jax.__version__)


def _time_compiled(jax: Any, timer: Timer) -> None:
    """Times programs that were compiled ahead of time as well."""
    kind, known = jax.stages.Compiled, weakref.WeakKeyDictionary[Any, WatchedFunction]()
    call = kind.__call__

    @functools.wraps(call)
    def timed_call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        watched = known.get(self)
        if watched is None:
            watched = known[self] = WatchedFunction(name="a program compiled ahead of time")
        return timer.call(watched, functools.partial(call, self), args, kwargs)

    kind.__call__ = timed_call


@dataclass(eq=False)
class WatchedFunction:
    """A jitted function of the program.

    Attributes:
      calls: number of all its calls.
      shapes: number of calls with arguments of each shape, among the first calls.
      losses: scalar floats that its first calls returned.
    """

    name: str
    file: str = ""
    line: int = 0
    calls: int = 0
    argument_bytes: int = 0
    shapes: Counter[Any] = field(default_factory=Counter)
    losses: list[float] = field(default_factory=list)


class TimedFunction:
    """A wrapper of a function of `jax.jit`, which behaves like it and is timed."""

    def __init__(self, timer: Timer, function: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = getattr(function, "__wrapped__", function)
        code = getattr(self.__wrapped__, "__code__", None)
        self._timer = timer
        self._function = function
        self._watched = WatchedFunction(
            name=str(getattr(function, "__name__", "a jitted function")),
            file=getattr(code, "co_filename", ""),
            line=getattr(code, "co_firstlineno", 0),
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._timer.call(self._watched, self._function, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # The object is incomplete, as in `copy`.
            raise AttributeError(name)
        return getattr(self._function, name)

    # Defined explicitly, since `isinstance(..., jax.stages.Wrapped)` does not call `__getattr__`.
    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function.trace(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function.lower(*args, **kwargs)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return repr(self._function)


class Timer:
    """Finds the step among the jitted functions, and times it."""

    def __init__(
        self,
        jax: Any,
        kept: OriginalFunctions,
        place: Path,
        *,
        skip: int,
        steps: int,
        slow_s: float,
        few: int,
    ) -> None:
        self._jax = jax
        self._kept = kept
        self._place = place
        self._skip = skip
        self._steps = steps
        self._slow_s = slow_s
        self._few = few
        self._step: WatchedFunction | None = None
        self._largest_bytes = 0  # the most bytes of arguments and results of any call
        self._begun_s = 0.0  # when the sample began; 0 before the first
        self._found_s = 0.0
        self._size = 1  # number of steps of a sample
        self._count = 0  # number of steps in the present sample
        self._samples: list[tuple[float, int]] = []
        self._is_over = False
        self._one_at_a_time: bool | None = None

    def call(self, watched: WatchedFunction, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of the program; its exceptions go to the program."""
        if self._is_over:
            return function(*args, **kwargs)
        if watched is self._step:
            return self._time(watched, function, args, kwargs)
        if watched.calls >= LOOKS:
            return function(*args, **kwargs)
        before = self._guarded(self._look_at_arguments, args, kwargs)
        outputs = function(*args, **kwargs)
        if before is not None and self._guarded(self._is_step, watched, before, outputs):
            self._wait(outputs, args)
            self._guarded(self._choose, watched, before, outputs)
        return outputs

    def write(self, **line: Any) -> None:
        """Adds a whole line to the file at once; if that fails, the timer stops."""
        text = self._kept.encode(line) + "\n"
        # If the path is a link by now, somebody else has put it there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._place, flags, 0o666)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            # If the disk of this file is full, the program must go on; it may write elsewhere.
            self._is_over = True
            sys.stderr.write(f"automesh: {self._place} cannot be written: {error.strerror}\n")

    def _guarded(self, do: Any, *args: Any) -> Any:
        """Runs code of the timer, whose failure must not reach the program."""
        try:
            return do(*args)
        except Exception as error:  # noqa: BLE001
            self._is_over = True
            text = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"automesh: the step is not timed any more: {text}\n")
            self.write(kind="error", text=text)
            return None

    def _look_at_arguments(self, args: Any, kwargs: Any) -> _ArgumentShapes | None:
        """Describes the arguments of a call; None inside of another traced function."""
        leaves = self._jax.tree_util.tree_leaves((args, kwargs))
        if any(_is_traced(leaf) for leaf in leaves):
            return None
        return _ArgumentShapes(
            shapes=tuple((str(getattr(x, "shape", "")), str(_dtype(x))) for x in leaves),
            bytes=sum(_bytes(leaf) for leaf in leaves),
            dtypes=sorted({str(_dtype(leaf)) for leaf in leaves if _is_float(leaf)}),
            devices=max((_devices(leaf) for leaf in leaves), default=0),
        )

    def _is_step(self, watched: WatchedFunction, given: _ArgumentShapes, outputs: Any) -> bool:
        """Whether the function was called often enough, and no larger function was."""
        leaves = self._jax.tree_util.tree_leaves(outputs)
        # Inside of a trace, the arguments or results are tracers.
        if any(_is_traced(leaf) for leaf in leaves):
            return False
        watched.calls += 1
        watched.shapes[given.shapes] += 1
        made = sum(_bytes(leaf) for leaf in leaves)
        self._largest_bytes = max(self._largest_bytes, given.bytes, made)
        calls = watched.shapes[given.shapes]
        if calls <= LOSS_CALLS:
            watched.losses += [float(leaf) for leaf in leaves if _is_loss(leaf)]
        known = self._step.argument_bytes if self._step is not None else -1
        return calls >= SEEN_TWICE_BEFORE and given.bytes > known

    def _choose(self, watched: WatchedFunction, given: _ArgumentShapes, outputs: Any) -> None:
        if self._one_at_a_time is None:
            self._one_at_a_time = self._jax.default_backend() == "cpu"
        watched.argument_bytes = given.bytes
        leaves = self._jax.tree_util.tree_leaves(outputs)
        self._step, self._samples, self._count = watched, [], 0
        self._size, self._found_s = 1, self._kept.clock()
        self.write(
            kind="step",
            name=watched.name,
            file=watched.file,
            line=watched.line,
            argument_bytes=given.bytes,
            devices=max([given.devices, *(_devices(leaf) for leaf in leaves)]),
        )
        self.write(kind="losses", values=watched.losses, dtypes=given.dtypes)
        self._begun_s = self._kept.clock() if watched.calls >= self._skip else 0.0

    def _time(self, watched: WatchedFunction, function: Any, args: Any, kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        if self._is_in_trace(outputs, args, kwargs):
            return outputs
        watched.calls += 1
        is_warming = not self._begun_s
        self._count += not is_warming
        # Virtual CPU devices share one pool of threads: several running steps block each other.
        if is_warming or self._count >= self._size or self._one_at_a_time:
            self._wait(outputs, args)
        if is_warming and watched.calls >= self._skip:
            self._begun_s = self._kept.clock()
        elif self._count >= self._size:
            self._guarded(self._end_sample)
        return outputs

    def _is_in_trace(self, *values: Any) -> bool:
        """Whether the step was called by a function that is being traced."""
        for value in values:
            # One leaf shows it: within a trace the outputs are tracers, normally all of them.
            leaves = self._jax.tree_util.tree_leaves(value)[:1]
            if leaves:
                return _is_traced(leaves[0])
        return False

    def _wait(self, outputs: Any, args: Any) -> None:
        """Waits for a step; an exception belongs to the program, which would have met it later."""
        references = [
            leaf for leaf in self._jax.tree_util.tree_leaves(args) if type(leaf).__name__ == "Ref"
        ]
        # jax does not wait for the content of a reference.
        written = [
            getattr(getattr(reference, "_refs", None), "_buf", None) for reference in references
        ]
        self._jax.block_until_ready((outputs, written))

    def _end_sample(self) -> None:
        step_s = (self._kept.clock() - self._begun_s) / self._count
        taken, self._count = self._count, 0
        if taken == 1 and step_s < SAMPLE_S:
            # Too short to be timed alone: this sample only shows how many steps are needed.
            self._size = min(math.ceil(SAMPLE_S / max(step_s, 1e-6)), MOST_STEPS)
        if taken > 1 or self._size == 1:
            self._samples.append((step_s, taken))
            self.write(kind="sample", seconds=step_s, steps=taken)
        if self._is_enough():
            self._finish()
        self._begun_s = self._kept.clock()

    def _is_enough(self) -> bool:
        """Whether enough samples were timed, and no larger function is expected any more."""
        assert self._step is not None
        is_large = 2 * self._step.argument_bytes >= self._largest_bytes
        if not is_large and self._kept.clock() - self._found_s < PATIENCE_S:
            return False
        count, steps = len(self._samples), sum(steps for _, steps in self._samples)
        spent_s = sum(step_s * steps for step_s, steps in self._samples)
        is_slow = count >= self._few and spent_s >= self._slow_s
        return is_slow or (count >= LEAST_SAMPLES and steps >= self._steps)

    def _finish(self) -> None:
        self._is_over = True
        self.write(kind="done")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # The program may have replaced the stream.
                stream.flush()
        # Not `sys.exit`: the program may catch its exception, and its threads would keep the
        # process alive.
        self._kept.leave(0)


@dataclass(frozen=True)
class _ArgumentShapes:
    shapes: tuple[tuple[str, str], ...]
    bytes: int
    dtypes: list[str]
    devices: int


def _is_traced(leaf: Any) -> bool:
    return any(kind.__name__ == "Tracer" for kind in type(leaf).__mro__)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf).__name__)


def _bytes(leaf: Any) -> int:
    try:
        # References have no `nbytes`, and leaves that are no arrays have no size either.
        return int(leaf.nbytes) if hasattr(leaf, "nbytes") else leaf.size * leaf.dtype.itemsize
    except Exception:  # noqa: BLE001 - random keys refuse it on some versions
        return 0


def _is_float(leaf: Any) -> bool:
    return "float" in str(_dtype(leaf))


def _is_loss(leaf: Any) -> bool:
    is_here = getattr(leaf, "is_fully_addressable", False)
    return is_here and getattr(leaf, "shape", None) == () and _is_float(leaf)


def _devices(leaf: Any) -> int:
    try:
        return len(leaf.sharding.device_set)
    except Exception:  # noqa: BLE001 - not an array on devices
        return 0
