"""Uses jax's persistent compilation cache, so that visits need not compile again (jax).

jax writes entries in place and never replaces one: an entry that a kill has damaged would be
compiled again, with a warning, in every process. So this module removes entries that cannot be
read.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from automesh import limits
from automesh.reading import read_bytes

_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']*)'")


def use(directory: str) -> None:
    """Makes jax keep all executables of this process, even of short compiles, in `directory`."""
    if _directory() != directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        # jax opens its cache only once.
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def leave() -> None:
    """Turns the cache off: executables for absent devices cannot be read back.

    A script or an environment variable may have turned it on.
    """
    if _directory() is not None:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", None)


def _directory() -> str | None:
    config: Any = jax.config
    return config.jax_compilation_cache_dir


@contextmanager
def repaired() -> Generator[None]:
    """Removes the entries that jax cannot read while the body compiles; passes other warnings
    on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if match := _UNREADABLE.search(str(warning.message)):
            _remove_torn(match[1])
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _remove_torn(name: str) -> None:
    directory = _directory()
    if directory is None:
        return
    for entry in Path(directory).glob(f"{name}-*-cache"):
        if not _readable(entry):
            # The next compile writes it again; another process may have removed it already.
            entry.unlink(missing_ok=True)


def _readable(entry: Path) -> bool:
    decompress = _decompress()
    if decompress is None:
        return False
    try:
        decompress(read_bytes(entry, limit_bytes=limits.MODULE_BYTES))
    # The kind of exception depends on the compression library in use.
    except Exception:  # noqa: BLE001
        return False
    return True


def _decompress() -> Callable[[bytes], Any] | None:
    """Returns jax's own private function to decompress entries; without it every entry in question
    counts as damaged."""
    module = importlib.import_module("jax._src.compilation_cache")
    return getattr(module, "decompress_executable", None)
