"""Changes jax so that automesh sees where a script makes meshes, and what it calls under `jax.jit`
(jax); `capture.unjitted` has what is called without jit.

The hooks are installed once and stay, as libraries keep the function that they find as `jax.jit`.
They do what jax does unless a script is being run. Private in jax: `Mesh.__new__`, which makes
every mesh (`jax.make_mesh`, `Mesh(...)`, copies), and the parameters of a `jax.stages.Traced`.
Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, Sharding

from automesh.errors import UsageError
from automesh.mesh.layout.context import is_tracing
from automesh.program.absent.device_queries import attached, shows_other_platform
from automesh.program.capture.abstract.arrays import described
from automesh.program.capture.abstract.makers import mapped
from automesh.program.capture.abstract.trace import is_without_arrays
from automesh.program.capture.flow.program import has_gradient
from automesh.program.capture.unjitted import LoopCall, hook_unjitted, in_module
from automesh.program.capture.world.meshes import text_of, with_names
from automesh.program.capture.world.modes import (
    Modes,
    inside,
    modes_in_force,
    outside_of_modes,
)
from automesh.program.capture.world.threads import end_foreign_thread
from automesh.program.kernels.stand_ins import standing_in
from automesh.program.lower.compiler_options import options_to_examine

_OPTIONS = "compiler_options"
MakeMesh = Callable[[Any, tuple[str, ...], Any], Mesh]


class Watcher(Protocol):
    """The reaction of a run to what its script asks of jax."""

    def mesh(self, make: MakeMesh, devices: Any, names: tuple[str, ...], axis_types: Any) -> Mesh:
        """Returns the mesh that the script gets."""
        ...

    def call(self, call: Call) -> Any:
        """Returns the outputs of a call of a jitted function."""
        ...

    def pmap(self, trains: Callable[[], bool]) -> None:
        """Handles a call of a function that `jax.pmap` made, before the script makes it.

        Args:
          trains: tells whether a gradient is taken in the function.
        """
        ...

    def unjitted(self, *, is_gradient: bool) -> bool:
        """Whether a gradient, or else a `shard_map`, that the script is about to call outside of
        any jit is handled like a jitted function."""
        ...

    def gradient_in_a_map(self) -> None:
        """Notes down that a gradient is taken in a `shard_map` that the script calls outside of
        any jit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a jitted function by the script.

    Attributes:
      jitted: the jitted function of jax itself, which can be traced.
      args, kwargs: the arguments of the call, static ones included.
      run: runs the call as the script asked for it.
      function: the function that was jitted.
      settings: keywords of `jax.jit` with which it was jitted; None where they are not known.
      loop: name and settings of the loop of `jax.lax` that it is; None if it is none.
    """

    jitted: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any]
    function: Any
    settings: dict[str, Any] | None = None
    loop: tuple[str, tuple[tuple[str, Any], ...]] | None = None


@dataclass(slots=True)
class _HooksState:
    """The data of this process's hooks.

    Attributes:
      origins: for each object that `lower`, `trace` or `compile` has returned while a script runs,
        by its `id`: the object, the jitted function and its arguments. The object is kept alive, so
        that no `id` is used twice.
      own_work: of each thread, whether automesh itself lowers programs in it now (`is_on`), which
        have no origin. Scripts compile in several threads.
    """

    watcher: Watcher | None = None
    is_installed: bool = False
    own_work: threading.local = field(default_factory=threading.local)
    origins: dict[int, tuple[Any, Jitted, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=dict[int, "tuple[Any, Jitted, tuple[Any, ...], dict[str, Any]]"]
    )


_STATE = _HooksState()


class _OfThread(threading.local):
    """The calls that are in progress in a thread.

    Attributes:
      maps: how many calls of a `shard_map` outside of jit, one in another.
    """

    maps = 0


_THREAD = _OfThread()
# Whether the bodies of loops take gradients, by the form of their call.
_TRAINS: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


@contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Lets `watcher` answer for meshes and for calls of jitted functions while the body runs."""
    _install()
    _STATE.watcher = watcher
    try:
        yield
    finally:
        _STATE.watcher = None
        _STATE.origins.clear()


