"""Libraries of C++ that write past the private layer: left out, or led there (jax).

A profile of a run up to the step is of no use, and one that is begun is in force until it is ended.
What orbax saves goes through tensorstore, so nothing is saved. Files of safetensors and HDF5 are
written in the layer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax

from automesh.program.capture.world.kept_apart import path_for
from automesh.program.capture.world.told import tell

_ORBAX = "orbax.checkpoint"
# Of orbax: classes with their methods that save, and what these give.
_SAVES = {
    "CheckpointManager": {"save": True},
    "Checkpointer": {"save": None},
    "AsyncCheckpointer": {"save": None},
}
# Modules with functions that take the path of a file: the position of the path, and the mode that
# the function always has; where it takes one, its position.
_WITH_PATHS: dict[str, dict[str, tuple[int, str | int]]] = {
    "safetensors.numpy": {"save_file": (1, "w"), "load_file": (0, "r")},
    "safetensors.flax": {"save_file": (1, "w"), "load_file": (0, "r")},
    "safetensors.torch": {"save_file": (1, "w"), "load_file": (0, "r")},
}
_PROFILER: dict[str, Callable[..., Any]] = {
    "start_trace": lambda *_, **__: None,
    "stop_trace": lambda *_, **__: None,
    "stop_server": lambda *_, **__: None,
    "start_server": lambda *_, **__: None,
    "trace": lambda *_, **__: nullcontext(),
    "save_device_memory_profile": lambda *_, **__: None,
}


@dataclass(slots=True)
class _SideEffectsState:
    """Of this process.

    Attributes:
      replaced: what stood under a name of a module or class before, to be put back.
      done: modules that were seen to in this run.
    """

    is_captured: bool = False
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list[tuple[Any, str, Any]])
    done: set[str] = field(default_factory=set[str])


_STATE = _SideEffectsState()


@contextmanager
def left_out() -> Generator[None]:
    """While the body runs, what it would write by way of C++ is left out or kept apart."""
    profiler: Any = jax.profiler
    for name, instead in _PROFILER.items():
        if hasattr(profiler, name):
            _replace(profiler, name, instead)
    _STATE.is_captured = True
    look_again()
    try:
        yield
    finally:
        _STATE.is_captured = False
        for owner, name, original in reversed(_STATE.replaced):
            setattr(owner, name, original)
        _STATE.replaced.clear()
        _STATE.done.clear()


def look_again() -> None:
    """Sees to libraries that the script has imported since then."""
    if not _STATE.is_captured:
        return
    for name in (_ORBAX, "h5py", *_WITH_PATHS):
        if name in sys.modules and name not in _STATE.done:
            _STATE.done.add(name)
            _see_to(name, sys.modules[name])


def _see_to(name: str, module: Any) -> None:
    if name == _ORBAX:
        for kind, methods in _SAVES.items():
            owner = getattr(module, kind, None)
            for method, gives in methods.items():
                if owner is not None and method in vars(owner):
                    _replace(owner, method, _not_saving(gives))
        return
    if name == "h5py":
        owner = getattr(module, "File", None)
        if owner is not None:
            _replace(owner, "__init__", _with_path(owner.__init__, 1, 2))
        return
    for function, (position, mode) in _WITH_PATHS[name].items():
        if hasattr(module, function):
            _replace(module, function, _with_path(getattr(module, function), position, mode))


def _replace(owner: Any, name: str, instead: Any) -> None:
    _STATE.replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, instead)


def _not_saving(gives: Any) -> Callable[..., Any]:
    def save(*_: Any, **__: Any) -> Any:
        tell("what the script saves with orbax was not saved")
        return gives

    return save


def _with_path(original: Callable[..., Any], position: int, mode: str | int) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        said = mode
        if isinstance(said, int):
            given = args[said] if len(args) > said else kwargs.get("mode")
            said = given if isinstance(given, str) else "r"
        if len(args) > position:
            place = path_for(args[position], said)
            args = (*args[:position], place, *args[position + 1 :])
        return original(*args, **kwargs)

    return call
