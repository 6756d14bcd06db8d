"""Leaves out of a run up to the step its profiles, and what orbax saves if the run has no arrays
(jax).

A profile of such a run is of no use, and would go on after the run until somebody ends it. In a run
with arrays, orbax saves to the private layer. Saves in the background are waited for at the end of
the run, while the layer still exists.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax

from automesh.program.capture.abstract.record import needed_at_line
from automesh.program.capture.abstract.trace import is_without_arrays
from automesh.program.capture.foreign.imported import changed_when_imported
from automesh.program.capture.world.told import tell

# Classes of orbax that save; the first argument of `save` is a folder, for a manager a step.
_SAVERS = ("CheckpointManager", "Checkpointer", "AsyncCheckpointer")
_LONGEST_SAVE_S = 20.0
_PROFILER: dict[str, Callable[..., Any]] = {
    "start_trace": lambda *_, **__: None,
    "stop_trace": lambda *_, **__: None,
    "stop_server": lambda *_, **__: None,
    "start_server": lambda *_, **__: None,
    "trace": lambda *_, **__: nullcontext(),
    "save_device_memory_profile": lambda *_, **__: None,
}


@contextmanager
def left_out() -> Generator[None]:
    """Makes profilers, and orbax without arrays, do nothing while the body runs."""
    replaced: list[tuple[Any, str, Any]] = []
    saved = _Saved()

    def replace(owner: Any, name: str, instead: Any) -> None:
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, instead)

    def see_to_orbax(module: ModuleType) -> None:
        for kind in _SAVERS:
            owner: Any = getattr(module, kind, None)
            made = {"save": _saving, "restore": _restoring, "latest_step": _latest,
                    "all_steps": _all_steps}  # fmt: skip
            for method, make in made.items():
                if owner is not None and method in vars(owner):
                    replace(owner, method, make(vars(owner)[method], saved))

    for name, instead in _PROFILER.items():
        if hasattr(jax.profiler, name):
            replace(jax.profiler, name, instead)
    try:
        with changed_when_imported({"orbax.checkpoint": see_to_orbax}):
            yield
    finally:
        _wait_for(saved.savers)
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


@dataclass(slots=True)
class _Saved:
    """The files that a run has saved with orbax, and those that it would have saved.

    Attributes:
      savers: objects that have saved arrays.
      left_out: what was not saved, because the arrays have no data: the steps of each manager, and
        folders.
    """

    savers: list[Any] = field(default_factory=list[Any])
    left_out: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])

    def steps(self, manager: Any) -> list[Any]:
        return self.left_out.setdefault(id(manager), [])

    @property
    def folders(self) -> list[Any]:
        return self.left_out.setdefault(0, [])


def _saving(original: Any, saved: _Saved) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: Any, where: Any, *args: Any, **kwargs: Any) -> Any:
        if is_without_arrays():
            tell("what the script saves with orbax was not saved: it is run without its arrays")
            if not _is_manager(self):
                return saved.folders.append(os.fspath(where))
            saved.savers.append(self)  # Kept alive, as it is recognized by its identity.
            saved.steps(self).append(where)
            return True
        if all(one is not self for one in saved.savers):
            saved.savers.append(self)
        return original(self, where, *args, **kwargs)

    return save


def _restoring(original: Any, saved: _Saved) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore(self: Any, where: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_without_arrays():
            own = saved.steps(self) if _is_manager(self) else saved.folders
            if (where is None and own) or (own and _named(where) in own):
                raise needed_at_line("reads back what the script has saved with orbax")
        return original(self, where, *args, **kwargs)

    return restore


def _latest(original: Any, saved: _Saved) -> Callable[..., Any]:
    @functools.wraps(original)
    def latest_step(self: Any) -> Any:
        known = [step for step in (original(self), *saved.steps(self)) if step is not None]
        return max(known, default=None)

    return latest_step


def _all_steps(original: Any, saved: _Saved) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_steps(self: Any, *args: Any, **kwargs: Any) -> Any:
        return [*original(self, *args, **kwargs), *saved.steps(self)]

    return all_steps


def _is_manager(saver: Any) -> bool:
    return hasattr(saver, "latest_step")


def _named(where: Any) -> Any:
    return os.fspath(where) if isinstance(where, str | os.PathLike) else where


def _wait_for(saving: list[Any]) -> None:
    def wait() -> None:
        for one in saving:
            with suppress(Exception):  # A failed save does not concern the step.
                one.wait_until_finished()

    if saving:
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        waiter.join(_LONGEST_SAVE_S)
