"""Times the training step of a searched command; every Python that the command starts imports it.

Python imports the first `sitecustomize` on its path when it starts, and a search puts this folder
in front of `PYTHONPATH`. Only the standard library may be imported here: this runs in the Python of
the user's command, in which automesh need not be installed. It does nothing unless the environment
asks for it, and costs no time before `jax` is imported. A failure here is reported on stderr, and
the command goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

VARIABLE = "AUTOMESH_STEP_TIMER"
# Saved now: the command may replace these functions before it imports jax.
_CLOCK, _ENCODE, _LEAVE = time.perf_counter, json.JSONEncoder().encode, os._exit
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as short as can be


class _AwaitJax:
    """A finder of modules that starts the timer as soon as `jax` has been imported."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._is_looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec that the other finders have for `jax`, which will start the timer."""
        del path, target
        if name != "jax" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            loader.exec_module = functools.partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, execute: Any, module: Any) -> None:
        execute(module)
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.spec_from_file_location(
            "_automesh_step_timer",
            os.path.join(_HERE, "timer.py"),  # noqa: PTH118
        )
        if spec is not None and spec.loader is not None:
            timer = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = timer
            spec.loader.exec_module(timer)
            kept = timer.OriginalFunctions(clock=_CLOCK, encode=_ENCODE, leave=_LEAVE)
            timer.start(module, kept=kept, **self._options)


def _run_hidden() -> None:
    """Runs the `sitecustomize` that this one hides, if there is one."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, _AwaitJax(json.loads(os.environ[VARIABLE])))  # pyright: ignore[reportArgumentType]
_run_hidden()
