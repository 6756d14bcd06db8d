"""Makes a script that is run up to its step believe that it is the only process of its job (jax).

`jax.distributed.initialize` connects to nothing. Afterwards libraries find one process, wherever
they ask: `jax.distributed.is_initialized`, the process id and the number of processes that jax
keeps, and a client with barriers that are passed at once and keys that are kept in this process.

Private in jax: `jax._src.distributed.global_state`, which orbax, etils and others read. Checked
with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from automesh.program.absent.device_queries import attached, hidden_processes
from automesh.program.capture.world.told import tell

# Seconds to wait for a key: what no thread has set by then will not come.
_LONGEST_WAIT_S = 10.0
_FIELDS = ("client", "process_id", "num_processes", "coordinator_address")


@dataclass(slots=True)
class _OneProcessState:
    """Whether this process pretends to be the only one of its job.

    Attributes:
      is_captured: whether a script is being run up to its step.
      is_joined: whether the script has called `jax.distributed.initialize`.
    """

    is_captured: bool = False
    is_joined: bool = False
    is_installed: bool = False


_STATE = _OneProcessState()


class LonelyClient:
    """The client of a distributed runtime with one process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._is_set = threading.Condition()

    def connect(self) -> None:
        """Does nothing: there is no other process to connect to."""

    def shutdown(self) -> None:
        """Does nothing: there is nothing to end."""

    def wait_at_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: all processes have arrived, as there is only this one."""

    def get_live_nodes(self, *_: Any, **__: Any) -> dict[int, Any]:
        """Returns process 0, which is alive."""
        return {0: None}

    def key_value_set(self, key: str, value: Any, allow_overwrite: bool = False) -> None:
        """Keeps a value.

        Raises:
          JaxRuntimeError: the key has a value already, which may not be replaced.
        """
        with self._is_set:
            if key in self._values and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
            self._values[key] = value
            self._is_set.notify_all()

    key_value_set_bytes = key_value_set

    def blocking_key_value_get(self, key: str, timeout_in_ms: int = 0) -> Any:
        """Waits until a thread of this process has set a key, and returns the value.

        Raises:
          JaxRuntimeError: no thread has set it in time; there is no other process that could.
        """
        limit_s = min(timeout_in_ms / 1000, _LONGEST_WAIT_S)
        with self._is_set:
            if not self._is_set.wait_for(lambda: key in self._values, limit_s):
                raise JaxRuntimeError(
                    f"DEADLINE_EXCEEDED: there is one process, and it set no key {key}"
                )
            return self._values[key]

    blocking_key_value_get_bytes = blocking_key_value_get

    def key_value_try_get(self, key: str) -> Any:
        """Returns the value of a key.

        Raises:
          JaxRuntimeError: it has no value.
        """
        if key not in self._values:
            raise JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self._values[key]

    key_value_try_get_bytes = key_value_try_get

    def key_value_increment(self, key: str, increment: int = 1) -> int:
        """Adds to a number that is kept as text, and returns the sum."""
        value = int(self._values.get(key, 0)) + increment
        self._values[key] = str(value)
        return value

    def key_value_dir_get(self, key: str) -> list[tuple[str, Any]]:
        """Returns all keys below a given one, with their values."""
        folder = key if key.endswith("/") else f"{key}/"
        return [pair for pair in self._values.items() if pair[0].startswith(folder)]

    key_value_dir_get_bytes = key_value_dir_get

    def key_value_delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""
        folder = f"{key.rstrip('/')}/"
        for one in [one for one in self._values if one == key or one.startswith(folder)]:
            del self._values[one]


@dataclass(frozen=True, slots=True)
class _Kept:
    """jax's own state before a run."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])


@contextmanager
def alone() -> Generator[None]:
    """Makes the script of the body the only process of its job."""
    _install()
    state = _global_state()
    kept = _Kept(values={name: getattr(state, name) for name in _FIELDS if hasattr(state, name)})
    _STATE.is_captured, _STATE.is_joined = True, False
    try:
        yield
    finally:
        _STATE.is_captured = _STATE.is_joined = False
        for name, value in kept.values.items():
            setattr(state, name, value)
        if processes := hidden_processes():
            tell(
                f"the script was shown one process with all {len(attached())} devices, where the "
                f"target has {processes} processes; if it makes its mesh from the number of "
                "processes or of local devices, its own mesh is another one there than that with "
                "which others are compared: name it with `--baseline`"
            )


def _global_state() -> Any:
    return importlib.import_module("jax._src.distributed").global_state


def _install() -> None:
    if _STATE.is_installed:
        return
    _STATE.is_installed = True

    def initialize() -> None:
        _STATE.is_joined = True
        # jax would hand the client to the devices that it makes.
        attached()
        state = _global_state()
        state.client, state.process_id, state.num_processes = LonelyClient(), 0, 1

    def shutdown() -> None:
        _STATE.is_joined = False
        _global_state().client = None

    _replace("initialize", lambda *_, **__: initialize())
    _replace("shutdown", lambda *_, **__: shutdown())
    _replace("is_initialized", lambda *_, **__: _STATE.is_joined)


def _replace(name: str, instead: Callable[..., Any]) -> None:
    original = getattr(jax.distributed, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if _STATE.is_captured else original)(*args, **kwargs)

    setattr(jax.distributed, name, call)