class Jitted:
    """The object that `jax.jit` returns to a script: a jitted function whose calls the watcher
    sees."""

    def __init__(
        self,
        inner: Any,
        function: Any,
        settings: dict[str, Any] | None = None,
        jit: Callable[..., Any] | None = None,
    ) -> None:
        self.automesh_inner = inner
        self.automesh_function = function
        self.automesh_settings = settings
        self._automesh_jit = jit
        self._automesh_local: Any = None
        functools.update_wrapper(self, function, updated=())

    def automesh_here(self) -> Any:
        """Returns the jitted function as this machine can run it: without options of a compiler
        for devices that are not here."""
        settings, jit = self.automesh_settings, self._automesh_jit
        if jit is None or not (settings and settings.get(_OPTIONS)) or not shows_other_platform():
            return self.automesh_inner
        if self._automesh_local is None:
            known = {name: value for name, value in settings.items() if name != _OPTIONS}
            self._automesh_local = jit(self.automesh_function, **known)
        return self._automesh_local

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = _STATE.watcher
        if watcher is None:
            end_foreign_thread()
        if watcher is None or is_tracing():
            with _out_of_maps():
                return self.automesh_inner(*args, **kwargs)
        return _seen(
            watcher,
            Call(
                jitted=self.automesh_inner,
                args=args,
                kwargs=kwargs,
                run=lambda: self.automesh_here()(*args, **kwargs),
                function=self.automesh_function,
                settings=self.automesh_settings,
            ),
        )

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.automesh_inner, name)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function, as `jax.jit(...).trace` does."""
        stated, keywords = described((args, kwargs))
        return self._remembered(self.automesh_inner.trace(*stated, **keywords), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function, as `jax.jit(...).lower` does."""
        stated, keywords = described((args, kwargs))
        return self._remembered(self.automesh_here().lower(*stated, **keywords), args, kwargs)

    def _remembered(self, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _STATE.watcher is not None and not getattr(_STATE.own_work, "is_on", False):
            _STATE.origins[id(made)] = (made, self, args, kwargs)
        return made


class _InItsModes:
    """A jitted function that is traced in the modes that were in force at its call."""

    def __init__(self, inner: Any, modes: Modes) -> None:
        self._inner = inner
        self._modes = modes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with inside(self._modes):
            return self._inner(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function, as `jax.jit(...).trace` does, in these modes."""
        with inside(self._modes):
            return self._inner.trace(*args, **kwargs)


def _seen(watcher: Watcher, call: Call) -> Any:
    """Passes a call to the watcher. The script's modes are suspended while the watcher works, and
    apply while it runs the call."""
    modes = modes_in_force()
    if not modes:
        return watcher.call(call)

    def run() -> Any:
        with inside(modes):
            return call.run()

    with outside_of_modes():
        return watcher.call(replace(call, jitted=_InItsModes(call.jitted, modes), run=run))


def _install() -> None:
    if _STATE.is_installed:
        return
    if "__new__" not in vars(Mesh):
        raise UsageError(
            f"a script without `build` cannot be run with jax {jax.__version__}, whose meshes are "
            "made in another way",
            hint="use jax 0.10.1 to 0.12, or write a function `build(mesh)`",
        )
    _STATE.is_installed = True
    _hook_meshes()
    _hook_jit()
    _hook_compiled()


def _hook_meshes() -> None:
    original: Any = vars(Mesh)["__new__"]
    original = original.__func__ if isinstance(original, staticmethod) else original

    def make(cls: type[Mesh], devices: Any, axis_names: Any, axis_types: Any = None) -> Mesh:
        watcher = _STATE.watcher
        if watcher is None:
            return original(cls, devices, axis_names, axis_types)
        given = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        # Members of an enumeration of texts are equal to their texts, and the script's alone.
        names = tuple(map(text_of, given))

        def really(devices: Any, names: tuple[str, ...], axis_types: Any) -> Mesh:
            return original(cls, devices, names, axis_types)

        return with_names(watcher.mesh(really, devices, names, axis_types), given)

    Mesh.__new__ = make


def _hook_jit() -> None:
    original = jax.jit

    @functools.wraps(original)
    def jit(fun: Any = None, **settings: Any) -> Any:
        # A decorator with arguments. It is wrapped without a watcher, too, as a library may keep it
        # and call it later.
        if fun is None:
            return functools.partial(jit, **settings)
        return Jitted(original(fun, **settings), fun, settings, original)

    mapped: Any = jax.pmap

    @functools.wraps(mapped)
    def pmap(*args: Any, **kwargs: Any) -> Any:
        return _Mapped(mapped(*args, **kwargs))

    def unjitted(
        function: Any,
        inner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_gradient: bool,
    ) -> Any:
        watcher = _STATE.watcher
        if watcher is None or is_tracing():
            return inner(*args, **kwargs)
        if not watcher.unjitted(is_gradient=is_gradient):
            with _in_a_map(is_map=not is_gradient):
                return inner(*args, **kwargs)
        call = Call(
            jitted=original(inner),
            args=args,
            kwargs=kwargs,
            run=lambda: inner(*args, **kwargs),
            function=function,
        )
        return _seen(watcher, call)

    def loop(called: LoopCall) -> Any:
        watcher = _STATE.watcher
        if watcher is None or not _loop_trains(called):
            return called.function(*called.args)
        call = Call(
            jitted=original(called.function),
            args=called.args,
            kwargs={},
            run=lambda: called.function(*called.args),
            function=called.function,
            settings={},
            loop=(called.name, called.settings),
        )
        return _seen(watcher, call)

    owner: Any = jax
    owner.jit, owner.pmap = jit, pmap
    _hook_pjit()
    hook_unjitted(unjitted, _gradient_in_a_map, loop)


@contextmanager
def _in_a_map(*, is_map: bool) -> Generator[None]:
    """Counts a call of a `shard_map` outside of jit as in progress while the body runs."""
    _THREAD.maps += is_map
    try:
        yield
    finally:
        _THREAD.maps -= is_map


@contextmanager
def _out_of_maps() -> Generator[None]:
    """Lets gradients in the body be those of a jitted function, which a `shard_map` calls."""
    before, _THREAD.maps = _THREAD.maps, 0
    try:
        yield
    finally:
        _THREAD.maps = before


def _gradient_in_a_map() -> None:
    if _STATE.watcher is not None and _THREAD.maps:
        _STATE.watcher.gradient_in_a_map()


def _loop_trains(called: LoopCall) -> bool:
    """Whether a gradient is taken in a loop."""
    leaves, tree = jax.tree.flatten(called.args)
    forms = tuple((jax.numpy.shape(leaf), str(jax.numpy.result_type(leaf))) for leaf in leaves)
    key = (called.name, called.settings, tree, forms)
    try:
        known = _TRAINS.setdefault(called.body, {})
        if key not in known:
            known[key] = _takes_gradient(called.function, called.args, {})
        return known[key]
    except TypeError:  # The body, or what is static in its arguments, cannot be a key.
        return _takes_gradient(called.function, called.args, {})


def _hook_pjit() -> None:
    """Replaces `pjit`, the former name of `jax.jit`, as long as jax has it."""
    for name in ("jax.experimental.pjit", "jax._src.pjit"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        original = in_module(module, "pjit")
        if original is None:
            continue

        def pjit(fun: Any, *args: Any, original: Any = original, **settings: Any) -> Any:
            inner = original(fun, *args, **settings)
            return Jitted(inner, fun, None if args else settings)

        module.pjit = functools.wraps(original)(pjit)


class _Mapped:
    """The object that `jax.pmap` returns to a script: a function whose calls the watcher sees."""

    def __init__(self, inner: Any) -> None:
        self._automesh_inner = inner
        functools.update_wrapper(self, inner, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner, watcher = self._automesh_inner, _STATE.watcher
        if watcher is None or is_tracing():
            return inner(*args, **kwargs)
        watcher.pmap(lambda: _trains_unseen(inner, args, kwargs))
        with _unseen():
            if is_without_arrays():
                return mapped(inner, args, kwargs)
            return inner(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._automesh_inner, name)


@contextmanager
def _unseen() -> Generator[None]:
    """Hides from the watcher what jax itself does in the body: `jax.pmap` makes meshes, too."""
    watcher, _STATE.watcher = _STATE.watcher, None
    try:
        yield
    finally:
        _STATE.watcher = watcher


def _trains_unseen(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    with _unseen():
        return _takes_gradient(function, args, kwargs)


def _takes_gradient(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient is taken in a function; True if it cannot be traced."""
    leaves, tree = jax.tree.flatten(described((args, kwargs)))
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def called(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        whole = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
        args, kwargs = tree.unflatten(whole)
        return function(*args, **kwargs)

    try:
        return has_gradient(jax.make_jaxpr(called)(*(leaves[place] for place in places)).jaxpr)
    except Exception:  # noqa: BLE001 - what is wrong with its call is said when it is made
        return True


def _hook_compiled() -> None:
    """Makes calls of `jit(f).lower(...).compile()` seen like calls of `f`."""
    compile_, call = jax.stages.Lowered.compile, jax.stages.Compiled.__call__
    lower = jax.stages.Traced.lower

    def lowered(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_elsewhere = _STATE.watcher is not None and shows_other_platform() and not kwargs
        with standing_in([self.jaxpr] if is_elsewhere else []):
            return _passed_on(self, lower(self, *args, **kwargs))

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_scripts = id(self) in _STATE.origins
        if is_scripts and is_without_arrays():
            # The programs by which automesh asks for options are not the script's.
            with _not_remembered():
                args, kwargs = (), {_OPTIONS: options_to_examine(attached()[0])}
        elif is_scripts and shows_other_platform():
            args, kwargs = (), {}  # Options of a compiler that is not asked here.
        return _passed_on(self, compile_(self, *args, **kwargs))

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher, origin = _STATE.watcher, _STATE.origins.get(id(self))
        if watcher is None or origin is None or is_tracing():
            return call(self, *args, **kwargs)
        _, jitted, lowered_with, keywords = origin
        inner = jitted.automesh_inner
        whole = _with_static(inner, args, lowered_with)
        given = {**keywords, **kwargs}

        def run() -> Any:
            # A compiled function takes only real arrays.
            if is_without_arrays():
                return jitted.automesh_here()(*whole, **given)
            return call(self, *args, **kwargs)

        return _seen(
            watcher,
            Call(
                jitted=inner,
                args=whole,
                kwargs=given,
                run=run,
                function=jitted.automesh_function,
                settings=jitted.automesh_settings,
            ),
        )

    owners: list[tuple[Any, str, Any]] = [
        (jax.stages.Traced, "lower", lowered),
        (jax.stages.Lowered, "compile", compiled),
        (jax.stages.Compiled, "__call__", called),
    ]
    for owner, name, function in owners:
        setattr(owner, name, functools.wraps(getattr(owner, name))(function))


@contextmanager
def _not_remembered() -> Generator[None]:
    _STATE.own_work.is_on = True
    try:
        yield
    finally:
        _STATE.own_work.is_on = False


def _passed_on(before: Any, made: Any) -> Any:
    origin = _STATE.origins.get(id(before))
    if origin is not None:
        _STATE.origins[id(made)] = (made, *origin[1:])
    return made


def _with_static(inner: Any, args: Sequence[Any], lowered_with: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments of a compiled function together with the static ones that it was
    lowered with."""
    if len(args) == len(lowered_with):
        return tuple(args)
    info: Any = getattr(inner, "_jit_info", None)
    static = set(info.static_argnums) if info is not None else set[int]()
    rest = iter(args)
    return tuple(
        arg if position in static else next(rest) for position, arg in enumerate(lowered_with)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JitSettings:
    """The settings with which `jax.jit` made a function, per leaf of its arguments and outputs.

    Attributes:
      constants: leading inputs of the traced program that are not arguments of the function.
      in_shardings, out_shardings: per leaf; None where none was stated.
      donated: per leaf of the arguments, whether it is donated.
      compiler_options: as given to `jax.jit`.
    """

    constants: tuple[Any, ...]
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    donated: tuple[bool, ...]
    compiler_options: dict[str, Any]


def settings_of(traced: jax.stages.Traced) -> JitSettings:
    """Returns what the function of a trace was jitted with.

    Raises:
      UsageError: this version of jax does not say.
    """
    known: Any = traced
    try:
        params, constants = known._params, tuple(known._consts)
        return JitSettings(
            constants=constants,
            in_shardings=tuple(map(_stated, params["in_shardings"]))[len(constants) :],
            out_shardings=tuple(map(_stated, params["out_shardings"])),
            donated=tuple(params["donated_invars"])[len(constants) :],
            compiler_options=dict(params["compiler_options_kvs"]),
        )
    except (AttributeError, KeyError) as error:
        raise UsageError(
            f"jax {jax.__version__} does not say how a function was jitted ({error})",
            hint="use jax 0.10.1 to 0.12, or write a function `build(mesh)`",
        ) from error


def _stated(sharding: Any) -> Sharding | None:
    return sharding if isinstance(sharding, Sharding) else None
