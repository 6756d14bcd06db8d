"""Restores, before the next run, what a run of a script has changed in this process (jax).

Meshes in force, and the modes in which jax checks what a script does, are restored at once, since
automesh works on in this process. Settings of jax with which the step was traced (`jax_enable_x64`)
stay until the next run begins, since the step is lowered and run with them.

Private in jax and absl: the settings of `jax.config` with their values for one thread, the mesh of
`with mesh:`, and absl's table of flags. Checked with jax 0.10.1 to 0.12.0.1 and absl 2.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import multiprocessing.context
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from automesh.package import is_users_file
from automesh.program.capture.world.meshes import names_put_back
from automesh.program.capture.world.modes import (
    put_back_thread_values,
    take_back_modes,
    thread_values,
)

# The modules of jax that keep a mesh in force, each with the attribute that holds it.
_CONTEXTS = {
    "jax._src.mesh": ("abstract_mesh_context_manager", "device_context"),
    "jax._src.config": (
        "abstract_mesh_context_manager",
        "device_context",
        "mesh_context_manager",
    ),
}


@dataclass(slots=True)
class _PutBackState:
    """The state from which every run of this process starts.

    Attributes:
      settings: jax's settings for the whole process, before the first run.
    """

    settings: dict[str, Any] | None = None


_STATE = _PutBackState()


@contextmanager
def taken_back() -> Generator[None]:
    """Runs the body with the settings that the first run of this process began with, then restores
    what the body leaves in force."""
    _begin_as_the_first()
    kinds = (_process, _logging, _numpy, _mesh_in_force, names_put_back, _absl)
    before = [one() for one in kinds]
    try:
        yield
    finally:
        take_back_modes()
        for put_back in reversed(before):
            put_back()


def _begin_as_the_first() -> None:
    config: Any = jax.config
    holders = {
        name: one
        for name, one in getattr(config, "_value_holders", {}).items()
        if hasattr(one, "get_global")
    }
    if _STATE.settings is None:
        _STATE.settings = {name: one.get_global() for name, one in holders.items()}
        return
    for name, value in _STATE.settings.items():
        if holders[name].get_global() != value:
            # Some settings refuse changes once jax has its devices; these were not changed since
            # then.
            with suppress(RuntimeError):
                config.update(name, value)


def _process() -> Callable[[], None]:
    environ, folder = dict(os.environ), os.getcwd()
    path, argv = list(sys.path), list(sys.argv)
    streams = sys.stdin, sys.stdout, sys.stderr
    hooks = sys.excepthook, threading.excepthook
    known_filters: Any = warnings.filters
    limit, filters = sys.getrecursionlimit(), list(known_filters)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    start: Any = multiprocessing.context
    method = start._default_context._actual_context

    def put_back() -> None:
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)
        os.chdir(folder)
        sys.path[:], sys.argv[:] = path, argv
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.excepthook, threading.excepthook = hooks
        sys.setrecursionlimit(limit)
        known_filters[:] = filters
        start._default_context._actual_context = method
        # A timer of the script that goes off later would find its handler gone, and end the
        # process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                # A handler that C code has set cannot be set from Python.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)

    return put_back


def _logging() -> Callable[[], None]:
    root = logging.getLogger()
    known = {one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)}
    kept = [
        (one, list(one.handlers), one.level, one.disabled, one.propagate) for one in (root, *known)
    ]
    disabled = root.manager.disable

    def put_back() -> None:
        for one, handlers, level, off, propagate in kept:
            one.handlers[:] = handlers
            one.setLevel(level)
            one.disabled, one.propagate = off, propagate
        root.manager.disable = disabled
        for one in list(root.manager.loggerDict.values()):
            if isinstance(one, logging.Logger) and one not in known:
                one.handlers.clear()

    return put_back


def _numpy() -> Callable[[], None]:
    errors, printed = np.geterr(), np.get_printoptions()

    def put_back() -> None:
        np.seterr(**errors)
        np.set_printoptions(**printed)

    return put_back


def _mesh_in_force() -> Callable[[], None]:
    contexts: list[tuple[Any, Any]] = []
    for module, names in _CONTEXTS.items():
        for name in names:
            one: Any = getattr(importlib.import_module(module), name, None)
            if hasattr(one, "get_local"):
                contexts.append((one, one.get_local()))
    settings = thread_values()
    # The mesh of `with mesh:`.
    resources: Any = getattr(importlib.import_module("jax._src.mesh"), "thread_resources", None)
    env, stack = getattr(resources, "env", None), list(getattr(resources, "stack", ()))

    def put_back() -> None:
        put_back_thread_values(settings)
        for one, value in contexts:
            if one.get_local() is not value:
                one.set_local(value)
        if env is not None and resources.env is not env:
            resources.env = env
            resources.stack[:] = stack

    return put_back


def _absl() -> Callable[[], None]:
    """Returns what restores absl's flags: absl keeps them for the whole process and refuses to
    define one twice."""
    flags: Any = getattr(sys.modules.get("absl.flags"), "FLAGS", None)
    known: dict[str, Any] = {name: flags[name] for name in flags} if flags is not None else {}

    def put_back() -> None:
        flags: Any = getattr(sys.modules.get("absl.flags"), "FLAGS", None)
        if flags is None:
            return
        owners = {
            flag.name: owner
            for owner, defined in flags.flags_by_module_dict().items()
            for flag in defined
        }
        for name in set(flags) - known.keys():
            if name in flags and (_is_users(owners.get(name, "")) or "." in name):
                delattr(flags, name)
        # Flags of libraries stay, since their modules do; they may be defined anew.
        for name in set(flags):
            if flags[name] is not known.get(name):
                flags[name].allow_override = True
        flags.unparse_flags()

    return put_back


def _is_users(name: str) -> bool:
    # absl calls the main module by the path of the script.
    module = sys.modules.get(name)
    file: Any = name if module is None else getattr(module, "__file__", None)
    return name == "__main__" or (isinstance(file, str) and is_users_file(file))
