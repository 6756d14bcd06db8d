"""Applies the guards and modes that a script sets to its own code, but not to automesh's (jax).

A transfer guard refuses the transfers with which automesh places arguments, strict promotion
refuses automesh's own sums, and NaN checks run on all that automesh computes. Each error would be
blamed on the script. Modes change neither the program nor the numbers of a step.

Private in jax: the settings of `jax.config` with their values for one thread. Checked with jax
0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

# The settings, each with the value that checks nothing.
_MODES: dict[str, Any] = {
    "jax_transfer_guard": None,
    "jax_transfer_guard_host_to_device": None,
    "jax_transfer_guard_device_to_device": None,
    "jax_transfer_guard_device_to_host": None,
    "jax_array_garbage_collection_guard": None,
    "jax_thread_guard": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_enable_checks": False,
    "jax_check_tracer_leaks": False,
    "jax_disable_jit": False,
    "jax_log_compiles": False,
    "jax_explain_cache_misses": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}


Modes = tuple[tuple[Any, Any], ...]
"""Settings of jax, each with its value."""


@contextmanager
def outside_of_modes() -> Generator[None]:
    """Suspends the user's guards and modes during the body, which is automesh's own work."""
    with ExitStack() as stack:
        for one, quiet in _in_force():
            stack.enter_context(one("allow" if quiet is None else quiet))
        yield


@contextmanager
def inside(modes: Modes) -> Generator[None]:
    """Applies modes again during the body, which is the user's code; see `modes_in_force`."""
    with ExitStack() as stack:
        for one, value in modes:
            stack.enter_context(one(value))
        yield


def modes_in_force() -> Modes:
    """Returns the settings that the user has changed, each with its value."""
    return tuple((one, one.value) for one, _ in _in_force())


def take_back_modes() -> None:
    """Ends all modes that were set for the whole process."""
    for one, quiet in _in_force():
        jax.config.update(one.name, quiet)


def thread_values() -> list[tuple[Any, Any]]:
    """Returns the settings that can have a value for this thread alone, each with that value."""
    return [(one, one.get_local()) for one in _holders().values() if hasattr(one, "get_local")]


def put_back_thread_values(kept: list[tuple[Any, Any]]) -> None:
    """Restores the values of this thread that `thread_values` has returned."""
    settings: Any = importlib.import_module("jax._src.config")
    nothing = getattr(getattr(settings, "config_ext", None), "unset", None)
    for one, value in kept:
        if one.get_local() is value:
            continue
        one.set_local(value)
        # The context managers of jax call this hook, too, when they end.
        hook = getattr(one, "_update_thread_local_hook", None)
        if hook is not None:
            hook(None if value is nothing else value)


def _in_force() -> Iterator[tuple[Any, Any]]:
    holders = _holders()
    for name, quiet in _MODES.items():
        one = holders.get(name)
        if one is not None and hasattr(one, "get_local") and not _is_quiet(one.value, quiet):
            yield one, quiet


def _is_quiet(value: Any, quiet: Any) -> bool:
    # jax states kinds of promotion as members of an enumeration.
    said = getattr(value, "value", value)
    return said in ("allow", None) if quiet is None else said == quiet


def _holders() -> dict[str, Any]:
    config: Any = jax.config
    return getattr(config, "_value_holders", {})
