"""Runs a script as Python runs it, until a watcher stops it (jax)."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automesh.package import is_users_file
from automesh.program.capture.hooks import Watcher, watching
from automesh.program.nouns import Entry

# Modules of the user's that runs have imported in this process.
_IMPORTED: set[str] = set()


class ScriptStopped(BaseException):
    """Ends a script at its step. No `Exception`, which user code may catch and go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a script ended, if it was not stopped.

    Attributes:
      error: what it raised; None for its last line.
      exit_code: of `sys.exit`; 0 without one.
    """

    error: Exception | None = None
    exit_code: int = 0


def run_script(entry: Entry, watcher: Watcher) -> Ended | None:
    """Runs the script from its first line, as `__main__`, with its own arguments.

    Modules of the user's that an earlier run has imported are imported anew: what they hold was
    made for another mesh.

    Returns:
      How it ended; None if the watcher stopped it.
    """
    path = Path(entry.location)
    for name in _IMPORTED:
        sys.modules.pop(name, None)
    before = set(sys.modules)
    sys.argv = [str(path), *entry.argv]
    folder = str(path.parent)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    with watching(watcher), _flags_of_its_own():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except ScriptStopped:
            return None
        except SystemExit as ended:
            return Ended(exit_code=_exit_code(ended.code))
        # Whatever the user's code raises is told with its line.
        except Exception as error:  # noqa: BLE001
            return Ended(error=error)
        finally:
            sys.stdout.flush()
            _IMPORTED.update(name for name in sys.modules.keys() - before if _is_users_module(name))
    return Ended()


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    # As Python does with `sys.exit("what is wrong")`.
    sys.stderr.write(f"{code}\n")
    return 1


@contextmanager
def _flags_of_its_own() -> Generator[None]:
    """absl keeps flags for the whole process and refuses to define one twice: those of the user's
    modules go with the run."""
    try:
        yield
    finally:
        module: Any = sys.modules.get("absl.flags")
        flags: Any = getattr(module, "FLAGS", None)
        if flags is not None:
            for owner, defined in list(flags.flags_by_module_dict().items()):
                if _is_users_module(owner):
                    for flag in list(defined):
                        if flag.name in flags:
                            delattr(flags, flag.name)
            flags.unparse_flags()


def _is_users_module(name: str) -> bool:
    # absl calls the main module by the path of the script.
    module = sys.modules.get(name)
    file: Any = name if module is None else getattr(module, "__file__", None)
    return name == "__main__" or (isinstance(file, str) and is_users_file(file))
